"""Runs TensorFlow's own tests over starwire's protocols and over grpc, and lists what passes over grpc only.

Run by scripts/tensorflow-tests with the interpreter of the environment that holds TensorFlow and starwire. The tests
come from a checkout of TensorFlow's sources, of the same version as the wheel; the modules they import come from the
wheel. STARWIRE_PROTOCOL replaces the protocol. Exit status: 1 if a protocol differs from grpc.
"""

import argparse
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

# Test files that start servers and that the wheel can run, below tensorflow/python/. Those of TensorFlow 2 enable eager
# execution themselves; those of sessions expect it to be off, as it is outside the wheel.
EAGER = """
eager/remote_test
eager/remote_cluster_test
eager/remote_execution_test
eager/device_placement_test
distribute/coordinator/fault_tolerance_test
distribute/coordinator/fault_tolerance_coordination_service_test
distribute/coordinator/cluster_coordinator_test
distribute/coordinator/get_task_states_test
distribute/coordinator/metric_utils_test
distribute/parameter_server_strategy_v2_test
distribute/values_test
distribute/collective_all_reduce_strategy_test
distribute/distributed_table_test
kernel_tests/collective_ops_multi_worker_test
data/experimental/kernel_tests/replicate_test
checkpoint/functional_saver_test
checkpoint/sharding/sharding_policies_test
""".split()
SESSIONS = """
training/server_lib_test
training/server_lib_multiple_containers_test
training/server_lib_same_variables_clear_container_test
training/server_lib_same_variables_clear_test
training/server_lib_same_variables_no_clear_test
training/server_lib_sparse_job_test
training/sync_replicas_optimizer_test
training/localhost_cluster_performance_test
training/session_manager_test
training/supervisor_test
client/session_clusterspec_prop_test
client/session_partial_run_test
distribute/parameter_server_strategy_test
data/kernel_tests/iterator_cluster_test
""".split()
GRPC = "grpc"
# The result of a process that fails or hangs behind its last test.
EXIT = "(exit)"
STEP = re.compile(r"\[ +(RUN|OK|FAILED|SKIPPED) +\] ([\w.]+)")

# An executable without a suffix, because TensorFlow's multi_process_runner starts it again for its children. The folder
# of the test is not searched for modules; `xla` is a package of its own in TensorFlow's sources and a part of
# TensorFlow in the wheel.
LAUNCHER = """#!{python}
import importlib.util, os, sys
{prepare}
sys.path.append(os.path.join(os.path.dirname(importlib.util.find_spec("tensorflow").origin), "compiler"))
__file__ = {path!r}
with open(__file__, encoding="utf-8") as source:
    exec(compile(source.read(), __file__, "exec"))
"""
GRAPHS = "import tensorflow; tensorflow.compat.v1.disable_v2_behavior()"
# Every coordinator becomes one of starwire.coordinator's. Over grpc, it stays TensorFlow's.
PIPELINED = """
if "TEST_PIPELINE" in os.environ:
    import tensorflow
    from starwire import _coordinator
    def pipelined(self, strategy, init=tensorflow.distribute.coordinator.ClusterCoordinator.__init__):
        init(self, strategy)
        _coordinator.apply(self, int(os.environ["TEST_PIPELINE"]))
    tensorflow.distribute.coordinator.ClusterCoordinator.__init__ = pipelined
"""


class Run:
    """What the tests of a file did: their results by name, and how many servers started."""

    def __init__(self):
        self.results = {}
        self.servers = 0

    def count(self, *words):
        return sum(result in words for result in self.results.values())


def run(launcher, protocol, patience, log, only=()):
    """One process. If a test ends the process, or takes longer than patience, those after it have no result."""
    done, position, folder = Run(), log.tell(), launcher.parent
    environment = {**os.environ, "STARWIRE_PROTOCOL": protocol, "TEST_TMPDIR": tempfile.mkdtemp(dir=folder)}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    if protocol == GRPC:
        environment.pop("TEST_PIPELINE", None)
    files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
    # Not through its first line: that cannot have a path with a space.
    child = subprocess.Popen([sys.executable, launcher, *only], **files, env=environment, cwd=folder, start_new_session=True)
    try:
        over, current = follow(child, log.name, position, patience, done)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if not over or current:
        done.results[current or EXIT] = "crashed" if over else "hung"
    elif child.returncode and not done.count("failed"):
        done.results[EXIT] = "crashed"
    return done


