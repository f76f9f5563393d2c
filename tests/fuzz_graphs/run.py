"""The differential fuzzer (`make fuzz-graphs`): runs random programs over stock gRPC, twice, and over every protocol; see README.md.

    run.py [--seconds N] [--programs N] [--seed N] [--feature unordered] [--protocols grpc++,star_server+fuse] [--replay FILE…] [--stop] [--no-shrink]
    run.py --only functions [--seconds N] [--programs N] [--seed N] [--protocols grpc++,star_server]
"""

import argparse
import collections
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
for folder in (HERE, ROOT / "tests" / "python"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
# Task processes import the functions they run by module name.
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(ROOT / "tests" / "python"), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])

import cluster as harness  # noqa: E402
import compare  # noqa: E402
import features  # noqa: E402
import functions  # noqa: E402
import program as programs  # noqa: E402
import remote  # noqa: E402
import shrink  # noqa: E402
from generate import generate  # noqa: E402

STOCK, AGAIN = "grpc", "grpc again"
# Where no edge orders some reads and updates, stock gRPC has to agree with itself in ten runs.
MORE_STOCK = tuple(f"{name} {number}" for number in range(2, 6) for name in (STOCK, AGAIN))
PROTOCOLS = ("grpc+fuse", "grpc++", "grpc+++fuse", "star_server", "star_server+fuse", "star_server+parts", "star_server_lite", "star_server_lite+parts")
# Group every tensor that can be grouped.
EAGER = {"STARWIRE_TENSOR_FUSE_LIMITS": "wait_us=60000000,message_us=1000000"}
# Split every call that can be split, as a slow network would with larger values; and forget early what nobody uses.
SPLIT, IN_PARTS = "+parts", {"STARWIRE_STAR_SPLIT_BYTES": "8", "STARWIRE_STAR_LIMITS": "plan_idle_s=1,session_idle_s=1"}
FUNCTION_PROTOCOLS = ("grpc++", "grpc+++fuse", "star_server", "star_server+parts", "star_server_lite", "star_server_lite+parts")
FUNCTION_SWITCHES = {"+fuse": {"STARWIRE_TENSOR_FUSE": "1", **EAGER}, SPLIT: IN_PARTS}
SHAPE = {"ps": 2, "worker": 2}
REGRESSIONS = sorted(HERE.glob("regressions/*.json"))


def parts(name):
    """Splits a protocol's name in this tool into (cluster's name, protocol, fuse)."""
    if is_stock(name):
        return AGAIN if name.startswith(AGAIN) else STOCK, "grpc", None
    base = name[: -len("+fuse")] if name.endswith("+fuse") else name
    protocol = base[: -len(SPLIT)] if base.endswith(SPLIT) else base
    return ("library over grpc" if base == "grpc" else base), protocol, name.endswith("+fuse")


def is_stock(name):
    return name.split(" ")[0] == STOCK


def stocks(program):
    """The runs over stock gRPC, with which those over the protocols are compared."""
    return (STOCK, AGAIN, *(MORE_STOCK if left_open(program) else ()))


def left_open(program):
    """True if no edge orders some of its reads and updates."""
    return "unordered" in program["options"].get("features", ())


def restarts(program):
    """True if it needs clusters of its own for a while."""
    return any(run.get("mode") == "restart" for run in program["runs"])


def label(program):
    return str(program.get("name", program["seed"]))


