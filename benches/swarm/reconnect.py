#!/usr/bin/env python3
"""A parameter server is killed and restarted under many simulated workers: measures how long it takes until all of them train again.

    reconnect.py --library PATH --swarm PATH [--workers 1000] [--protocols star_server,star_server_lite] [--rounds 3] [--quick] [--out target/bench/reconnect]

The new process takes the addresses of the old one. Each worker connects again as a real one does, creates a session and trains; afterwards the new server's state is
checked. Over the star protocols only: with the others, a step whose server lacks its variables leaves operations behind that a simulated worker does not clean up. Writes results.json and table.md; exits with 1 if anything failed. How long TensorFlow itself takes to start is shown, but not counted.
"""

import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

import run  # first: it sets up the environment before numpy is imported
import record
import machine
import model
import ps
from cluster import BenchError

WITHIN = 180


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=pathlib.Path, required=True, help="path of libstarwire.so")
    parser.add_argument("--swarm", type=pathlib.Path, required=True, help="path of the simulator (cargo build --release --bin swarm)")
    parser.add_argument("--protocols", default="star_server", help="star_server, star_server_lite or both (default %(default)s)")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each protocol (default %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="steps of each worker with the new server (default %(default)s)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="20 workers, one turn each")
    parser.add_argument("--out", default="target/bench/reconnect", type=pathlib.Path)
    return parser.parse_args()


def wait_until(condition, what, running, patience):
    deadline = time.monotonic() + patience
    while not condition():
        if running.poll() is not None:
            raise BenchError(f"the swarm ended while it was waited for {what}: {running.communicate()[1].strip()}")
        if time.monotonic() > deadline:
            raise BenchError(f"{what}: not within {patience} s")
        time.sleep(0.05)


def turn(arguments, case, recording, protocol):
    """Kills the server while all workers train, starts its successor, and returns the times after its start (or the kill)."""
    expected = [step["adds"] for step in record.load(recording)["steps"]]
    workers, logs, library = arguments.workers, recording.parent, str(arguments.library)
    old = ps.Server(protocol, library, case, workers, logs)
    servers, before = [old], old.pushed()
    command = [
        str(arguments.swarm), "--recording", str(recording), "--protocol", protocol, "--server", old.door, "--first-worker", old.first_worker, "--workers", str(workers),
        "--steps", str(arguments.steps), "--outage", str(WITHIN),
    ]  # fmt: skip
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        # One step of each worker warms up; the swarm counts on a loss only after these.
        wait_until(lambda: old.pushed()["steps"] >= 2 * workers, "training before the outage", running, run.PATIENCE)
        killed = time.time()
        os.kill(old.process.pid, signal.SIGKILL)
        old.close()
        servers.append(ps.Server(protocol, library, case, workers, logs, after=old))
        started = time.time()
        output, error = running.communicate(timeout=2 * WITHIN)
        if running.returncode != 0:
            raise BenchError(f"{protocol}, {workers} workers: {error.strip()} (server's log: {servers[1].log})")
        result = json.loads(output)
        # Both begin with the same values.
        model.check(before, servers[1].pushed(), result["made"], expected)
    finally:
        running.kill()
        for server in servers:
            server.close()
    outage = result["outage"]
    back = [at - started for at in outage["back_at"]]
    return {
        "start_s": started - killed, "lost_s": outage["lost_at"] - killed, "first_s": max(0.0, back[0]), "p50_s": statistics.median(back), "all_s": back[-1],
        "attempts_per_worker": outage["attempts_per_worker"],
    }  # fmt: skip


def table(results):
    lines = [
        f"{results['workers']} workers, {results['model']}; medians of {results['rounds']} turns (range), in seconds after the new server has started.",
        "", "| protocol | first step | half of the workers | all workers | attempts per worker |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for protocol, turns in results["turns"].items():
        cells = [f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})" for key in ("first_s", "p50_s", "all_s") if (values := [one[key] for one in turns])]
        attempts = statistics.median(one["attempts_per_worker"] for one in turns)
        lines.append(f"| `{protocol}` | {' | '.join(cells)} | {attempts:.1f} |")
    return "\n".join(lines) + "\n"


def main():
    arguments = parse_arguments()
    if arguments.quick:
        arguments.workers, arguments.rounds = 20, 1
    for name in ("library", "swarm", "out"):
        setattr(arguments, name, getattr(arguments, name).resolve())
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.chdir(arguments.out)  # files in the caller's directory must not affect the result
    protocols = arguments.protocols.split(",")
    if not all(protocol.startswith("star_") for protocol in protocols):
        sys.exit(f"reconnect: --protocols {arguments.protocols}: star_server and star_server_lite only")
    case = model.SwarmCtr(arguments.batch)
    results = {
        "machine": machine.describe(), "model": case.title, "workers": arguments.workers, "rounds": arguments.rounds, "turns": {}, "failures": [],
    }  # fmt: skip
    for protocol in protocols:
        recording = run.make_recording(arguments, protocol)
        turns = []
        for index in range(arguments.rounds):
            try:
                one = turn(arguments, case, recording, protocol)
            except (BenchError, AssertionError) as error:
                results["failures"].append(f"{protocol}: {error}")
                print(f"FAILED: {results['failures'][-1]}", flush=True)
                continue
            turns.append(one)
            print(f"{index + 1}/{arguments.rounds} {protocol}: " + ", ".join(f"{key} {value:.2f}" for key, value in one.items()) + "; checked", flush=True)
        if turns:
            results["turns"][protocol] = turns
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1))
    (arguments.out / "table.md").write_text(table(results))
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
