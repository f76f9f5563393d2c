"""The jobs of `make test-deep`: everything that `make test` leaves out. `--shard K/N` is one of N shares that take about as long."""

import shlex
import sys

import jobs as quick

# The newest patch or candidate of each minor but the one that all other jobs use.
OTHER_VERSIONS = ("2.12.1", "2.13.1", "2.14.1", "2.15.1", "2.16.2", "2.17.1", "2.18.1", "2.19.1", "2.20.0", "2.22.0rc0")


def jobs(s):
    marked = [path for path in quick.files("python") if any(f"mark.{word}" in (quick.ROOT / path).read_text() for word in ("deep", "quick"))]
    deep = {"environment": {"STARWIRE_DEEP_TESTS": "1"}, "memory": 12, "limit": 1800}
    fuzz = f"{s.library} && {s.python} tests/fuzz_graphs/run.py --seed $RANDOM --seconds 300 --stop"
    histories = f"{s.library} && {s.python} tests/histories/run.py --seed $RANDOM --seconds 300"
    return [
        *(s.end_to_end("deep", path, "-m deep", **deep) for path in marked),
        # The pace of a training under attack is a measurement, which takes several rounds.
        *(s.end_to_end("pace", path, **deep) for path in quick.files("attacks")),
        quick.Job("address", "scripts/sanitize address", needs=("tools",), cores=2, memory=8, limit=3600, expected=480),
        quick.Job("undefined", "scripts/sanitize shim", needs=("plugin", "core"), cores=2, memory=8, limit=3600, expected=480),
        quick.Job("fuzz-graphs", fuzz, needs=("plugin", "packages"), cores=2, memory=8, limit=1800, expected=320),
        quick.Job("fuzz-kept", f"{s.library} && {s.python} tests/fuzz_graphs/kept.py --seed $RANDOM --seconds 300", needs=("plugin", "packages"), cores=2, memory=8, limit=1800, expected=320),
        quick.Job("fuzz-functions", f"{fuzz} --only functions", needs=("plugin", "packages"), cores=2, memory=8, limit=1800, expected=320),
        quick.Job("histories", histories, needs=("plugin", "packages"), cores=1, memory=6, limit=1800, expected=330),
        quick.Job("simulate", f"STARWIRE_SIM_SEEDS=1000 {s.cargo} test --test sim every_seed && {s.make} simulate SECONDS=120", needs=("core",), limit=1800, expected=350),
        quick.Job("fuzz", f"{s.make} fuzz FUZZ_SECONDS=30", needs=("plugin", "packages"), cores=2, memory=6, limit=1800, expected=420),
        quick.Job("rdma", "tests/rdma/run driver doctor kill engine", needs=("core",), memory=4, limit=2400, expected=300),
        quick.Job("rdma-train", "tests/rdma/run train", needs=("plugin", "packages"), memory=6, limit=2400, expected=400),
        *(quick.Job(f"matrix/{version}", f"scripts/matrix {version}", needs=("plugin",), cores=2, memory=5, limit=3600, expected=480) for version in OTHER_VERSIONS),
    ]


def share(found, shard):
    """Returns the jobs of the share K/N: the longest first, each to the share that has least."""
    if not shard:
        return found
    try:
        number, count = map(int, shard.split("/"))
        if not 1 <= number <= count:
            raise ValueError
    except ValueError:
        sys.exit(f"scripts/test: --shard {shlex.quote(shard)} is not K/N with K from 1 to N")
    shares = [[] for _ in range(count)]
    for job in sorted(found, key=lambda job: (-job.expected, job.name)):
        min(shares, key=lambda jobs: sum(job.expected for job in jobs)).append(job)
    return shares[number - 1]
