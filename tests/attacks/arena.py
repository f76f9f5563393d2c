"""Trains on real servers while they are attacked, and checks the invariants that hold during and after every attack.

`Arena.under(attack)` runs an attack in its own process beside a worker that trains without pause. It asserts, for every attack: the results stay correct,
the training goes on during the attack and after it, no step hangs; the server survives and logs no alarming message; a member connecting meanwhile and a
new TensorFlow session are served; /healthz answers; the log grows by few lines; and memory, threads and descriptors return to their levels from before.

With STARWIRE_DEEP_TESTS=1 it also measures, which needs a machine that does nothing else: each attack runs several times, each time followed by a harmless
process that uses the same CPU time. The median pace is at least 80 % of that beside the harmless process, and no step takes two seconds.
"""

import contextlib
import ctypes
import multiprocessing
import os
import re
import resource
import signal
import statistics
import struct
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import client
import cluster as harness
import training
import wire
from authority import identity_for_all

MEASURES = bool(os.environ.get("STARWIRE_DEEP_TESTS"))
ROUNDS = 3 if MEASURES else 1  # of an attack
WORST = 0.8  # of the pace beside the control process, when measured
LONGEST_STEP = 2.0 if MEASURES else 30.0  # seconds; 30 is a hang
GOES_ON = 50  # steps during an attack, and after it
MOST_LOG_LINES = 30
RETURNS = 1.1  # memory afterwards, relative to before …
SLACK = 8 << 20  # … plus what the allocator keeps after first use
PATIENCE = 10.0 if MEASURES else 60.0
CPU_CLOCK = 2  # of another process, clock_getcpuclockid(3)
SECRET = "an attacker may know this one, or not"
ENVIRONMENT = {
    "STARWIRE_STAR_LIMITS": "plans=64,values=4096,value_bytes=64M", "STARWIRE_STAR_MAX_TOTAL_BYTES": "256M",
}  # fmt: skip
# Expected messages of TensorFlow's kernels about the attackers' graphs.
OF_KERNELS = ("Skipping cancelled dequeue attempt",)
PR_SET_PDEATHSIG = 1

fork = multiprocessing.get_context("fork")


class Process:
    """Reads a process's state from /proc."""

    def __init__(self, pid):
        self.directory = Path("/proc") / str(pid)

    def _status(self, name):
        text = (self.directory / "status").read_text()
        return int(re.search(rf"^{name}:\s+(\d+)", text, re.M).group(1))

    def memory(self):
        return self._status("VmRSS") << 10

    def forget_peak(self):
        (self.directory / "clear_refs").write_text("5")

    def peak(self):
        """Returns the peak memory since `forget_peak`."""
        return self._status("VmHWM") << 10

    def threads(self, name=None):
        """Their number; of those with this name, if there is one."""
        if name is None:
            return self._status("Threads")
        found = 0
        for thread in os.listdir(self.directory / "task"):
            with contextlib.suppress(OSError):  # it has ended
                found += (self.directory / "task" / thread / "comm").read_text().strip() == name
        return found

    def descriptors(self):
        return len(os.listdir(self.directory / "fd"))

    def unix_name(self):
        """Returns the name of the abstract socket on which it listens for tasks of its host."""
        inodes = set()
        for name in os.listdir(self.directory / "fd"):
            try:
                inodes.add(os.readlink(self.directory / "fd" / name))
            except OSError:
                continue
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            columns = line.split()
            if len(columns) == 8 and columns[7].startswith("@starwire") and f"socket:[{columns[6]}]" in inodes:
                return columns[7][1:]
        return ""


@dataclass
class Outcome:
    """The result of an attack and its effect on the cluster."""

    result: object = None  # return value of the attack's first round
    before: float = 0.0  # steps/s
    during: float = 0.0
    control: float = 0.0
    after: float = 0.0
    longest: float = 0.0
    cpu: float = 0.0  # cores
    kept: list = field(default_factory=list)  # the share of its pace that the training kept in each round
    base_memory: int = 0
    peak_memory: int = 0
    base_threads: int = 0
    peak_threads: int = 0
    peak_descriptors: int = 0
    log_lines: int = 0
    probes: int = 0
    refused: list = field(default_factory=list)
    visit: float = 0.0

    @property
    def extra_memory(self):
        return self.peak_memory - self.base_memory

    def median_kept(self):
        return statistics.median(self.kept)

    def line(self):
        return (
            f"steps/s {self.before:5.0f} before, {self.during:5.0f} during ({self.control:5.0f} beside the control, {self.cpu:.2f} cores), {self.after:5.0f} after, "
            f"kept {', '.join(f'{share:.2f}' for share in self.kept) or '?'}; "
            f"longest step {1000 * self.longest:4.0f} ms; +{self.extra_memory >> 20} MiB, +{self.peak_threads - self.base_threads} threads at most; "
            f"{self.log_lines} log lines; {len(self.refused)} of {self.probes} probes refused"
        )


