"""Renders results.json as a Markdown table."""

import math


def _engineering(value, unit):
    if value is None or math.isnan(value):
        return "–"
    if unit in ("s", "CPU s"):
        for factor, name in ((1, ""), (1e3, "m"), (1e6, "µ")):
            if value * factor >= 1 or factor == 1e6:
                return f"{value * factor:.3g} {name}s"
    if unit == "B/s":
        return f"{value / 1e9:.2f} GB/s" if value >= 1e9 else f"{value / 1e6:.0f} MB/s"
    if unit == "B":
        return f"{value / 1e6:.3g} MB" if value >= 1e6 else f"{value / 1e3:.3g} KB" if value >= 1e3 else f"{value:.0f} B"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _cell(spread, unit):
    low, high = _engineering(spread["min"], unit), _engineering(spread["max"], unit)
    return f"{_engineering(spread['median'], unit)} ({low} … {high})"


# Metric, heading, unit, and the corresponding ratio.
METRICS = [
    ("examples_per_s", "examples/s", "", "steps_per_s"),
    ("steps_per_s", "steps/s", "", "steps_per_s"),
    ("bytes_per_s", "payload", "B/s", "steps_per_s"),
    ("p50_s", "step p50", "s", "p50_s"),
    ("p99_s", "step p99", "s", None),
    ("cpu_s_per_step", "CPU per step, all processes", "CPU s", "cpu_s_per_step"),
    ("cpu_s_per_tensor", "CPU per tensor", "CPU s", "cpu_s_per_step"),
    ("examples_per_cpu_s", "examples per CPU second", "", None),
    ("switches_per_step", "context switches per step", "", "switches_per_step"),
    # Over an emulated network.
    ("pulled_bytes_per_step", "bytes to the workers per step", "B", None),
    ("pushed_bytes_per_step", "bytes from the workers per step", "B", None),
    ("dropped_per_step", "dropped segments per step", "", None),
    ("relay_cores", "cores used by the relay", "", None),
    ("relay_late_p99_s", "lateness of the relay, p99 at most", "s", None),
]


BARE = {
    "tcp": "bare C loop over TCP",
    "unix": "bare C loop over a unix socket",
    "tcp+math": "bare C loop over TCP that also does the arithmetic",
    "unix+math": "bare C loop over a unix socket that also does the arithmetic",
    "memcpy": "memcpy, one thread",
    "wire": "bare sockets, pull, then push",
    "wire+overlap": "bare sockets, pull and push at the same time",
}


def machine_line(machine):
    return (
        f"{machine['cores']} cores, {machine['memory_gib']:.0f} GiB, Linux {machine['kernel']}, TensorFlow {machine['tensorflow']}, revision {machine['revision']}, "
        f"load average at the start {machine['load_average']:.2f}"
    )


def table(results):
    return f"{_head(results)}\n\n{_rows(results['columns'], results['cases'])}"


def wire_tables(results):
    """The results of benches/wire: a table for each wire."""
    relay = results["relay"]
    parts = [
        _head(results),
        f"Emulated network: priority of the relay {relay['priority']}, congestion control {relay['congestion_control']}; without limits, a round trip takes "
        f"{_engineering(relay['round_trip_s'], 's')} and a cable carries {relay['bits_per_s'] / 1e9:.3g} Gb/s.",
    ]
    for wire in results["wires"]:
        parts += [f"## {wire['title']}", f"Measured: {wire_line(wire)}. Queues of {wire['queue_bytes'] // 1024} KiB.", _rows(results["columns"], wire["cases"])]
    return "\n\n".join(parts)


def wire_line(wire):
    measured = wire["measured"]
    return (
        f"round trip {_engineering(measured['round_trip_s'], 's')}, {measured['bits_per_s_to_worker'] / 1e9:.3g} Gb/s to the worker, "
        f"{measured['bits_per_s_from_worker'] / 1e9:.3g} Gb/s from it"
    )


def _head(results):
    return (
        f"Machine: {machine_line(results['machine'])}.\n\n"
        f"{results['rounds']} turns of {results['window_s']:g} s per case and column, in alternation; median (min … max) over the turns; ratios are medians over "
        f"neighbouring turns, to `{results['columns'][0]}`."
    )


def _rows(columns, cases):
    base = columns[0]
    heads = ["case", "tensors/step", "measure"] + [f"`{name}`" for name in columns] + [f"ratio `{name}`" for name in columns[1:]]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for case in cases.values():
        first = True
        messages = [case["columns"][name]["messages_per_step"] for name in columns]
        # Unknown for functions.
        tensors = "–" if None in messages else str(case["columns"][base]["tensors_per_step"])
        for key, heading, unit, ratio in METRICS:
            if key not in case["columns"][base] or (key in ("bytes_per_s", "cpu_s_per_tensor") and not _worth(case, key)):
                continue
            row = [case["title"] if first else "", tensors if first else "", heading]
            for name in columns:
                value = case["columns"][name][key]
                row.append(_cell(value, unit) if isinstance(value, dict) else _engineering(value, unit))
            for name in columns[1:]:
                row.append(f"**{case['columns'][name]['ratio'][ratio]['median']:.2f}×**" if ratio else "")
            lines.append("| " + " | ".join(row) + " |")
            first = False
        if None not in messages:
            lines.append("| " + " | ".join(["", "", "messages per step", *map(str, messages)] + [""] * (len(columns) - 1)) + " |")
        row = ["", "", "peak resident memory, all processes"]
        row += [f"{sum(case['columns'][name]['peak_rss_bytes'].values()) / 2**20:,.0f} MiB" for name in columns]
        lines.append("| " + " | ".join(row + [""] * (len(columns) - 1)) + " |")
        for kind, limit in case["bare"].items():
            what = BARE[kind]
            text = _cell(limit["bytes_per_s"], "B/s")
            if kind.startswith("wire"):
                text = f"{_cell(limit['steps_per_s'], '')} steps/s"
            if "p50_s" in limit:
                text += f", step p50 {_engineering(limit['p50_s']['median'], 's')}"
            if kind.startswith("wire"):
                text += f", p99 {_engineering(limit['p99_s']['median'], 's')}, {_engineering(limit['cpu_s_per_step']['median'], 'CPU s')} CPU per step"
            lines.append("| " + " | ".join(["", "", f"limit: {what}", text] + [""] * (2 * len(columns) - 2)) + " |")
        if case["local"]:
            local = case["local"]
            text = f"{_cell(local['steps_per_s'], '')} steps/s, {_engineering(local['cpu_s_per_step']['median'], 'CPU s')} CPU per step"
            if "examples_per_s" in local:
                text = f"{_cell(local['examples_per_s'], '')} examples/s, " + text
            lines.append("| " + " | ".join(["", "", "limit: the same steps in one process, no server", text] + [""] * (2 * len(columns) - 2)) + " |")
        worst = max(case["columns"][name]["foreign_load"]["max"] for name in columns)
        lines.append("| " + " | ".join(["", "", "", "checked" if case["checked"] else "NOT CHECKED", f"other load ≤ {worst:.2f} cores"] + [""] * (2 * len(columns) - 3)) + " |")
    return "\n".join(lines) + "\n"


def _worth(case, key):
    result = next(iter(case["columns"].values()))
    if key == "bytes_per_s":
        return result[key]["median"] > 1e8
    return result["tensors_per_step"] >= 100 and not case.get("examples")
