"""Random histories under faults: workers push, pull, write and read while a nemesis kills, stops and cuts off tasks; then a checker that knows only the
recorded history decides whether each update that was acknowledged is there exactly once, and each other one at most once.

    make histories                                             # 5 minutes, protocols in turn
    make histories ARGS="--seconds 3600 --seed 7 --protocols star_server,grpc++ --proof tls"
    make histories ARGS="--seed 7 --protocols star_server --plant repeat"   # must find it: drop, repeat or swap
    make histories ARGS="--seed 7 --protocols star_server --shrink"         # fewer faults of a run that failed
    make histories ARGS="--protocols star_server+state --faults kill_server,move_server"  # no step may fail

"+state": servers keep their variables (STARWIRE_STATE). Those that come back must have all that was acknowledged before the flush that they name, and of later
updates what came first. "+sync" (STARWIRE_STATE_MODE=sync): they must have all that was acknowledged.

A seed decides the faults and their times, the steps of each worker and the protocol; the machine decides how they meet.
"""

import argparse
import collections
import contextlib
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])  # of the tasks

import checker  # noqa: E402
import cluster as harness  # noqa: E402
import workload  # noqa: E402
import proxy  # noqa: E402

STATE, SYNC = "+state", "+sync"
PROTOCOLS = ("grpc++", "star_server", "star_server_lite", "star_server" + STATE, "star_server_lite" + SYNC)
SERVERS, WORKERS = 2, 2
# After the last fault, each worker makes a step with each server within these seconds.
RECOVERY_S = 90
# A server that keeps a state has written it once within these seconds.
LONGEST_FLUSH_S = 10
# Where copies and moves are made: whoever waits for the other process would wait for ever.
NOT_WHILE_SERVING = ("standby.rs", "hand_over.rs", "copy.rs")
KEEPALIVE = {"STARWIRE_UNIX": "off", "STARWIRE_KEEPALIVE": "after_ms=1000,timeout_ms=2000"}


def has_fail_points():
    """Whether the library was built with the feature fail-points."""
    return fail_points()[0].encode() in Path(harness.library_path()).read_bytes()


def fail_points(without=()):
    """The names of all places where the product can be killed, but for those in these files."""
    files = [path for folder in ("crates", "src") for path in (HERE.parents[1] / folder).rglob("*.rs") if path.name not in ("fail_points.rs", *without)]
    return sorted({name for path in files for name in re.findall(r'fail_point!\(\s*"([^"]+)"', path.read_text())})


def faults(seed, seconds, only=(), has_state=False):
    """Returns [(time, word, arguments, seconds that it lasts)]."""
    chance, found, now = random.Random(f"faults {seed}"), [], 4.0
    words = {"kill_server": 3, "kill_worker": 2, "stop_server": 3, "stop_worker": 2, "cut": 4, "delay": 2, "reset": 4, "no_descriptors": 1, "short_memory": 1}
    if has_state:
        words |= {"full_disk": 2} if has_fail_points() else {"full_disk": 2, "move_server": 3}  # nobody starts a server again while another one waits for its state
    words = {word: weight for word, weight in words.items() if not only or word in only}
    while now < seconds - 6:
        word = chance.choices(list(words), list(words.values()))[0]
        server, worker = chance.randrange(SERVERS), chance.randrange(WORKERS)
        direction = chance.choice([(True, True), (True, False), (False, True)])
        back = chance.random() < 0.3  # the server's connection to the worker
        found.append((now, word, {"server": server, "worker": worker, "direction": direction, "back": back}, chance.choice([0.1, 0.5, 2.0, 5.0])))
        now += chance.expovariate(1 / 2.5)
    return found


