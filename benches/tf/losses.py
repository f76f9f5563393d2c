#!/usr/bin/env python3
"""What overlapping steps (starwire.config(pipeline=N)) and values of 16 bits (wire_dtype="bfloat16") do to the loss.

    losses.py --library PATH [--depths 0,1,2,4,b] [--seeds 3] [--steps 1000] [--protocol star_server] [--out target/bench/losses]

Trains the benchmark's CTR model with one worker on the same batches with each depth (b: bfloat16, steps one after the other). Writes results.json with every loss, and prints the mean loss of each tenth of the run, over the seeds.
"""

import argparse
import json
import pathlib
import statistics
import sys

import suite  # noqa: F401  (first, because it sets up the environment)
import cases
from cluster import Cluster
from columns import Column


class Model(cases.Ctr):
    workers, BATCHES = 1, 64

    def __init__(self, seed, batch=256):
        super().__init__(f"losses{seed}", f"CTR model, seed {seed}", batch)
        self.data_seed, self.first_seed = 7 + 1000 * seed, 100 + 1000 * seed


def losses(protocol, library, logs, depth, seed, steps):
    options = {"wire_dtype": "bfloat16"} if depth == "b" else {"pipeline": int(depth)}
    cluster = Cluster(Model(seed), Column(f"{protocol}:{depth}", protocol, options=options), library, logs)
    try:
        return cluster.workers[0].call(timeout=600, do="losses", steps=steps)["losses"]
    finally:
        cluster.close()


def tenths(values):
    size = len(values) // 10
    return [statistics.mean(values[at * size : (at + 1) * size]) for at in range(10)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--protocol", default="star_server")
    parser.add_argument("--depths", default="0,1,2,4,b")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("target/bench/losses"))
    arguments = parser.parse_args()
    if arguments.steps < 10:
        parser.error("--steps must be at least 10")
    depths, logs = arguments.depths.split(","), arguments.out.resolve() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    library = str(pathlib.Path(arguments.library).resolve())
    runs = {depth: [losses(arguments.protocol, library, logs, depth, seed, arguments.steps) for seed in range(arguments.seeds)] for depth in depths}
    (logs.parent / "results.json").write_text(json.dumps({"protocol": arguments.protocol, "steps": arguments.steps, "losses": runs}))
    print(f"mean loss in each tenth of {arguments.steps} steps, {arguments.seeds} seeds (in brackets: of the single seeds in the last tenth)")
    for depth, of_seeds in runs.items():
        curves = [tenths(one) for one in of_seeds]
        means = " ".join(f"{statistics.mean(values):.4f}" for values in zip(*curves))
        print(f"{depth}: {means} ({', '.join(f'{curve[-1]:.4f}' for curve in curves)})")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
