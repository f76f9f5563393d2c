#!/usr/bin/env python3
"""Compares protocols: runs the columns (the first is normally stock `grpc`) interleaved in one run, on real processes.

    run.py --library PATH [--protocols grpc,grpc++,grpc++:fuse,star_server] [--cases NAME,…] [--quick] [--out target/bench]

Writes results.json and table.md to the output folder (plot.py draws them) and exits with 1 if a check failed.
"""

import argparse
import json
import sys
import time

import suite as suite_module  # first: it sets up the environment before numpy is imported
import report
from bare import Bare


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suite_module.add_arguments(parser, "grpc,grpc++,grpc++:fuse,star_server", "target/bench")
    parser.add_argument("--quick", action="store_true", help="short turns: does every case run, do the checks pass, is 1000x4KB faster than stock?")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    suite = suite_module.Suite.of(arguments, rounds=3 if arguments.quick else 6, seconds=0.5 if arguments.quick else 2.5)
    bare = Bare(suite.out)

    import cases as cases_module
    import functions
    import models
    import zoo

    # The models are for slower networks (benches/wire).
    more = models.all_models() + models.other_sizes() + zoo.other_models() + functions.others() + functions.many_workers() if arguments.cases else []
    if not functions.SUPPORTED:
        print("bench: TensorFlow 1.15 has no ClusterCoordinator: the cases of TensorFlow 2 are left out", flush=True)
    cases = suite_module.select(cases_module.all_cases() + functions.all_functions() + more, arguments.cases)
    results = suite.results(arguments.quick)
    begin = time.monotonic()
    results["cases"], results["failures"] = suite.run(cases, bare.limits, with_local=not arguments.quick)
    results["took_s"] = time.monotonic() - begin

    columns = results["columns"]
    if arguments.quick and len(columns) > 1 and "1000x4KB" in results["cases"]:
        ratio = results["cases"]["1000x4KB"]["columns"][columns[1]]["ratio"]["steps_per_s"]["median"]
        if ratio <= 1:
            results["failures"].append(f"1000x4KB: {columns[1]} is not faster than {columns[0]}: {ratio:.2f}x")
            print(results["failures"][-1], flush=True)
    (suite.out / "results.json").write_text(json.dumps(results, indent=1))
    if results["cases"]:
        (suite.out / "table.md").write_text(report.table(results))
    print(f"{suite.out / 'results.json'}, {suite.out / 'table.md'}: {len(results['cases'])} cases in {results['took_s']:.0f} s, {len(results['failures'])} failures", flush=True)
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
