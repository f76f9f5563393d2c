"""Renders results.json as a Markdown table."""

from report import machine_line  # benches/tf


def _range(spread, factor=1.0, digits=3):
    text = lambda value: f"{value * factor:,.0f}" if abs(value * factor) >= 100 else f"{value * factor:.{digits}g}"  # noqa: E731
    if spread["min"] == spread["max"]:
        return text(spread["median"])
    return f"{text(spread['median'])} ({text(spread['min'])} … {text(spread['max'])})"


ROWS = [
    ("steps/s", lambda r: _range(r["steps_per_s"])),
    ("messages (calls, and tensors that travel by themselves)/s", lambda r: _range(r["calls_per_s"])),
    ("step p50, ms", lambda r: _range(r["p50_s"], 1e3)),
    ("step p99, ms", lambda r: _range(r["p99_s"], 1e3)),
    ("CPU of the server per step, ms", lambda r: _range(r["server"]["cpu_s_per_step"], 1e3)),
    ("CPU of the server per message, µs", lambda r: _range(r["server"]["cpu_s_per_call"], 1e6)),
    ("CPU of the simulation per step, ms", lambda r: _range(r["swarm_cpu_s_per_step"], 1e3)),
    ("server's memory per worker, connected, KiB", lambda r: _range(r["server"]["rss_per_worker_connected"], 1 / 1024)),
    ("… with session (and graph), KiB", lambda r: _range(r["server"]["rss_per_worker_ready"], 1 / 1024)),
    ("… after one step of each, KiB", lambda r: _range(r["server"]["rss_per_worker_warm"], 1 / 1024)),
    ("… after all steps, KiB", lambda r: _range(r["server"]["rss_per_worker_after"], 1 / 1024)),
    ("server's memory at the peak, MiB", lambda r: _range(r["server"]["rss_peak"], 2**-20)),
    ("threads of the server", lambda r: _range(r["server"]["threads"])),
]


def kept(results, protocol):
    """Steps/s with the most workers, relative to one worker and to the best; the same for steps per CPU second of the server."""
    measured = {int(n): r for n, r in results["results"][protocol].items()}
    if len(measured) < 2:
        return None
    shares = []
    for rates in ({n: r["steps_per_s"]["median"] for n, r in measured.items()}, {n: 1 / r["server"]["cpu_s_per_step"]["median"] for n, r in measured.items()}):
        last = rates[max(rates)]
        shares += [last / rates[min(rates)], last / max(rates.values())]
    return shares


def _step(protocol, by_count):
    one = next(iter(by_count.values()))
    calls, pulls, pushes = one["operations"]
    alone = f"{pulls} tensors pulled from the server and {pushes} pushed to it" if pulls + pushes else f"{one['tensors']} tensors in them"
    return f"`{protocol}`: a step is {calls} calls, {alone}."


def table(results):
    one = next((r for by_count in results["results"].values() for r in by_count.values()), None)
    if one is None:
        return "nothing was measured\n"
    steps = " ".join(_step(protocol, by_count) for protocol, by_count in results["results"].items() if by_count)
    lines = [f"Machine: {machine_line(results['machine'])}.", ""]
    lines += [
        f"{results['model']}, one server. {steps} {results['rounds']} turns, each with a fresh server, in alternation; "
        "median (min … max).", ""
    ]  # fmt: skip
    lines += ["| workers | measure | " + " | ".join(f"`{p}`" for p in results["protocols"]) + " |", "|" + "---|" * (2 + len(results["protocols"]))]
    for count in results["workers"]:
        cells = [results["results"][protocol].get(str(count)) for protocol in results["protocols"]]
        for index, (heading, show) in enumerate(ROWS):
            lines.append(f"| {count if index == 0 else ''} | {heading} | " + " | ".join(show(cell) if cell else "–" for cell in cells) + " |")
    lines.append("")
    for protocol in results["protocols"]:
        shares = kept(results, protocol)
        if shares:
            most, one = max(results["workers"]), min(results["workers"])
            to_one, to_best, cpu_to_one, cpu_to_best = (f"{100 * share:.0f} %" for share in shares)
            lines.append(f"* `{protocol}`: with {most} workers {to_one} of the steps/s of {one}, {to_best} of the best; per CPU second of the server {cpu_to_one} and {cpu_to_best}.")
    return "\n".join(lines) + "\n"
