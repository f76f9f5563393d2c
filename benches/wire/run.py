#!/usr/bin/env python3
"""Compares protocols over an emulated network: every task on its own host, at several rates and round trip times.

    run.py --library PATH [--wires 10G/50us,1G/0.2ms,1G/1ms] [--protocols …] [--cases NAME,…] [--quick] [--out target/bench/wire]
    run.py --only-wires: measures the wires, runs no case

Sets up each wire, measures its round trip and rate with bare sockets, and fails if they differ from the asked ones by more than 20 %. (A wire that is too fast for the
machine is named for its measured round trip and rate instead.) Then runs every case as benches/tf/run.py does. Writes results.json and table.md (plot.py draws them);
exits with 1 if anything failed.
"""

import argparse
import json
import sys
import time

import network as network_module  # finds benches/tf
from network import Network, NetworkError, Probe, Wire

import suite as suite_module
import report
from bare import Bare

WIRES, QUICK_WIRES = "10G/50us,1G/0.2ms,1G/1ms", "1G/1ms"
PROTOCOLS = "grpc,grpc++,grpc++:fuse,star_server,star_server_lite"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suite_module.add_arguments(parser, PROTOCOLS, "target/bench/wire")
    parser.add_argument("--wires", help=f"rates and round trip times (default {WIRES})")
    parser.add_argument("--congestion", help="TCP's congestion control (default: cubic, or reno where the machine reserves cubic)")
    parser.add_argument("--tolerance", type=float, default=0.2, help="share by which the measured wire may differ (default %(default)s)")
    parser.add_argument("--only-wires", action="store_true", help="measure the wires and stop")
    parser.add_argument("--quick", action="store_true", help=f"two short turns over {QUICK_WIRES}, large batches left out: does every case run, do the checks pass?")
    return parser.parse_args()


def all_cases():
    import cases
    import functions
    import models

    # "4x10MB-tcp" is the same here: no two tasks share a host.
    return [case for case in cases.all_cases() if case.name != "4x10MB-host"] + models.all_models() + functions.all_functions() + functions.others()


def selected(arguments):
    if arguments.only_wires:
        return []
    import models
    import zoo

    cases = suite_module.select(all_cases() + (models.other_sizes() + zoo.other_models() if arguments.cases else []), arguments.cases)
    return [case for case in cases if arguments.cases or not arguments.quick or case.examples <= 512]


def main():
    arguments = parse_arguments()
    try:
        wires = [Wire.parse(text) for text in (arguments.wires or (QUICK_WIRES if arguments.quick else WIRES)).split(",")]
        network_module.become_root()
        if arguments.only_wires:
            arguments.protocols = "grpc"
        suite = suite_module.Suite.of(arguments, rounds=2 if arguments.quick else 4, seconds=0.5 if arguments.quick else 2.0)
        with Network(suite.out, arguments.congestion) as network:
            return measure(arguments, suite, wires, network)
    except NetworkError as error:
        sys.exit(f"bench: {error}")


def measure(arguments, suite, wires, network):
    probe = Probe(network, Bare(suite.out), arguments.tolerance)
    machine = probe.machine()
    relay = {"priority": network.priority, "congestion_control": network.congestion, **machine}
    print(f"relay without limits: round trip {network_module.time_text(machine['round_trip_s'])}, {network_module.rate_text(machine['bits_per_s'])}", flush=True)
    cases = selected(arguments)
    results = {**({} if arguments.only_wires else suite.results(arguments.quick)), "relay": relay, "wires": [], "failures": [], "took_s": 0.0}
    begin = time.monotonic()
    for wire in wires[1:] if cases else []:
        probe.set(wire, machine)  # a wire that cannot be had should not stop a run after half an hour
    for wire in wires:
        try:
            setting = probe.set(wire, machine)
        except NetworkError as error:
            results["failures"].append(str(error))
            print(f"FAILED: {error}", flush=True)
            continue
        print(f"== {setting['title']}: measured {report.wire_line(setting)}", flush=True)
        setting["cases"], failures = suite.run(cases, probe.limits, with_local=False, network=network)
        results["failures"] += [f"{setting['title']}: {failure}" for failure in failures]
        results["wires"].append(setting)
        results["took_s"] = time.monotonic() - begin
        save(suite.out, results)
    save(suite.out, results)
    count = sum(len(wire["cases"]) for wire in results["wires"])
    print(f"{suite.out / 'results.json'}: {len(results['wires'])} wires, {count} cases in {results['took_s']:.0f} s, {len(results['failures'])} failures", flush=True)
    return 1 if results["failures"] else 0


def save(out, results):
    (out / "results.json").write_text(json.dumps(results, indent=1))
    if any(wire["cases"] for wire in results["wires"]):
        (out / "table.md").write_text(report.wire_tables(results))


if __name__ == "__main__":
    sys.exit(main())