class Clusters:
    """Clusters that are reused until they fail. Each has two lanes, worker 0 and worker 1, that run programs concurrently."""

    def __init__(self, runner, environment=()):
        self.runner, self.environment, self.made, self.serial, self.dropped = runner, dict(environment), {}, 0, 0

    def get(self, name):
        key, protocol, _ = parts(name)
        if key in self.made and any(task.poll() is not None for task in self.made[key].tasks.values()):
            self.drop(name)
        if key not in self.made:
            self.made[key] = self.start(key, protocol)
        return self.made[key]

    def start(self, key, protocol):
        from tensorflow.compat.v1 import ConfigProto

        # Enough threads that kernels that block, such as those of staging areas, do not starve others.
        config = ConfigProto(inter_op_parallelism_threads=5 if key == AGAIN else 12, intra_op_parallelism_threads=1 if key == AGAIN else 2).SerializeToString()
        environment = {**EAGER, **(IN_PARTS if key.endswith(SPLIT) else {}), "TF_CPP_MIN_LOG_LEVEL": "1", **self.environment}
        made = harness.Cluster(self.runner, protocol, SHAPE, environment=environment, start=False, config=config)
        tasks = [self.begin_server(made, key, job, index) for job, count in SHAPE.items() for index in range(count)]
        self.servers_started(key, tasks)
        return made

    def begin_server(self, made, key, job, index):
        task = made.process(job, index)
        (task.directory / "whoami").write_text(f"{job}{index}")
        (task.directory / f"iam-{job}{index}").write_text("")
        if key == "library over grpc":
            task.call(harness.load, "grpc++", timeout=harness.START_TIMEOUT)
        task.begin(harness.start_server, made.spec, job, index, made.protocol, made.config)
        return task

    def servers_started(self, key, tasks):
        for task in tasks:
            task.result(harness.START_TIMEOUT)
        if key == AGAIN:
            for task in tasks:
                task.call(remote.burn, True)

    def restart(self, name, servers):
        """Kills parameter servers and begins to start them again. Returns their tasks."""
        key = parts(name)[0]
        made = self.made[key]
        for server in servers:
            made["ps", int(server[2:])].kill()
        return [self.begin_server(made, key, "ps", int(server[2:])) for server in servers]

    def drop(self, name):
        key = parts(name)[0]
        if key in self.made:
            self.dropped += 1
            self.made.pop(key).close()

    def container(self):
        self.serial += 1
        return f"C{self.serial:07d}"

    def close(self):
        for one in self.made.values():
            one.close()


class Job:
    """Runs a program on one lane of all clusters: one protocol at a time per cluster, concurrently across clusters."""

    def __init__(self, fuzzer, program, lane, names):
        self.fuzzer, self.program, self.lane = fuzzer, program, lane
        self.built = fuzzer.build(program, lane)
        self.todo, self.results = list(names), {}
        self.running = {}  # name -> (task, deadline, cluster)
        self.so_far, self.restarting = {}, {}  # name -> the results of its first runs, and servers that are being restarted
        self.repeated = set()

    def start(self):
        busy = {parts(name)[0] for name in self.running}
        for name in list(self.todo):
            key = parts(name)[0]
            if key in busy:
                continue
            try:
                cluster = self.fuzzer.clusters.get(name)
                task = cluster["worker", self.lane]
                targets = [cluster.target("worker", self.lane), cluster.target("worker", 1 - self.lane)][: len(self.built)]
                if "master" in self.program["options"]:
                    targets[0] = cluster.target("ps", int(self.program["options"]["master"][2:]))
                task.begin(remote.execute, self.built, self.program, targets, self.fuzzer.clusters.container(), parts(name)[2], self.fuzzer.timeout)
            except AssertionError as error:
                self.results[name] = [("error", "Crash", -1, str(error)[:1500])]
                self.todo.remove(name)
                self.fuzzer.clusters.drop(name)
                continue
            self.todo.remove(name)
            busy.add(key)
            self.running[name] = task, self.deadline(), cluster

    def deadline(self):
        return time.monotonic() + self.fuzzer.timeout * 2 + 10

    def poll(self):
        """Collects finished runs and starts others. Returns True when all are done."""
        for name, (task, deadline, cluster) in list(self.running.items()):
            if self.fuzzer.clusters.made.get(parts(name)[0]) is not cluster:
                # The other lane's program brought the cluster down; repeat this run.
                self.forget(name)
                self.todo.append(name)
                continue
            result = None
            try:
                if all(one.ready() for one in self.restarting.get(name, [task])):
                    result = self.go_on(name, task, cluster)
                elif time.monotonic() > deadline:
                    result = [("error", "DeadlineExceededError", compare.DEADLINE, "the process does not answer")]
                elif self.fuzzer.look() and task.poll() is not None:
                    result = [("error", "Crash", -1, task.log()[-1500:])]
            except (harness.RemoteError, harness.TaskDied) as error:
                if name in self.restarting and name not in self.repeated:
                    # A server did not start again: another process may have taken its port meanwhile.
                    self.repeated.add(name)
                    self.fuzzer.clusters.drop(name)
                    self.forget(name)
                    self.todo.append(name)
                    continue
                is_remote = isinstance(error, harness.RemoteError)
                result = [("error", error.type, -2, error.message[:1500])] if is_remote else [("error", "Crash", -1, str(error)[:1500])]
            if result is None:
                continue
            self.results[name] = self.so_far.get(name, []) + result
            self.forget(name)
            if compare.hangs(result) or result[-1][0] == "error" and result[-1][2] == -1:
                self.fuzzer.clusters.drop(name)
        self.start()
        return not self.running and not self.todo

    def go_on(self, name, task, cluster):
        """Returns the results of the last runs, or None if some are left."""
        clusters, runs = self.fuzzer.clusters, self.program["runs"]
        if name in self.restarting:
            clusters.servers_started(parts(name)[0], self.restarting[name])
            del self.restarting[name]
            self.so_far[name].append(("ok", []))
            task.begin(remote.resume, len(self.so_far[name]))
            self.running[name] = task, self.deadline(), cluster
            return None
        result = task.result(1)
        done = len(self.so_far.get(name, [])) + len(result)
        if compare.hangs(result) or done >= len(runs) or runs[done].get("mode") != "restart":
            return result
        self.so_far[name] = self.so_far.get(name, []) + result
        self.restarting[name] = clusters.restart(name, runs[done]["servers"])
        return None

    def forget(self, name):
        for kept in (self.running, self.so_far, self.restarting):
            kept.pop(name, None)


