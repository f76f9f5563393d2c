"""The jobs of `make test-deep`: variants, sanitizers, fuzzing, other TensorFlows. `--shard K/N` is one of N shares that take about as long."""

import shlex
import sys
from pathlib import Path

import jobs as quick

# The newest patch or candidate of each minor but the one that all other jobs use.
OTHER_VERSIONS = ("2.12.1", "2.13.1", "2.14.1", "2.15.1", "2.16.2", "2.17.1", "2.18.1", "2.19.1", "2.20.0", "2.22.0rc0")

# Files whose tests also run with TLS on all connections, or with a secret.
PROOFS = (("tls", "sessions"), ("tls", "tf2_killed"), ("tls", "training"), ("secret", "tf2_killed"))
# Seconds of the parts that take longest.
EXPECTED = {
    "deep/keras": 300, "deep/large": 220, "deep/tf2_killed": 200, "deep/signals": 200, "deep/sync_replicas": 130, "deep/device": 100, "deep/moves": 110, "deep/dtypes": 90,
    "deep/emulated_network": 80, "deep/functions": 80, "pace/joining_tasks": 400, "pace/tls_connections": 140, "pace/half_open_connections": 100,
    "pace/as_strong_as_grpc": 100, "proof-tls/training": 150, "proof-tls/tf2_killed": 200, "proof-secret/tf2_killed": 200,
}


def jobs(s):
    files = [*quick.files("python"), *quick.files("histories"), *quick.files("fuzz_graphs")]
    marked = [path for path in files if any(f"mark.{word}" in (quick.ROOT / path).read_text() for word in ("deep", "quick"))]
    deep = lambda stage, path: {  # noqa: E731
        "environment": {"STARWIRE_DEEP_TESTS": "1"}, "memory": 12 if "test_large" in path else 4, "limit": 1800,
        "expected": EXPECTED.get(f"{stage}/{Path(path).stem[len('test_'):]}", 50),
    }
    fuzz = f"{s.library} && {s.python} tests/fuzz_graphs/run.py --seed {s.seed} --seconds 300 --stop"
    dying = "--protocols star_server+state,star_server_lite+sync --faults kill_server,move_server,full_disk"
    # A filter that finds no test is no success.
    ran = "awk '{ print } /^test result: ok. [1-9]/ { ran = 1 } END { exit !ran }'"
    histories = f"{s.library} && {s.python} tests/histories/run.py --seed {s.seed} --seconds 300"
    return [
        *(s.end_to_end("deep", path, "-m deep", **deep("deep", path)) for path in marked),
        s.swarm("deep/swarm", "-m deep", {"STARWIRE_DEEP_TESTS": "1"}),
        *(s.with_proof(kind, name, **deep(f"proof-{kind}", f"test_{name}")) for kind, name in PROOFS),
        # The pace of a training under attack is a measurement, which takes several rounds.
        *(s.end_to_end("pace", path, **deep("pace", path)) for path in quick.files("attacks")),
        quick.Job("address", "scripts/sanitize address", needs=("tools",), cores=2, memory=8, limit=3600, expected=480),
        quick.Job("undefined", "scripts/sanitize shim", needs=("plugin", "core"), cores=2, memory=8, limit=3600, expected=480),
        quick.Job("long-rows", f"{s.cargo} test --package starwire-state --test store -- --ignored | {ran}", needs=("core",), memory=6, expected=60),
        quick.Job("fuzz-graphs", fuzz, needs=("plugin", "packages"), cores=2, memory=8, limit=1800, expected=320, seed=s.seed),
        quick.Job("fuzz-kept", f"{s.library} && {s.python} tests/fuzz_graphs/kept.py --seed {s.seed} --seconds 300", needs=("plugin", "packages"), cores=2, memory=8, limit=1800, expected=320, seed=s.seed),
        quick.Job("fuzz-functions", f"{fuzz} --only functions", needs=("plugin", "packages"), cores=2, memory=8, limit=1800, expected=320, seed=s.seed),
        quick.Job("histories", histories, needs=("plugin", "packages"), cores=1, memory=6, limit=1800, expected=330, seed=s.seed),
        # Nothing but dying and moving servers that keep their state: no step may fail.
        quick.Job("histories-state", f"{histories} {dying}", needs=("plugin", "packages"), cores=1, memory=6, limit=1800, expected=330, seed=s.seed),
        s.fail_points(histories),
        quick.Job("proto", f"{s.make} proto && git diff --exit-code crates/engine/src/control/generated", needs=("tools",), expected=60),
        quick.Job("simulate", f"STARWIRE_SIM_SEEDS=1000 {s.cargo} test --test sim every_seed | {ran} && STARWIRE_SIM_SEED={s.seed << 20} {s.make} simulate SECONDS=120", needs=("core",), limit=1800, expected=350, seed=s.seed),
        # In a target folder of its own, which is built first.
        quick.Job("reverted", f"{s.python} tests/reverted/run.py", needs=("tools",), cores=2, memory=4, limit=2400, expected=300),
        quick.Job("fuzz", f"{s.make} fuzz FUZZ_SECONDS=30 SEED={s.seed}", needs=("plugin", "packages"), cores=2, memory=6, limit=1800, expected=420, seed=s.seed),
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
    for job in sorted(found, key=lambda job: (-job.work, job.name)):
        min(shares, key=lambda jobs: sum(job.work for job in jobs)).append(job)
    return shares[number - 1]