class History:
    """One run: a cluster, its faults, and what has come of it."""

    def __init__(self, runner, folder, seed, protocol, plant):
        self.folder, self.seed, self.plant = folder, seed, plant
        self.network = proxy.Network()
        self.is_sync = protocol.endswith(SYNC)
        self.has_state = self.is_sync or protocol.endswith(STATE)
        mode = "sync" if self.is_sync else "async"
        state = {"STARWIRE_STATE": str(folder / "state"), "STARWIRE_STATE_MODE": mode, "STARWIRE_RECOVER_S": RECOVERY_S} if self.has_state else {}
        tasks = {"ps": SERVERS, "worker": WORKERS}
        self.cluster = harness.Cluster(runner, protocol.removesuffix(STATE).removesuffix(SYNC), tasks, environment={**KEEPALIVE, **state}, start=False)
        self.points = fail_points(NOT_WHILE_SERVING) if has_fail_points() else ()
        self.random, self.alive, self.down = random.Random(f"points {seed}"), {}, set()
        self.taken = collections.defaultdict(list)  # by server: what gives back what it lacks
        self.limits = {}  # of processes, as they were
        self.slowed = set()  # servers that may not have written a state yet
        self.armed, self.starved = set(), set()  # servers that may end by themselves: at a fail point, or for lack of memory
        # Where each server is besides the address that everybody knows, its process there, and that process's environment.
        self.away = {}
        self.links = {}
        real = self.cluster.spec
        self.specs = {}
        for job, index in [("ps", n) for n in range(SERVERS)] + [("worker", n) for n in range(WORKERS)]:
            self.specs[job, index] = {other: [self._address(job, index, other, n) for n in range(len(real[other]))] for other in real}
        self.events, self.done, self.wrong, self.summary, self.retired = [], [], [], {}, {}
        self.runner = runner
        tasks = [self._begin(*key) for key in self.specs]
        for task in tasks:
            task.result(harness.START_TIMEOUT)
        for worker in range(WORKERS):
            self._work(worker)

    def _address(self, job, index, other, number):
        address = self.cluster.spec[other][number]
        if (job, index) == (other, number) or job == other:
            return address
        link = self.links[job, index, other, number] = proxy.Link(self.network, address)
        return link.address

    def _begin(self, job, index, **more):
        spec, environment = self.away.get(index, (self.specs[job, index], {})) if job == "ps" else (self.specs[job, index], {})
        return self.cluster.begin_start(job, index, spec=spec, **environment, **more)

    def _work(self, worker):
        # A step may wait for a server that comes back.
        patience = RECOVERY_S if self.has_state else 10
        self.cluster["worker", worker].begin(workload.work, self.cluster.target("worker", worker), worker, SERVERS, str(self.folder), self.seed, patience, self.plant)

    def link(self, server, worker, back, **_):
        return self.links[("ps", server, "worker", worker) if back else ("worker", worker, "ps", server)]

    # Each fault returns what undoes it.

    def cut(self, direction, **who):
        link = self.link(**who)
        link.cut(*direction)
        return link.heal

    def delay(self, **who):
        link = self.link(**who)
        link.delay = 0.05
        return link.heal

    def reset(self, **who):
        self.link(**who).reset()

    def is_possible(self, server, worker, **_):
        """Not if one of them is away."""
        gone = {key for key, task in self.cluster.tasks.items() if task.poll() is not None}
        return ("ps", server) not in gone and ("worker", max(worker, 1)) not in gone

    def has_effect(self, word, server, worker, back, **_):
        """Not if it is done to a link that nobody uses. A worker finds a server that has moved without the link."""
        if word not in ("cut", "delay", "reset"):
            return True
        return server not in self.away and bool(self.link(server, worker, back).connections)

    def _stop(self, job, index):
        pid = self.cluster[job, index].pid
        os.kill(pid, signal.SIGSTOP)
        return lambda: os.kill(pid, signal.SIGCONT)

    def _take(self, server, undo):
        self.taken[server].append(undo)
        self.slowed.add(server)
        return undo

    def stop_server(self, server, **_):
        return self._take(server, self._stop("ps", server))

    def stop_worker(self, worker, **_):
        return self._stop("worker", worker)

    def _limit(self, server, which, soft):
        """Returns what takes the limit away, also if another one came in between."""
        pid = self.cluster["ps", server].pid
        before = self.limits.setdefault((pid, which), resource.prlimit(pid, which))
        resource.prlimit(pid, which, (soft, before[1]))
        return self._take(server, lambda: resource.prlimit(pid, which, before))

    def no_descriptors(self, server, **_):
        """The server's connections are lost, and it cannot accept others."""
        undo = self._limit(server, resource.RLIMIT_NOFILE, len(os.listdir(f"/proc/{self.cluster['ps', server].pid}/fd")))
        for worker in range(WORKERS):
            self.link(server, worker, False).reset()
        return undo

    def full_disk(self, server, **_):
        """No file of the server grows. Python ignores the signal that says so."""
        return self._limit(server, resource.RLIMIT_FSIZE, 4096)

    def short_memory(self, server, **_):
        """The server gets little more memory than it has. TensorFlow may end the process for that, or fail the step."""
        pages = int(Path(f"/proc/{self.cluster['ps', server].pid}/statm").read_text().split()[0])
        self.starved.add(server)
        undo = self._limit(server, resource.RLIMIT_AS, pages * resource.getpagesize() + self.random.choice([0, 1 << 20, 16 << 20]))

        def end():
            undo()
            self.starved.discard(server)

        return self._take(server, end)

    def kill_server(self, server, **_):
        task = self.cluster["ps", server]
        begin = time.monotonic() if task.poll() is None else self.alive[server]
        task.kill()
        return self._killed(server, begin)

    def _killed(self, server, begin):
        """Returns what starts it again."""
        self.down.add(server)
        kill = {"what": "kill", "server": server, "begin": begin, "end": time.monotonic()}
        if not self.has_state:
            self.events.append(kill)
        return lambda: self._restart(server, kill)

    def _may_have_ended(self, server):
        """At a fail point, or for lack of memory: TensorFlow may abort then."""
        task = self.cluster["ps", server]
        if server in self.starved:
            task.expected_exit, task.allow_scary = task.poll(), ("",)
        elif server in self.armed:
            task.expected_exit = -signal.SIGKILL
        return task.poll() == task.expected_exit

    def _died(self):
        """Returns what starts those servers again that have ended by themselves."""
        found = []
        for server in set(range(SERVERS)) - self.down:
            task = self.cluster["ps", server]
            if task.poll() is None:
                self.alive[server] = time.monotonic()
                continue
            self.done.append("died")
            if not self._may_have_ended(server):
                self.wrong.append(f"server {server} has ended by itself with {task.poll()}: {task.full_log()[-1500:]}")
            found.append(self._killed(server, self.alive[server]))
        return found

    def _restart(self, server, kill):
        point = self.random.choice(self.points) if self.points else None
        self.armed = self.armed | {server} if point else self.armed - {server}
        self.starved.discard(server)
        task = self._begin("ps", server, FAIL_POINTS=f"{point}=kill@{self.random.choice([1, 2, 20])}" if point else "")
        try:
            task.result(harness.START_TIMEOUT)
        except harness.TaskDied:
            if not point or not self._may_have_ended(server):
                raise
            self.done.append("died")
            task = self._begin("ps", server)
            task.result(harness.START_TIMEOUT)
        self.alive[server] = time.monotonic()
        self.down.discard(server)
        if self.has_state:
            kill["kept_until"] = kill["end"] if self.is_sync else -math.inf
            if not self.is_sync:
                kill["kept_until"] = self._kept_until(server, task.full_log(), kill)
            self.slowed.discard(server)
            self.events.append(kill)

    def _kept_until(self, server, log, kill):
        """What the server says that it has: all that was acknowledged before."""
        if found := re.search(r"(\d{10}\.\d{6}) .* has its state back from .*, of flush \d+, which began ([\d.]+) s ago", log):
            return float(found[1]) - time.time() + time.monotonic() - float(found[2]) - 0.1
        made = [event for event in self.recorded() if event["what"] == "init" and event["ok"] and event["name"].endswith(str(server))]
        begun = max((event["end"] for event in made), default=math.inf)
        if "keeps its state in" not in log or kill["begin"] > begun + LONGEST_FLUSH_S and server not in self.slowed:
            self.wrong.append(f"server {server}, killed at {kill['begin']:.3f}, has no state, though its last variable had a value at {begun:.3f}: {log[-1500:]}")
        return -math.inf

    def move_server(self, server, **_):
        """To another process at another address, or back. The process before sends workers on. It lacks nothing, as nothing else is done meanwhile."""
        for undo in self.taken.pop(server, ()):
            self._undo(undo)
        before, known = self.cluster["ps", server], self.cluster.spec["ps"][server]
        if server in self.away and self.away[server][0] is not self.specs["ps", server]:
            # At the address that everybody knows is the process that sends them on.
            self.retired[server].kill()
            spec, folder = self.specs["ps", server], "state"
        else:
            servers = [f"127.0.0.1:{harness.free_port()}" if at == server else address for at, address in enumerate(self.cluster.spec["ps"])]
            spec, folder = {**self.specs["ps", server], "ps": servers}, "state-away"
        old = self.away.get(server, (self.specs["ps", server],))[0]["ps"][server]
        self.away[server] = spec, {"STARWIRE_STATE": str(self.folder / folder), "STARWIRE_STATE_FROM": f"move={old}"}
        self._begin("ps", server).result(harness.START_TIMEOUT)
        if spec["ps"][server] == known:
            before.kill()
        else:
            self.retired[server] = before

    def kill_worker(self, worker, **_):
        worker = max(worker, 1)  # the chief gives variables their values
        self.cluster["worker", worker].kill()

        def undo():
            self._begin("worker", worker).result(harness.START_TIMEOUT)
            self._work(worker)

        return undo

    @staticmethod
    def _undo(function):
        with contextlib.suppress(ProcessLookupError):  # another fault has killed it
            function()

    def run(self, plan, seconds, is_exact):
        """Carries the faults out, waits until everybody makes steps again, and returns the violations. `is_exact`: each fault waits until it has an
        effect."""
        begun, wrong = time.monotonic(), self.wrong
        awaits = lambda word, arguments: is_exact and word is not None and not (self.is_possible(**arguments) and self.has_effect(word, **arguments))
        undo = []  # (time, function)
        with contextlib.ExitStack() as last:
            last.callback(lambda: [self._undo(function) for _, function in undo])
            for at, word, arguments, lasts in [*plan, (seconds, None, {}, 0)]:
                while (now := time.monotonic() - begun) < at or (now < at + 60 and awaits(word, arguments)):
                    due = [entry for entry in undo if entry[0] <= now]
                    undo[:] = [entry for entry in undo if entry[0] > now]
                    for _, function in due:
                        self._undo(function)
                    undo += [(now + self.random.uniform(0, 2), function) for function in self._died()]
                    time.sleep(0.02)
                if word is None or not self.is_possible(**arguments):
                    continue
                if not self.has_effect(word, **arguments):
                    self.done.append(f"{word} of nothing")
                    continue
                self.done.append(word)
                ends = getattr(self, word)(**arguments)
                if ends is not None:
                    undo.append((time.monotonic() - begun + lasts, ends))
        self.points = ()
        for server in sorted(self.armed):
            self.kill_server(server)()
        calm = time.monotonic()
        wrong += self._recovers(calm)
        (self.folder / "end").touch()
        for worker in range(WORKERS):
            try:
                self.cluster["worker", worker].result(60 + workload.LAST_STEPS_S)
            except (harness.TaskTimeout, harness.TaskDied, harness.RemoteError) as error:
                wrong.append(f"worker {worker} does not end: {str(error)[:3000]}")
        for task in self.runner.tasks:
            wrong += task.complaints()
        (self.folder / "servers.jsonl").write_text("".join(json.dumps(event) + "\n" for event in self.events))
        return wrong + self._check(calm) + self._failed()

    def recorded(self):
        """Returns the events of all workers. The last one of a worker that was killed has no end."""
        events = list(self.events)
        for path in sorted(self.folder.glob("worker*.jsonl")):
            latest = None
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # the worker was killed while it wrote
                    event = json.loads(line)
                    if latest is not None and latest["begin"] != event["begin"]:
                        events.append(latest)
                    latest = event
            if latest is not None:
                events.append(latest)
        restored = [{**event, "what": "init", "name": name, "base": base} for event in events if event["what"] == "restore" for name, base in event["bases"].items()]
        return events + restored

    def _recovers(self, calm):
        missing = []
        server_of, _ = workload.variables(SERVERS)
        while time.monotonic() < calm + RECOVERY_S:
            done = {
                (event["worker"], server_of[name])
                for event in self.recorded() if event["what"] in checker.CHECKS and event["ok"] and event["begin"] > calm
                for name in event["names"]
            }
            missing = [f"worker {worker} with server {server}" for worker in range(WORKERS) for server in range(SERVERS) if (worker, server) not in done]
            if not missing:
                return []
            time.sleep(0.3)
        for task in self.cluster.tasks.values():
            task.dump_stacks()
        return [f"no step within {RECOVERY_S} s after the last fault: {', '.join(missing)}"]

    def _check(self, calm):
        events = self.recorded()
        server_of, kind_of = workload.variables(SERVERS)
        verdict = checker.check(events, server_of, kind_of)
        wrong = verdict.wrong
        unsure = {name for name, begin in verdict.unsure.items() if begin > calm}
        if missing := {name for name in server_of if verdict.latest.get(name, 0) < calm} - unsure:
            wrong.append(f"not compared at the end: {sorted(missing)}")
        updates = [event for event in events if event["what"] in checker.CHECKS]
        last = {worker: {event["last"] for event in updates if event["ok"] and "last" in event and event["worker"] == worker} for worker in range(WORKERS)}
        for worker, steps in last.items():
            tried = {event["last"]: event.get("error", "it has not ended") for event in updates if "last" in event and event["worker"] == worker}
            wrong += [f"worker {worker} cannot make a step at the end: {step}: {error}" for step, error in tried.items() if step not in steps]
            if not steps:
                wrong.append(f"worker {worker} has made no last steps")
        self.summary = {
            "updates": len(updates), "acknowledged": sum(event["ok"] for event in updates), "variables compared": verdict.compared, "proved": verdict.proved,
            "unsure": len(unsure), "planted": [event["element"] for event in updates if "planted" in event],
            "oldest flush": round(max((kill["begin"] - kill["kept_until"] for kill in self.events), default=0), 1) if self.has_state else None,
            "checkpoints": sum(event["what"] == "read" and event["ok"] and "saved" in event for event in events),
            "restored": sum(event["what"] == "restore" and event["ok"] for event in events), "faults": dict(collections.Counter(self.done)),
        }
        return wrong

    def _failed(self):
        """Where servers keep their state and nothing else happens than that they die, no step fails that consists of star calls."""
        if not self.has_state or set(self.done) - {"kill_server", "move_server", "died", "full_disk"}:
            return []
        events = self.recorded()
        # A variable that a server had not written yet when it died is given a value again. (One that it had is not: the checker would say so.)
        begun = max(event["end"] for event in events if event["what"] == "init" and event["ok"])
        failed = [event for event in events if "error" in event and event["begin"] > begun and not event.get("saved")]
        # TensorFlow runs graphs that are on one server as a whole, and nobody knows whether it did.
        failed = [event for event in failed if not (event["what"] == "count" and event["error"].startswith("UnavailableError"))]
        return [f"a step failed: {event}" for event in failed]

    def close(self):
        self.cluster.close()
        harness.kill_all(self.retired.values())
        self.network.close()