class Fuzzer:
    def __init__(self, runner, protocols=PROTOCOLS, timeout=20.0):
        self.clusters, self.protocols, self.timeout = Clusters(runner), tuple(protocols), timeout
        self.count = collections.Counter()
        self.found = collections.defaultdict(list)
        self.looked = 0.0
        self.report_stock = False

    def look(self):
        """True every 0.5 s: limits how often processes are polled, as a lost connection shows their end anyway."""
        if time.monotonic() - self.looked > 0.5:
            self.looked = time.monotonic()
            return True
        return False

    def build(self, program, lane=0):
        import tensorflow as tf
        from build import Builder

        return [Builder(tf, program, lane ^ session).build() for session in range(program["options"].get("sessions", 1))]

    def results(self, program, names, lane=0):
        """Runs one program alone; returns {name: runs}."""
        job = Job(self, program, lane, names)
        job.start()
        while not job.poll():
            time.sleep(0.003)
        return job.results

    def judge(self, program, results, more=()):
        """Returns (verdict, {protocol: difference}): "sound", or a verdict on a program that stock gRPC itself does not run consistently. `more`: further
        results over stock gRPC."""
        runs = program["runs"]
        results = {name: compare.alike(runs, made, parts(name)[1] == STOCK) for name, made in results.items()}
        first, *others = [results[name] for name in stocks(program)] + [compare.alike(runs, made, True) for made in more]
        if any(run[0] == "error" and run[2] < 0 for made in (first, *others) for run in made):
            return "refused", {}
        if any(compare.hangs(made) for made in (first, *others)):
            return "hangs over grpc", {}
        verdict = "order left open" if left_open(program) else "undetermined"
        agreed = compare.agreement(first, others)
        if agreed is None:
            return verdict, {}
        if all(compare.difference(first, made, [True] * len(made), runs) is None for made in others):
            verdict = "sound"
        found = {name: compare.difference(first, made, agreed, runs) for name, made in results.items() if not is_stock(name)}
        return verdict, {name: text for name, text in found.items() if text}

    def settled(self, program, results, rounds=4):
        """Repeats the program over stock gRPC; returns True if a protocol differs from what all the results have in common. Only then does it count."""
        self.wait_for_slow_steps(program, results)
        more = [made for number in range(rounds) for made in self.results(program, [STOCK, AGAIN], lane=number % 2).values()]
        found = self.optimised_otherwise(program, results, self.judge(program, results, more)[1])
        if not left_open(program):
            return bool(found)
        # The protocol may have lost a race that grpc loses as seldom: it has to differ again.
        again = [{**results, **self.results(program, list(found), lane=number % 2)} for number in range(rounds)]
        return any(sum(name in self.judge(program, made, more)[1] for made in again) >= 2 for name in found)

    def wait_for_slow_steps(self, program, results):
        """Repeats what hangs with more patience: on a busy machine, a step with large values may take longer than the limit."""
        hanging = [name for name, made in results.items() if not is_stock(name) and compare.hangs(made)]
        if hanging:
            timeout, self.timeout = self.timeout, 6 * self.timeout
            results.update(self.results(program, hanging))
            self.timeout = timeout

    def optimised_otherwise(self, program, results, found):
        """Leaves out the protocols that do what stock gRPC does without Grappler, which computes a value twice if it is fetched and used: the second time may be
        after an update that waits for the first."""
        if not found or not program["options"].get("grappler"):
            return found
        runs, plain = program["runs"], {**program, "options": {**program["options"], "grappler": False}}
        first, second = (compare.alike(runs, made, True) for made in self.results(plain, [STOCK, AGAIN]).values())
        agreed = compare.agreement(first, [second])
        if agreed is None or not all(one is True or one is not False and all(one) for one in agreed):
            return found
        differ = {name for name in found if compare.difference(first, compare.alike(runs, results[name], False), agreed, runs)}
        if differ != set(found):
            print(f"seed {label(program)}: over grpc, Grappler changes it", flush=True)
        return {name: text for name, text in found.items() if name in differ}

    def run_all(self, source, until, report, batch=2):
        """Runs programs from `source` on both lanes until `until()`; calls `report(program, results, differences)` for those that differ."""
        lanes, held = [None] * batch, None
        while True:
            for lane in range(batch):
                job = lanes[lane]
                if job is not None and job.poll():
                    lanes[lane] = None
                    self.finish(job, report)
                others = [one for one in lanes if one is not None]
                if lanes[lane] is None and not until() and not any(restarts(one.program) for one in others):
                    program, held = held or next(source, None), None
                    if program is not None and restarts(program) and others:
                        held = program
                    elif program is not None:
                        try:
                            lanes[lane] = Job(self, program, lane, (*stocks(program), *self.protocols))
                        except Exception as error:  # TensorFlow refuses to build the program
                            self.count["not built"] += 1
                            self.count["programs"] += 1
                            print(f"seed {label(program)}: not built: {type(error).__name__}: {str(error)[:300]}", flush=True)
                            continue
                        lanes[lane].start()
            if all(lane is None for lane in lanes):
                if until() or program is None:
                    return
            time.sleep(0.002)

    def finish(self, job, report):
        verdict, found = self.judge(job.program, job.results)
        self.count["programs"] += 1
        self.count[verdict] += 1
        for feature in job.program["options"].get("features", ()):
            self.count[f"with {feature}"] += 1
        if verdict == "hangs over grpc" and self.report_stock:
            found = {STOCK: "hangs"}
        if verdict == "hangs over grpc":
            print(f"seed {label(job.program)}: hangs over grpc", flush=True)
        if verdict == "undetermined":
            print(f"seed {label(job.program)}: undetermined: {compare.difference(job.results[STOCK], job.results[AGAIN], [True] * 99, job.program['runs'])}", flush=True)
        if verdict == "refused":
            for runs in (job.results[STOCK], job.results[AGAIN]):
                if any(r[0] == "error" and r[2] < 0 for r in runs):
                    print(f"seed {label(job.program)}: refused: {runs[-1][1]}: {runs[-1][3][:300]}", flush=True)
                    break
        for run in job.results[STOCK]:
            if run[0] == "error":
                self.count[f"grpc: {run[1]}"] += 1
        if found:
            report(job.program, job.results, found)


