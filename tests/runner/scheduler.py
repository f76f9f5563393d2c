"""Runs jobs beside each other, within a budget of cores and memory, and ends those that exceed their limit."""

import os
import signal
import subprocess
import sys
import time

# A busy machine may run jobs this many times as slowly before their limits end them (STARWIRE_TEST_PATIENCE).
PATIENCE = float(os.environ.get("STARWIRE_TEST_PATIENCE", "1"))


def cores():
    return len(os.sched_getaffinity(0))


def memory():
    """GB that jobs may take: what is available, less what the system and its caches need."""
    with open("/proc/meminfo") as lines:
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return max(4.0, available / 1e6 - 2)


def descendants(root):
    """Returns the processes that descend from `root`, itself included."""
    children = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as stat:
                    parent = int(stat.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


class Run:
    """A job that was started."""

    def __init__(self, job, folder, waited_for, queued):
        self.job, self.waited_for, self.queued = job, waited_for, queued
        self.log = folder / f"{job.name.replace('/', '-')}.log"
        self.times = folder / f"{job.name.replace('/', '-')}.times"
        for stale in (self.times, self.times.with_name(self.times.name + ".now")):
            stale.unlink(missing_ok=True)
        environment = {**os.environ, "STARWIRE_TEST_TIMES": str(self.times), **job.environment}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", job.command], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        self.started = time.monotonic()
        self.wall = self.cpu = 0.0
        self.verdict = None

    def poll(self):
        """Returns true if the job has ended, and ends it if it has exceeded its limit."""
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if pid:
            self._ended(status, usage)
        elif time.monotonic() - self.started > self.job.limit * PATIENCE:
            self.kill(f"exceeded its limit of {self.job.limit * PATIENCE:.0f} s{self._now()}")
        return self.verdict is not None

    def _ended(self, status, usage):
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.wall = time.monotonic() - self.started
        self.cpu = usage.ru_utime + usage.ru_stime
        self.verdict = "passed" if status == 0 else "FAILED"

    def _now(self):
        now = self.times.with_name(self.times.name + ".now")
        return f" in {now.read_text()}" if now.exists() else ""

    def kill(self, reason):
        """Ends the job and all its processes; `reason` is the last line of its log."""
        for pid in reversed(descendants(self.process.pid)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        _, status, usage = os.wait4(self.process.pid, 0)
        self._ended(status, usage)
        # A shell whose children were killed may still have ended well.
        self.verdict = "FAILED"
        with open(self.log, "a") as log:
            log.write(f"\nscripts/test: {self.job.name} {reason}\n")


class Scheduler:
    """`report(run)` is called for each job that has ended."""

    def __init__(self, jobs, folder, report):
        self.jobs, self.folder, self.report = list(jobs), folder, report
        self.cores, self.memory = float(cores()), memory()
        self.running, self.done, self.services = [], {}, []
        self.ready_since, self.ranks = {}, {}

    def _rank(self, job):
        """Expected work of the chain of jobs that begins with this one and has most: small jobs fill the gaps, so they come last."""
        if job.name not in self.ranks:
            after = [other for other in self.jobs if job.name in (*other.needs, other.after)]
            self.ranks[job.name] = job.work + max(map(self._rank, after), default=0)
        return self.ranks[job.name]

    def _ready(self, job):
        return all(self.done.get(name) == "passed" for name in job.needs) and (not job.after or job.after in self.done)

    def _fits(self, job):
        cores, memory = (sum(getattr(run.job, what) for run in self.running) for what in ("cores", "memory"))
        return not self.running or (cores + job.cores <= self.cores and memory + job.memory <= self.memory)

    def _start(self, waiting):
        """Starts what may start, most urgent first; a job that does not fit yet does not keep smaller ones from starting."""
        for job in sorted(waiting, key=self._rank, reverse=True):
            failed = [name for name in job.needs if self.done.get(name, "passed") != "passed"]
            if failed:
                waiting.remove(job)
                self.done[job.name] = "not run"
                print(f"{job.name}: not run, because {', '.join(failed)} did not pass", flush=True)
                continue
            if not self._ready(job):
                continue
            queued = time.monotonic() - self.ready_since.setdefault(job.name, time.monotonic())
            if self._fits(job):
                waiting.remove(job)
                run = Run(job, self.folder, list(job.needs), queued)
                (self.services if job.ready_file else self.running).append(run)

    def _check_services(self):
        for run in self.services:
            if run.job.name in self.done:
                continue
            if os.path.exists(run.job.ready_file):
                self.done[run.job.name] = "passed"
            elif run.poll():
                self.done[run.job.name] = "FAILED"
                self.report(run)

    def run(self):
        waiting = list(self.jobs)
        told = time.monotonic()
        try:
            while waiting or self.running:
                self._start(waiting)
                time.sleep(0.05)
                self._check_services()
                for run in [run for run in self.running if run.poll()]:
                    self.running.remove(run)
                    self.done[run.job.name] = run.verdict
                    self.report(run)
                    told = time.monotonic()
                if time.monotonic() - told > 60:
                    told = time.monotonic()
                    print(f"… still running: {', '.join(run.job.name + run._now() for run in self.running)}", flush=True)
        finally:
            for run in self.running + [run for run in self.services if run.verdict is None]:
                run.kill("was ended with scripts/test")
        return all(verdict == "passed" for verdict in self.done.values())


def default_signals():
    """A shell without job control, and `nohup`, start processes with signals ignored, which all descendants would inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        # Children start with the default, and this process goes on.
        signal.signal(signal.SIGHUP, lambda *_: None)
    else:
        # Jobs have sessions of their own, so the end of the terminal does not reach them.
        signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