def once(runner, out, seed, protocol, seconds, plant=None, plan=None, only=()):
    """Returns the violations of one run, and what it has done."""
    is_exact = plan is not None
    plan = faults(seed, seconds, only, STATE in protocol or SYNC in protocol) if plan is None else plan
    folder = (out / f"{protocol}-{seed}").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    history = History(runner, folder, seed, protocol, plant)
    try:
        wrong = history.run(plan, seconds, is_exact)
        return wrong, history.summary
    finally:
        history.close()


def near(planted):
    """The elements of planted faults, and those that a swap hits."""
    return [element + more for element in planted for more in (0, 100)]


def kind(violation):
    """What a violation is about, without times and numbers."""
    return re.sub(r"[\d.]+", "", violation.split(": ")[-1][:60] if "update {" not in violation else violation.split("update {")[0])


def shrink(plan, try_once, tries=3):
    """Leaves faults out as long as the run still fails in the same way; each plan is tried several times. Returns None if the whole plan does not fail."""

    def fails(faults):
        return next((kind(wrong[0]) for _ in range(tries) if (wrong := try_once(faults))), None)

    wanted, size = fails(plan), max(len(plan) // 2, 1)
    if wanted is None:
        return None
    while True:
        for start in range(0, len(plan), size):
            fewer = plan[:start] + plan[start + size :]
            if fails(fewer) == wanted:
                plan = fewer
                break
        else:
            if size == 1:
                return plan
            size //= 2
        print(f"fails with {len(plan)} faults", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="of all runs together")
    parser.add_argument("--length", type=float, default=40, help="seconds of faults in one run")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--protocols", default=",".join(PROTOCOLS))
    parser.add_argument("--faults", type=lambda text: text.split(","), default=(), help="only these, by the names of the functions")
    parser.add_argument("--proof", choices=["none", "secret", "tls", "turns"], default="turns")
    parser.add_argument("--plant", choices=["drop", "repeat", "swap"], help="a fault that the checker must find")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("target/histories"))
    options = parser.parse_args()
    protocols, begun, seed, failed, totals = options.protocols.split(","), time.monotonic(), options.seed, 0, collections.Counter()
    while True:
        proof = ["none", "secret", "tls"][seed % 3] if options.proof == "turns" else options.proof
        os.environ["STARWIRE_TEST_PROOF"] = proof
        if proof == "none":
            del os.environ["STARWIRE_TEST_PROOF"]
        for protocol in protocols:
            runner = harness.Runner(keep=lambda: bool(failed))
            try:
                if options.shrink:
                    plan = faults(options.seed, options.length, options.faults, STATE in protocol or SYNC in protocol)
                    plan = shrink(plan, lambda plan: once(runner, options.out, options.seed, protocol, options.length, options.plant, plan)[0])  # noqa: B023
                    print(*(["the run does not fail"] if plan is None else plan), sep="\n")
                    return 0 if plan is not None else 1
                wrong, summary = once(runner, options.out, seed, protocol, options.length, options.plant, only=options.faults)
                failed += bool(wrong) if not options.plant else any(f"[{element}]" in line for line in wrong for element in near(summary["planted"]))
            finally:
                runner.close()
            totals.update(summary["faults"] | {word: summary[word] for word in ("updates", "acknowledged", "variables compared", "proved")} | {"histories": 1})
            print(f"seed {seed} {protocol} {proof}: {summary}{' FAILED' if wrong else ''}", flush=True)
            for line in wrong[:20]:
                print(f"    {line[:1500]}", flush=True)
            if wrong:
                more = "".join(f" --{word} {value}" for word, value in (("faults", ",".join(options.faults)), ("plant", options.plant)) if value)
                library = f"STARWIRE_LIBRARY={Path(harness.library_path()).absolute()} " if has_fail_points() else ""
                print(f"    again: {library}make histories ARGS=\"--seed {seed} --protocols {protocol} --proof {proof} --seconds 1 --length {options.length:g}{more}\"")
                print(f"    library: {harness.library_path()}; records: {options.out}; logs: {runner.directory}", flush=True)
        seed += 1
        if time.monotonic() - begun > options.seconds or failed and options.plant:
            break
    print(dict(totals))
    if not options.plant and totals["histories"] >= 5 and totals["proved"] < totals["acknowledged"] // 2:
        failed += 1
        print("too few updates were looked at")
    print(f"{failed} histories failed" if failed else "no violation")
    return 1 if bool(failed) != bool(options.plant) else 0


if __name__ == "__main__":
    sys.exit(main())