def replay_source(paths):
    import json

    for path in paths:
        made = json.loads(Path(path).read_text())
        made.setdefault("seed", 0)
        made["name"] = Path(path).stem
        yield made


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("FUZZ_SECONDS", 300)))
    parser.add_argument("--programs", type=int, default=0, help="stop after so many")
    parser.add_argument("--seed", type=int, default=None, help="the first seed (default: the time)")
    parser.add_argument("--protocols", default=None, help=f"default: {','.join(PROTOCOLS)}; functions: {','.join(FUNCTION_PROTOCOLS)}")
    parser.add_argument("--only", choices=("graphs", "functions"), default="graphs", help="graphs of sessions, or functions of TensorFlow 2 (functions.py)")
    parser.add_argument("--feature", choices=(*features.FEATURES, *functions.FEATURES), default=None, help="only seeds with this feature (features.py), or functions with it (functions.py)")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds after which a step hangs, or a program of functions if it is more than 60")
    parser.add_argument("--replay", nargs="*", default=None, help="programs from files instead of random ones")
    parser.add_argument("--stop", action="store_true", help="stop at the first difference")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--shrink-seconds", type=float, default=120.0)
    parser.add_argument("--report-stock", action="store_true", help="programs that hang over stock gRPC are failures too: for work on the generator")
    parser.add_argument("--out", default=str(ROOT / "target" / "fuzz-graphs"))
    parser.add_argument("--keep-logs", action="store_true")
    arguments = parser.parse_args()
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ["STARWIRE_LIBRARY"] = harness.library_path()
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    runner = harness.Runner(keep=lambda: arguments.keep_logs)
    seed = arguments.seed if arguments.seed is not None else int(time.time()) * 1000
    chosen = [p for p in (arguments.protocols or "").split(",") if p]
    if arguments.only == "functions" or arguments.feature in functions.FEATURES:
        try:
            some, ways = functions.some(seed, arguments.feature), chosen or FUNCTION_PROTOCOLS
            wrong = functions.fuzz(harness, runner, ways, FUNCTION_SWITCHES, some, arguments.programs, arguments.seconds, out, max(60, arguments.timeout))
            return 1 if wrong else 0
        finally:
            runner.close()
    fuzzer = Fuzzer(runner, chosen or PROTOCOLS, arguments.timeout)
    fuzzer.report_stock = arguments.report_stock
    started = said = time.monotonic()
    failures = []

    def source():
        if arguments.replay is not None:
            yield from replay_source(arguments.replay)
            return
        if not (arguments.programs or arguments.feature or arguments.protocols):
            yield from replay_source(REGRESSIONS)  # `make test` runs them over some of the protocols
        number = seed
        while True:
            made = generate(number)
            if arguments.feature in (None, *made["options"].get("features", ())):
                yield made
            number += 1

    def until():
        nonlocal said
        now = time.monotonic()
        if now - said > 60:
            said = now
            progress(fuzzer, now - started)
        return now - started > arguments.seconds or (arguments.programs and fuzzer.count["programs"] >= arguments.programs) or (arguments.stop and failures)

    def report(made, results, found):
        failures.append((made, results, found))
        name = label(made)
        for protocol, text in found.items():
            fuzzer.found[protocol].append(made["seed"])
            print(f"seed {label(made)}: {protocol}: {text}", flush=True)
        (out / f"{name}.json").write_text(programs.dumps(made))
        (out / f"{name}.txt").write_text(programs.listing(made) + "\n" + "\n".join(f"{p}: {t}" for p, t in found.items()) + "\n")

    try:
        fuzzer.run_all(source(), until, report)
        progress(fuzzer, time.monotonic() - started)
        for made, results, found in list(failures):
            if STOCK not in found and len(failures) <= 20 and not fuzzer.settled(made, results):
                print(f"seed {label(made)}: no difference after all: grpc does not settle it", flush=True)
                failures.remove((made, results, found))
        for made, results, found in failures[:10]:
            if not arguments.no_shrink:
                shrink_one(fuzzer, made, results, found, out, arguments.shrink_seconds)
    finally:
        fuzzer.clusters.close()
        runner.close()
    if fuzzer.count["programs"] and fuzzer.count["programs"] == fuzzer.count["refused"] + fuzzer.count["not built"]:
        print("no program ran over stock grpc: nothing was compared", flush=True)
        return 1
    return 1 if failures else 0


