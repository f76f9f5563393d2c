#!/usr/bin/env python3
"""Many simulated workers on one real parameter server: measures how its throughput scales and the cost of a worker.

    run.py --library PATH --swarm PATH [--workers 1,10,100,1000] [--protocols grpc,grpc++,star_server] [--rounds 3] [--quick] [--out target/bench/swarm]

Records a step of the benchmark's CTR model (record.py, and record_star.py for star_server and star_server_lite), then starts a fresh server for each turn, simulates
the workers with `swarm`, and checks the server's state afterwards. Writes results.json and table.md (plot.py draws them); exits with 1 if anything failed.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import record  # first: it sets up the environment before numpy is imported
import record_star
import machine
import model
import ps
import swarm_report
from cluster import BenchError

PATIENCE = 900.0


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=pathlib.Path, help="path of libstarwire.so (not needed for grpc alone)")
    parser.add_argument("--swarm", type=pathlib.Path, required=True, help="path of the simulator (cargo build --release --bin swarm)")
    parser.add_argument("--protocols", default="grpc,grpc++,star_server")
    parser.add_argument("--workers", default="1,10,100,1000")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each protocol and number of workers (default %(default)s)")
    parser.add_argument("--seconds", type=int, default=8, help="least length of a turn (default %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="least steps of each worker in a turn (default %(default)s)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="1 and 20 workers, one short turn each")
    parser.add_argument("--out", default="target/bench/swarm", type=pathlib.Path)
    return parser.parse_args()


def play(swarm, recording, server, protocol, workers, seconds, steps, patience=PATIENCE):
    """Runs the simulator once."""
    command = [
        str(swarm), "--recording", str(recording), "--protocol", protocol, "--server", server.door, "--first-worker", server.first_worker,
        "--workers", str(workers), "--seconds", str(seconds), "--steps", str(steps), "--pid", str(server.process.pid),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        raise BenchError(f"{protocol}, {workers} workers: not done within {patience:.0f} s (server's log: {server.log})") from None
    if done.returncode != 0:
        raise BenchError(f"{protocol}, {workers} workers: {done.stderr.strip()} (server's log: {server.log})")
    return json.loads(done.stdout)


def make_recording(arguments, protocol):
    """The recording for this protocol; grpc and grpc++ use the same one."""
    star = protocol.startswith("star_")
    out = arguments.out / f"ctr.{protocol if star else 'tensors'}.recording"
    command = [sys.executable, (record_star if star else record).__file__, str(out), "--batch", str(arguments.batch)]
    if star:
        command += ["--library", str(arguments.library), "--protocol", protocol]
    # In a separate process: this one must have no threads when it forks servers.
    subprocess.run(command, check=True, timeout=PATIENCE)
    return out


def turn(arguments, case, recording, protocol, workers):
    """Starts a fresh server, runs the workers, and checks that every push was applied."""
    expected = [step["adds"] for step in record.load(recording)["steps"]]
    logs = recording.parent
    server = ps.Server(protocol, str(arguments.library) if arguments.library else None, case, workers, logs)
    try:
        before = server.pushed()
        result = play(arguments.swarm, recording, server, protocol, workers, arguments.seconds, arguments.steps)
        model.check(before, server.pushed(), result["made"], expected)
        return result
    finally:
        server.close()


def spread(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def gather(turns):
    """Medians and ranges over the turns of one protocol and number of workers."""
    plain = ("steps_per_s", "calls_per_s", "p50_s", "p99_s", "swarm_cpu_s_per_step", "connect_s", "set_up_s")
    served = ("cpu_s_per_step", "cpu_s_per_call", "rss_before", "rss_per_worker_connected", "rss_per_worker_ready", "rss_per_worker_warm", "rss_per_worker_after", "rss_peak", "threads", "descriptors")
    result = {key: spread([one[key] for one in turns]) for key in plain}
    result["server"] = {key: spread([one["server"][key] for one in turns]) for key in served}
    result["operations"] = [turns[0][key] for key in ("calls_per_step", "pulls_per_step", "pushes_per_step")]
    result["tensors"] = turns[0]["tensors_per_step"]
    result["turns"] = turns
    return result


def main():
    arguments = parse_arguments()
    if arguments.quick:
        arguments.workers, arguments.rounds, arguments.seconds, arguments.steps = "1,20", 1, 1, 5
    for name in ("library", "swarm", "out"):
        if getattr(arguments, name):
            setattr(arguments, name, getattr(arguments, name).resolve())
    counts = [int(n) for n in arguments.workers.split(",")]
    protocols = arguments.protocols.split(",")
    if protocols != ["grpc"] and not (arguments.library and arguments.library.exists()):
        sys.exit(f"swarm: --library is needed for all but grpc; given: {arguments.library}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.chdir(arguments.out)  # files in the caller's directory must not affect the result
    recordings = {}
    for protocol in protocols:
        plain = [] if protocol.startswith("star_") else [other for other in recordings if not other.startswith("star_")]
        recordings[protocol] = recordings[plain[0]] if plain else make_recording(arguments, protocol)
    case = model.SwarmCtr(arguments.batch)

    results = {"machine": machine.describe(), "model": case.title, "workers": counts, "protocols": protocols, "rounds": arguments.rounds, "failures": []}
    turns = {(protocol, n): [] for protocol in protocols for n in counts}
    begin = time.monotonic()
    for index in range(arguments.rounds):
        for n in counts:
            for protocol in protocols if index % 2 == 0 else reversed(protocols):
                try:
                    one = turn(arguments, case, recordings[protocol], protocol, n)
                except (BenchError, AssertionError) as error:
                    results["failures"].append(f"{protocol}, {n} workers: {error}")
                    print(f"FAILED: {results['failures'][-1]}", flush=True)
                    continue
                turns[protocol, n].append(one)
                server = one["server"]
                print(
                    f"{index + 1}/{arguments.rounds} {protocol} {n} workers: {one['steps_per_s']:.1f} steps/s, p50 {1e3 * one['p50_s']:.0f} ms, p99 {1e3 * one['p99_s']:.0f} ms, "
                    f"{1e3 * server['cpu_s_per_step']:.2f} ms CPU per step, {server['rss_per_worker_after'] / 1024:.0f} KiB per worker; checked",
                    flush=True,
                )
    results["took_s"] = time.monotonic() - begin
    results["results"] = {protocol: {str(n): gather(turns[protocol, n]) for n in counts if turns[protocol, n]} for protocol in protocols}
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1))
    (arguments.out / "table.md").write_text(swarm_report.table(results))
    print(f"{arguments.out / 'results.json'}, {arguments.out / 'table.md'}: {results['took_s']:.0f} s, {len(results['failures'])} failures", flush=True)
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
