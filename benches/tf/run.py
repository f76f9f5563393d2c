#!/usr/bin/env python3
"""Compares protocols: runs the columns (the first is normally stock `grpc`) interleaved in one run, on real processes.

    run.py --library PATH [--protocols grpc,grpc++,grpc++:fuse,star_server] [--cases NAME,…] [--quick] [--out target/bench]

Writes results.json and table.md to the output folder (plot.py draws them) and exits with 1 if a check failed.
"""

import argparse
import json
import os
import pathlib
import sys
import time

# Before numpy is imported: this process must have no threads when it forks the others.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Same path for all columns: no proxies between local processes.
for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
    os.environ.pop(name, None)

import columns as columns_module
import machine
import report
from bare import Bare
from cluster import BenchError


EQUAL_IDS = "request was received twice"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="path of libstarwire.so (not needed if every protocol is stock)")
    parser.add_argument("--protocols", default="grpc,grpc++,grpc++:fuse,star_server", help="columns, the first is what the others are compared with (default %(default)s)")
    parser.add_argument("--cases", default="", help="only these, by name")
    parser.add_argument("--out", default="target/bench", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, help="turns per column and case")
    parser.add_argument("--seconds", type=float, help="length of a turn")
    parser.add_argument("--quick", action="store_true", help="short turns: does every case run, do the checks pass, is 1000x4KB faster than stock?")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    columns = columns_module.parse(arguments.protocols)
    library = arguments.library and str(pathlib.Path(arguments.library).resolve())
    if any(column.needs_library for column in columns) and not (library and os.path.exists(library)):
        sys.exit(f"bench: --library is needed for {', '.join(c.name for c in columns if c.needs_library)}; given: {arguments.library}")
    rounds = arguments.rounds or (3 if arguments.quick else 6)
    seconds = arguments.seconds or (0.5 if arguments.quick else 2.5)
    out = arguments.out.resolve()
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    bare = Bare(out)

    import cases as cases_module
    import measure

    wanted = [name for name in arguments.cases.split(",") if name]
    cases = [case for case in cases_module.all_cases() if not wanted or case.name in wanted]
    unknown = set(wanted) - {case.name for case in cases}
    if unknown:
        sys.exit(f"bench: no case {', '.join(sorted(unknown))}; there are {', '.join(case.name for case in cases_module.all_cases())}")
    # Files in the caller's directory (such as an .endpoint_map) must not affect the measurement.
    scratch = out / "cwd"
    scratch.mkdir(exist_ok=True)
    os.chdir(scratch)

    results = {"machine": machine.describe(), "columns": [column.name for column in columns], "rounds": rounds, "window_s": seconds, "quick": arguments.quick, "cases": {}, "failures": []}
    begin = time.monotonic()
    for case in cases:
        start = time.monotonic()
        run = lambda: measure.run_case(case, columns, library, logs, rounds, seconds, bare, with_local=not arguments.quick)
        try:
            try:
                result = run()
            except BenchError as error:
                # TensorFlow 2.21 draws request ids from generators with 32-bit seeds: about once in 10^5 steps two are equal, and stock grpc fails the step.
                if EQUAL_IDS not in str(error):
                    raise
                print(f"{case.name}: again, because TensorFlow took two requests for one: {error}", flush=True)
                result = run()
        except BenchError as error:
            results["failures"].append(str(error))
            print(f"{case.name}: FAILED: {error}", flush=True)
            continue
        result["examples"] = case.examples
        results["cases"][case.name] = result
        rates = []
        for column in columns:
            mine = result["columns"][column.name]
            rates.append(f"{column.name} {mine['steps_per_s']['median']:.1f} steps/s ({mine['ratio']['steps_per_s']['median']:.2f}x)")
        print(f"{case.name}: {', '.join(rates)}; checked; {time.monotonic() - start:.1f} s", flush=True)
    results["took_s"] = time.monotonic() - begin

    if arguments.quick and len(columns) > 1 and "1000x4KB" in results["cases"]:
        ratio = results["cases"]["1000x4KB"]["columns"][columns[1].name]["ratio"]["steps_per_s"]["median"]
        if ratio <= 1:
            results["failures"].append(f"1000x4KB: {columns[1].name} is not faster than {columns[0].name}: {ratio:.2f}x")
            print(results["failures"][-1], flush=True)
    (out / "results.json").write_text(json.dumps(results, indent=1))
    if results["cases"]:
        (out / "table.md").write_text(report.table(results))
    print(f"{out / 'results.json'}, {out / 'table.md'}: {len(results['cases'])} cases in {results['took_s']:.0f} s, {len(results['failures'])} failures", flush=True)
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