def shrink_one(fuzzer, made, results, found, out, seconds):
    """Writes the smallest program that shows the first of its differences, beside the original."""
    protocol, text = next(iter(found.items()))
    # A hang must stay a hang, and a wrong value a wrong value.
    hang = "hangs" in text
    timeout, fuzzer.timeout = fuzzer.timeout, min(fuzzer.timeout, 6.0) if hang else fuzzer.timeout

    def shows(candidate):
        try:
            for _ in range(1 if hang or left_open(candidate) else 2):
                if protocol == STOCK:
                    return compare.hangs(fuzzer.results(candidate, [STOCK])[STOCK])
                verdict, differ = fuzzer.judge(candidate, fuzzer.results(candidate, [*stocks(candidate), protocol]))
                if verdict == "sound" and protocol in differ and ("hangs" in differ[protocol]) == hang:
                    return True
        except Exception as error:  # not every cut leaves a valid graph
            if not isinstance(error, (ValueError, TypeError, KeyError)):
                raise
        return False

    small = shrink.shrink(made, shows, seconds)
    fuzzer.timeout = timeout
    name = out / f"{label(made)}-small"
    Path(f"{name}.json").write_text(programs.dumps(small))
    Path(f"{name}.txt").write_text(programs.listing(small) + f"\n{protocol}: {text}\n")
    print(f"seed {label(made)}: shrunk for {protocol}: {name}.txt", flush=True)


def progress(fuzzer, seconds):
    count = dict(fuzzer.count)
    done = count.pop("programs", 0)
    by_protocol = {name: len(seeds) for name, seeds in fuzzer.found.items()}
    print(f"{seconds:.0f} s: {done} programs ({done / max(seconds, 1):.1f}/s), differences {by_protocol or 0}, {count}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
