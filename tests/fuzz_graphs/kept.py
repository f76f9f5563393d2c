"""Random programs on parameter servers that keep their state (STARWIRE_STATE_MODE=sync): after each, both servers are killed and started again, and every variable
must be what it was. Whatever changes a variable in a way that the state does not notice is found so.

    kept.py [--seconds N] [--programs N] [--seed N] [--protocols star_server,star_server+parts,star_server_lite]
"""

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import run as fuzz  # noqa: E402  (first: it sets the paths)
import cluster as harness  # noqa: E402
import compare  # noqa: E402
import program as programs  # noqa: E402
import remote  # noqa: E402
from generate import generate  # noqa: E402

PROTOCOLS = ("star_server", "star_server+parts", "star_server_lite", "star_server+fuse")
READS = ("Identity", "ReadVariableOp")


def kept(program):
    """The outputs that read the variables which a state keeps."""
    reads = [record for record in program["final"] if record["op"] in READS and record["dev"].startswith("ps")]
    return [f"{record['id']}:0" for record in reads if record["out"][0][0] != "string"]


def usable(program):
    """Servers restart only at the end, sessions are not replaced, and both servers are only servers."""
    return not any(run.get("mode") in ("restart", "renew") for run in program["runs"]) and "master" not in program["options"] and kept(program)


def show(value):
    return compare.show_value(value[1]) if value[0] == "ok" else f"{value[1]}: {value[2][:200]}"


class Fuzzer:
    def __init__(self, runner, folder, timeout):
        self.folder, self.timeout, self.count = folder, timeout, {"programs": 0, "variables": 0, "uninitialised": 0, "not run": 0}
        state = {"STARWIRE_STATE": str(folder), "STARWIRE_STATE_MODE": "sync", "STARWIRE_RECOVER_S": 60}
        self.clusters = fuzz.Clusters(runner, state)

    def try_one(self, name, program):
        """Returns what differs."""
        import tensorflow as tf
        from build import Builder

        built = [Builder(tf, program, session).build() for session in range(program["options"].get("sessions", 1))]
        cluster = self.clusters.get(name)
        targets = [cluster.target("worker", lane) for lane in range(len(built))]
        task, reads = cluster["worker", 0], kept(program)
        limit = self.timeout * 3 + 10
        try:
            before = task.call(remote.execute_and_read, built, program, targets, self.clusters.container(), fuzz.parts(name)[2], self.timeout, reads, timeout=limit)
        except (harness.RemoteError, harness.TaskTimeout):
            before = None
        if before is None:
            # A step hangs, as a few do over grpc as well, or fails in a way that leaves others running.
            self.count["not run"] += 1
            self.drop(name)
            return []
        self.clusters.servers_started(fuzz.parts(name)[0], self.clusters.restart(name, ["ps0", "ps1"]))
        after = task.call(remote.read_and_close, reads, timeout=90)
        self.count["programs"] += 1
        self.count["variables"] += len(reads)
        self.count["uninitialised"] += sum(value[0] == "error" for value in before)
        return [f"{read}: {show(one)} before the kill, {show(other)} after it" for read, one, other in zip(reads, before, after) if one[:2] != other[:2]]

    def drop(self, name):
        self.clusters.drop(name)
        shutil.rmtree(self.folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--programs", type=int, default=0, help="stop after so many")
    parser.add_argument("--seed", type=int, default=None, help="the first seed (default: the time)")
    parser.add_argument("--protocols", default=",".join(PROTOCOLS))
    parser.add_argument("--timeout", type=float, default=20.0, help="of a step")
    parser.add_argument("--replay", nargs="*", default=None, help="programs from files")
    parser.add_argument("--out", default=str(fuzz.ROOT / "target" / "fuzz-graphs"))
    parser.add_argument("--keep-logs", action="store_true")
    arguments = parser.parse_args()
    os.environ.update({"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "STARWIRE_LIBRARY": harness.library_path()})
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    runner = harness.Runner(keep=lambda: arguments.keep_logs)
    seed = arguments.seed if arguments.seed is not None else int(time.time()) * 1000
    source = fuzz.replay_source(arguments.replay) if arguments.replay is not None else (generate(number) for number in range(seed, sys.maxsize))
    begun, said, failed, fuzzers = time.monotonic(), 0.0, 0, {}
    try:
        for number, program in enumerate(filter(usable, source)):
            if time.monotonic() - begun > arguments.seconds or (arguments.programs and number >= arguments.programs):
                break
            names = arguments.protocols.split(",")
            for name in names if arguments.replay is not None else [names[number % len(names)]]:
                if name not in fuzzers:
                    fuzzers[name] = Fuzzer(runner, runner.directory / f"state-{name}", arguments.timeout)
                differ = fuzzers[name].try_one(name, program)
                if differ:
                    failed += 1
                    label = fuzz.label(program)
                    (out / f"kept-{label}.json").write_text(programs.dumps(program))
                    (out / f"kept-{label}.txt").write_text(programs.listing(program) + "\n" + "\n".join(differ) + "\n")
                    print(f"seed {label}: {name}: {'; '.join(differ)[:1000]}", flush=True)
                    fuzzers[name].drop(name)
            if time.monotonic() - said > 60:
                said = time.monotonic()
                print(f"{said - begun:.0f} s: {[fuzzer.count for fuzzer in fuzzers.values()]}", flush=True)
    finally:
        for fuzzer in fuzzers.values():
            fuzzer.clusters.close()
        runner.close()
    total = {word: sum(fuzzer.count[word] for fuzzer in fuzzers.values()) for word in ("programs", "variables", "uninitialised", "not run")}
    print(f"{total}, {failed} differ", flush=True)
    return 1 if failed or total["programs"] == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