def other_process(function, target, share, pipe, stop):
    """Main function of the attacker's process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    wire.source = target.source
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    pipe.send("ready")
    pipe.recv()
    pace = client.Pace(stop, share)
    try:
        value = "value", function(target, pace)
    except BaseException as error:  # noqa: BLE001  (the test judges every error)
        value = "error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    pipe.send(value)
    # Keep connections open until the test has finished watching.
    while not stop.is_set():
        stop.wait(0.1)
    os._exit(0)


class Attacker:
    def __init__(self, function, target, share):
        self.stop = fork.Event()
        self.pipe, other = fork.Pipe()
        self.process = fork.Process(target=other_process, args=(function, target, share, other, self.stop), daemon=True)
        self.process.start()
        other.close()
        assert self.pipe.poll(60) and self.pipe.recv() == "ready"

    def go(self):
        self.pipe.send("go")

    def cpu(self):
        """Returns the CPU seconds that it has used."""
        return time.clock_gettime(~self.process.pid << 3 | CPU_CLOCK)

    def end(self, timeout=60):
        """Stops the attack and returns its outcome."""
        self.stop.set()
        try:
            if not self.pipe.poll(timeout):
                raise AssertionError(f"the attack itself does not end within {timeout} s")
            return self.pipe.recv()
        finally:
            self.process.join(5)
            self.kill()

    def kill(self):
        if self.process.is_alive():
            self.process.kill()
            self.process.join(5)


class Arena:
    """A parameter server, a worker training on it, a worker whose sessions come and go, and two names for later workers."""

    def __init__(self, runner, protocol, directory, secret=SECRET, tls=False):
        """`tls`: proof by certificates, not by the secret."""
        stock = harness.is_stock(protocol)
        self.protocol, self.secret = protocol, "" if tls else secret
        self.directory = Path(directory)
        self.outcomes = []  # of the current test
        self.certificates = identity_for_all(self.directory / "authority") if tls else {}
        environment = {} if stock else {**ENVIRONMENT, **(self.certificates or {"STARWIRE_SECRET": secret})}
        self.cluster = harness.Cluster(runner, protocol, {"ps": 1, "worker": 4}, environment=environment, start=False)
        self.ps, self.trainer, self.visitor = (self.cluster.start(job, index) for job, index in (("ps", 0), ("worker", 0), ("worker", 1)))
        self.server = Process(self.ps.pid)
        self.address = "" if stock else self.data_port()
        self.stop_file, self.trail = self.directory / "stop", self.directory / "trail"
        self.trainer.begin(training.train, self.cluster.target("worker", 0), str(self.stop_file), str(self.trail))
        self.visitor.call(training.prepare_visits, self.cluster.target("worker", 1), 1)
        self.wait_for_steps()
        for _ in range(3):  # allocate what the first peers allocate for all later ones
            self.visitor.call(training.visit)
            self.greet()
            self.healthy()
        time.sleep(0.5)

    def data_port(self):
        log = self.ps.wait_for_log("data port")
        return "127.0.0.1:" + re.search(r"data port \S+:(\d+)", log).group(1)

    def target(self):
        grpc = self.cluster.spec["ps"][0]
        name = self.server.unix_name() if self.address else ""
        return client.Target(self.address, grpc, "/job:ps/replica:0/task:0", self.protocol, self.secret, name, client.random_source(), self.certificates)

    # Training.

    def stamps(self, most=200_000):
        """Returns the end times of the latest steps."""
        size = self.trail.stat().st_size // 8
        with open(self.trail, "rb") as trail:
            trail.seek(8 * max(0, size - most))
            data = trail.read(8 * most)
        return struct.unpack(f"<{len(data) // 8}d", data[: len(data) // 8 * 8])

    def pace(self, begin, end):
        """Returns steps/s and the longest gap between steps."""
        within = [at for at in self.stamps() if begin <= at <= end]
        gaps = [later - earlier for earlier, later in zip([begin, *within], [*within, end])]
        return len(within) / (end - begin), max(gaps)

    def wait_for_steps(self, count=200, timeout=60):
        deadline = time.monotonic() + timeout
        while not self.trail.exists() or len(self.stamps()) < count:
            assert not self.trainer.ready(), self.trainer.result(1)
            assert time.monotonic() < deadline, f"the training does not get going:\n{self.trainer.log()}"
            time.sleep(0.05)

    def end_training(self):
        """Stops the training, which checked every step; returns the number of steps."""
        self.stop_file.touch()
        return self.trainer.result(60)

    # Legitimate peers.

    def greet(self):
        """Connects as a member from another host and makes a call."""
        if not self.address:
            return
        with client.Member(self.target()._replace(source="127.0.0.1"), task="/job:worker/replica:0/task:3", timeout=30) as member:
            assert member.devices()

    def healthy(self):
        if not self.address:
            return
        wire.source = "127.0.0.1"
        status, _ = wire.http_get(self.address, "/healthz", timeout=30, tls=self.target().tls(protocols=()))
        assert status == 200, f"/healthz answers {status}"

    def probe(self, outcome):
        for name, ask in (("a member's connection", self.greet), ("/healthz", self.healthy)):
            outcome.probes += 1
            try:
                ask()
            except (OSError, AssertionError) as error:
                outcome.refused.append(f"{name}: {type(error).__name__} {error}")

    # Checks after every attack.

    def alive(self):
        died = [str(task) for task in self.cluster.tasks.values() if task.poll() is not None]
        assert not died, f"{died} ended with {[task.poll() for task in self.cluster.tasks.values() if task.poll() is not None]}; log:\n{self.ps.log()}"

    def steps(self):
        """Returns the number of steps so far."""
        return self.trail.stat().st_size // 8

    def watch(self, outcome, seconds, steps=0):
        """Watches the server for `seconds` and until the training has made some steps, probing the server as legitimate peers would."""
        begin, made = time.monotonic(), self.steps()
        next_probe = begin + 0.1
        while (now := time.monotonic()) < begin + seconds or self.steps() < made + steps:
            self.alive()
            assert now < begin + seconds + PATIENCE, f"{self.steps() - made} steps in {now - begin:.0f} s: {outcome.line()}"
            outcome.peak_threads = max(outcome.peak_threads, self.server.threads())
            outcome.peak_descriptors = max(outcome.peak_descriptors, self.server.descriptors())
            if now >= next_probe:
                self.probe(outcome)
                next_probe = now + 0.3
            time.sleep(0.04)

    def under(self, attack, seconds=1.5, share=0.25, visit=True, meanwhile=None, judged=True, log_lines=MOST_LOG_LINES, kept=0):
        """Runs `attack(target, pace)` in another process (see the module) and `meanwhile()` during it. `judged=False` only watches, for comparison.
        `kept`: bytes that may be kept afterwards: TensorFlow's allocator returns no memory of large tensors."""
        outcome = Outcome()
        self.outcomes.append(outcome)
        base_memory, base_threads, base_descriptors = self.server.memory(), self.server.threads(), self.server.descriptors()
        outcome.base_memory, outcome.base_threads = base_memory, base_threads
        self.server.forget_peak()
        log, worker_log = self.ps.log_size(), self.trainer.log_size()
        for attempt in range(ROUNDS):
            self.round(outcome, attack, seconds, share, visit and attempt == 0, meanwhile if attempt == 0 else None, GOES_ON if judged else 0)
        outcome.peak_memory = self.server.peak()
        if not judged:
            return outcome
        log_lines *= ROUNDS
        self.settle(outcome, base_memory + kept, base_threads, base_descriptors)
        new = (self.ps.full_log()[log:] + self.trainer.full_log()[worker_log:]).splitlines()
        new = [line for line in new if not any(words in line for words in OF_KERNELS)]
        outcome.log_lines = len(new)
        return self.judge(outcome, new, log_lines)

    def round(self, outcome, attack, seconds, share, visit, meanwhile, steps):
        attacker = Attacker(attack, self.target(), share)
        try:
            begin = time.monotonic()
            outcome.before, _ = self.pace(begin - 0.7, begin)
            used = attacker.cpu()
            attacker.go()
            self.watch(outcome, seconds, steps)
            end = time.monotonic()
            outcome.cpu = (attacker.cpu() - used) / (end - begin)
            outcome.during, longest = self.pace(begin, end)
            outcome.longest = max(outcome.longest, longest)
            if visit:
                outcome.visit = self.visitor.call(training.visit)
            if meanwhile:
                meanwhile()
            kind, result = attacker.end()
            outcome.result = result if outcome.result is None else outcome.result
        finally:
            attacker.kill()
        self.alive()
        assert kind == "value", f"the attack itself failed: {result}"
        if MEASURES:
            self.control(outcome, seconds)

    def control(self, outcome, seconds):
        """Measures the pace beside a process that uses the attack's CPU time."""
        control = Attacker(lambda target, pace: pace.burn(), self.target(), max(0.001, outcome.cpu))
        try:
            time.sleep(0.1)
            begin = time.monotonic()
            control.go()
            self.watch(Outcome(), seconds)
            outcome.control, _ = self.pace(begin, time.monotonic())
            control.end()
        finally:
            control.kill()
        # Only an attack is slower than both the time before it and the control after it.
        outcome.kept.append(outcome.during / min(outcome.before, outcome.control))

    def settle(self, outcome, memory, threads, descriptors):
        """Waits until training, memory, threads and descriptors have recovered."""
        deadline, made = time.monotonic() + PATIENCE, self.steps()
        while True:
            begin = time.monotonic()
            time.sleep(0.5 if MEASURES else 0.1)
            self.alive()
            outcome.after = max(outcome.after, self.pace(begin, time.monotonic())[0])
            left = []
            if self.steps() < made + GOES_ON:
                left.append(f"{self.steps() - made} steps afterwards")
            if MEASURES and outcome.after < WORST * min(outcome.before, outcome.control):
                left.append(f"{outcome.after:.0f} steps/s afterwards, {outcome.before:.0f} before")
            if self.server.memory() > memory * RETURNS + SLACK:
                left.append(f"{self.server.memory() >> 20} MiB of memory, {memory >> 20} before")
            if self.server.threads() > threads + 1:
                left.append(f"{self.server.threads()} threads, {threads} before")
            if self.server.descriptors() > descriptors + 2:
                left.append(f"{self.server.descriptors()} descriptors, {descriptors} before")
            if not left:
                return
            assert time.monotonic() < deadline, f"{PATIENCE:.0f} s after the attack: {'; '.join(left)}\n{outcome.line()}"

    def judge(self, outcome, lines, most):
        complaints = [line for task in self.cluster.tasks.values() for line in task.complaints()]
        assert not complaints, "\n".join(complaints)
        assert not self.trainer.ready(), f"the training ended: {self.trainer.result(1)}"
        assert not outcome.refused, f"legitimate peers were refused: {outcome.refused[:5]}\n{outcome.line()}"
        assert not MEASURES or outcome.median_kept() >= WORST, f"the training was slowed down: {outcome.line()}"
        assert outcome.longest <= LONGEST_STEP, f"a step hung: {outcome.line()}"
        assert outcome.log_lines <= most, f"{outcome.log_lines} new lines of log:\n" + "\n".join(lines[:20])
        return outcome

    def usable(self):
        """Whether the next attack can begin: every task runs. Only stock gRPC may stop training on its own; see `close`."""
        stopped = harness.is_stock(self.protocol) and self.trainer.ready()
        return self.cluster.tasks and not stopped and all(task.poll() is None for task in self.cluster.tasks.values())

    def close(self):
        try:
            if self.usable() and not self.visitor.busy:
                assert self.end_training() > 0
        except (harness.TaskTimeout, harness.RemoteError):
            # Stock gRPC refuses a step in 10^5 as received twice, because its request ids repeat (cc/worker/worker.cc), and some hang. The tests saw their own steps.
            if not harness.is_stock(self.protocol):
                raise
        finally:
            self.cluster.close()