def follow(child, log, position, patience, done):
    """Reads the log until the process ends or makes no progress. Returns whether it has ended, and its current test."""
    current, moved = None, time.monotonic()
    with open(log, "rb") as output:
        output.seek(position)
        while True:
            over = child.poll() is not None
            for line in iter(output.readline, b""):
                if not line.endswith(b"\n") and not over:
                    output.seek(-len(line), os.SEEK_CUR)
                    break
                line = line.decode(errors="replace")
                done.servers += "Started server with target" in line
                step = STEP.search(line)
                if step is None:
                    continue
                moved, word, name = time.monotonic(), step[1], step[2]
                current = name if word == "RUN" else None
                if word != "RUN":
                    done.results[name] = {"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped"}[word]
            if over or time.monotonic() - moved > patience:
                return over, current
            time.sleep(0.2)


def go_on(done, launcher, protocol, patience, log, names):
    """Runs the tests behind one that hung or crashed."""
    while missing := [name for name in sorted(names) if name not in done.results]:
        part = run(launcher, protocol, patience, log, missing)
        done.servers += part.servers
        if not any(name in part.results for name in missing):
            done.results.update(dict.fromkeys(missing, "not run"))
        done.results.update(part.results)


def differences(reference, tried):
    passed = [name for name, result in reference.results.items() if result == "passed"]
    return [name for name in passed if tried.results.get(name) != "passed"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=pathlib.Path, required=True, help="TensorFlow's sources, at the wheel's tag")
    parser.add_argument("--protocols", nargs="*", default=["grpc++", "star_server", "star_server_lite"])
    parser.add_argument("--only", nargs="*", help="test files: their last names, or paths below tensorflow/python")
    parser.add_argument("--patience", type=float, default=180, help="seconds that a single test may take")
    parser.add_argument("--out", type=pathlib.Path, default="target/tensorflow-tests", help="folder for the logs")
    parser.add_argument("--pipeline", type=int, metavar="N", help="give every ClusterCoordinator the threads and the scheduler of starwire.coordinator(pipeline=N)")
    options = parser.parse_args()
    if options.pipeline is not None:
        os.environ["TEST_PIPELINE"] = str(options.pipeline)
    # So that no child stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    files = [name for name in EAGER + SESSIONS if not options.only or name.split("/")[-1] in options.only]
    files += [name for name in options.only or () if "/" in name]
    if not files:
        parser.error("no such test file")
    options.out.mkdir(parents=True, exist_ok=True)
    rows, differ = [], False

    def row(name, protocol, done, notes=""):
        failed = done.count("failed", "hung", "crashed", "not run")
        rows.append((name, protocol, done.servers, done.count("passed"), failed, done.count("skipped"), notes))
        print(*rows[-1], flush=True)

    for name in files:
        path = (options.source / "tensorflow/python" / f"{name}.py").resolve()
        if not path.is_file():
            sys.exit(f"{path} does not exist: --source must be TensorFlow's sources")
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            launcher = pathlib.Path(folder, path.stem)
            prepare = GRAPHS if name in SESSIONS else PIPELINED
            launcher.write_text(LAUNCHER.format(python=sys.executable, path=str(path), prepare=prepare))
            launcher.chmod(0o755)
            logs = {}
            for protocol in [GRPC, *options.protocols]:
                log = options.out / f"{name.replace('/', '.')}.{protocol}.log"
                logs[protocol] = stack.enter_context(open(log, "wb"))
            runs = {protocol: run(launcher, protocol, options.patience, log) for protocol, log in logs.items()}
            names = {test for done in runs.values() for test in done.results} - {EXIT}
            for protocol, done in runs.items():
                go_on(done, launcher, protocol, options.patience, logs[protocol], names)
                notes = []
                for test in differences(runs[GRPC], done):
                    # Some of the tests depend on time: only what differs twice counts.
                    again = run(launcher, protocol, options.patience, logs[protocol], [test]).results.get(test)
                    differ |= again != "passed"
                    notes.append(f"{test} {done.results[test]}{', then passed' if again == 'passed' else ''}")
                if EXIT in done.results:
                    differ |= EXIT not in runs[GRPC].results
                    notes.append(f"{EXIT} {done.results[EXIT]}")
                row(name, protocol, done, "; ".join(notes))
    lines = ["| file | protocol | servers | passed | failed | skipped | passes over grpc, but here |", "|---" * 7 + "|"]
    lines += ["| " + " | ".join(map(str, one)) + " |" for one in rows]
    print("", *lines, sep="\n")
    (options.out / "table.md").write_text("\n".join(lines) + "\n")
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
