"""Runs one case for all columns in interleaved turns and gathers the measurements."""

import statistics
import time

import columns as columns_module
import procstat
from cluster import BenchError, Cluster, Loopback

# Steps from the initial state after which the columns are compared bit by bit.
TRACE_STEPS = 6


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": values}


def _window(case, cluster, seconds, tensors, network):
    """Measures one turn of one column."""
    carried = network.counters()
    busy, stolen = procstat.machine_busy_s()
    before, servers, chief = (procstat.usage(pids) for pids in (cluster.pids, cluster.server_pids, cluster.chief_pids))
    answers = cluster.each_worker(timeout=seconds + 60, do="window", seconds=seconds)
    used, servers, chief = (procstat.usage(pids) - past for pids, past in ((cluster.pids, before), (cluster.server_pids, servers), (cluster.chief_pids, chief)))
    busy_after, stolen_after = procstat.machine_busy_s()
    elapsed = max(answer["elapsed"] for answer in answers)
    took = [t for answer in answers for t in answer["took"]]
    steps = len(took)
    carried = network.since(carried, steps, elapsed)
    turn = {
        **carried,
        "steps_per_s": sum(len(answer["took"]) / answer["elapsed"] for answer in answers),
        "p50_s": percentile(took, 0.50),
        "cpu_s_per_step": used.cpu_s / steps,
        "server_cpu_s_per_step": servers.cpu_s / steps,
        "chief_cpu_s_per_step": chief.cpu_s / steps,
        "switches_per_step": used.switches / steps,
        # Share of the machine's time that other processes used: if it is high, the turn says little.
        "foreign_load": max(0.0, (busy_after - busy - used.cpu_s) / elapsed - carried.get("relay_cores", 0.0)),
        "stolen": (stolen_after - stolen) / elapsed,
    }
    if case.examples:
        turn["examples_per_s"] = turn["steps_per_s"] * case.examples
        turn["examples_per_cpu_s"] = case.examples / turn["cpu_s_per_step"] if used.cpu_s else float("inf")
    if case.bare:
        count, size, _ = case.bare
        turn["bytes_per_s"] = 2 * count * size * turn["steps_per_s"]
    if tensors:
        turn["tensors_per_s"] = tensors * turn["steps_per_s"]
        turn["cpu_s_per_tensor"] = turn["cpu_s_per_step"] / tensors
    return turn, took


def _column_result(turns, took, facts):
    result = {key: spread([turn[key] for turn in turns]) for key in turns[0]}
    # p99 needs many steps, so it is computed over all turns.
    result["p99_s"] = percentile(took, 0.99)
    result["steps_measured"] = len(took)
    return {**result, **facts}


def run_case(case, columns, library, logs, rounds, seconds, limits, with_local, network=Loopback()):
    """→ {"columns": {name: …}, "bare": {kind: …}, "local": …, "checked": True} or raises BenchError. `limits`: as Bare.limits."""
    seconds *= case.turn_share
    clusters, facts, warm = {}, {column.name: {} for column in columns}, {}
    try:
        for column in columns:
            start = time.monotonic()
            cluster = clusters[column.name] = Cluster(case, column, library, logs, network)
            traced = cluster.workers[0].call(timeout=120, do="trace", steps=TRACE_STEPS)
            edges = cluster.workers[0].call(timeout=120, do="edges")
            warm[column.name] = _window(case, cluster, min(1.0, seconds / 2), edges["tensors"], network)[0]
            facts[column.name] = {"digest": traced["digest"], "tensors_per_step": edges["tensors"], "messages_per_step": edges["messages"], "setup_s": time.monotonic() - start}
        local_turns = []
        if with_local:
            local = clusters[columns_module.LOCAL.name] = Cluster(case, columns_module.LOCAL, None, logs)
            digest = local.workers[0].call(timeout=120, do="trace", steps=TRACE_STEPS)["digest"]
            if digest != facts[columns[0].name]["digest"]:
                raise BenchError(f"{case.name}: one process computes different values than {columns[0].name} in the first {TRACE_STEPS} steps")
            local.workers[0].call(timeout=60 + seconds, do="window", seconds=min(1.0, seconds / 2))
        digests = {fact["digest"] for fact in facts.values()}
        if len(digests) != 1:
            raise BenchError(f"{case.name}: the columns computed different values in the first {TRACE_STEPS} steps: " + ", ".join(f"{name} {fact['digest'][:12]}" for name, fact in facts.items()))
        for cluster in clusters.values():
            cluster.settle()
            procstat.reset_peak_rss(cluster.pids)

        turns, took, bares = {column.name: [] for column in columns}, {column.name: [] for column in columns}, {}
        bounds = limits(case, warm)
        for index in range(rounds):
            # Every other round is reversed, so that no column always comes first.
            for column in columns if index % 2 == 0 else reversed(columns):
                turn, steps = _window(case, clusters[column.name], seconds, facts[column.name]["tensors_per_step"], network)
                turns[column.name].append(turn)
                took[column.name] += steps
            if with_local:
                local_turns.append(_window(case, local, min(1.0, seconds), 0, Loopback())[0])
            for kind, bound in bounds.items():
                bares.setdefault(kind, []).append(bound(min(0.5, seconds / 2)))

        for column in columns:
            cluster = clusters[column.name]
            facts[column.name]["peak_rss_bytes"] = dict(zip([process.name for process in cluster.processes], procstat.peak_rss(cluster.pids)))
            total = sum(answer["steps"] for answer in cluster.each_worker(do="steps"))
            facts[column.name]["check_sum"] = cluster.workers[0].call(timeout=120, do="check", total_steps=total)["sum"]
            facts[column.name]["steps_checked"] = total
        result = {
            "title": case.title,
            "columns": {name: _column_result(turns[name], took[name], facts[name]) for name in turns},
            "bare": {kind: {key: spread([one[key] for one in runs]) for key in runs[0]} for kind, runs in bares.items()},
            "local": {key: spread([turn[key] for turn in local_turns]) for key in local_turns[0]} if local_turns else None,
            "checked": True,
        }
        first = turns[columns[0].name]
        for name, mine in turns.items():
            result["columns"][name]["ratio"] = {
                key: spread([ours[key] / theirs[key] for ours, theirs in zip(mine, first) if theirs[key]] or [float("nan")])
                for key in ("steps_per_s", "p50_s", "cpu_s_per_step", "server_cpu_s_per_step", "switches_per_step")
            }
        return result
    finally:
        for cluster in clusters.values():
            cluster.close()
