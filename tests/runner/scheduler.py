"""Runs jobs beside each other, within a budget of cores and memory, and ends those that exceed their limit."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# A busy machine may run jobs this many times as slowly before their limits end them (STARWIRE_TEST_PATIENCE).
PATIENCE = float(os.environ.get("STARWIRE_TEST_PATIENCE", "1"))


def _limits(name):
    """The words of this file of our control group and of those around it."""
    own = "/"
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as lines:
        own = next((line[3:].strip() for line in lines if line.startswith("0::")), own)
    folder = Path("/sys/fs/cgroup") / own.lstrip("/")
    for group in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            yield (group / name).read_text().split()


def cores():
    quotas = [int(quota) / int(period) for quota, period in _limits("cpu.max") if quota != "max"]
    return min([len(os.sched_getaffinity(0)), *(max(1, int(quota)) for quota in quotas)])


def memory():
    """GB that jobs may take: what is available, less what the system and its caches need."""
    with open("/proc/meminfo") as lines:
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    limits = [int(limit) / 1e9 for (limit,) in _limits("memory.max") if limit != "max"]
    return max(4.0, min([available / 1e6, *limits]) - 2)


def descendants(root):
    """Returns the processes that descend from `root` or are in its session, itself included."""
    children, session = {}, []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as stat:
                    fields = stat.read().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(name))
            if int(fields[3]) == root:
                session.append(int(name))
    found = list(dict.fromkeys([root, *session]))
    for pid in found:
        found += [child for child in children.get(pid, []) if child not in found]
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
        if len(os.sched_getaffinity(0)) == 1:
            # TensorFlow has a thread for each CPU, and a server with one thread can wait for itself, also over stock gRPC.
            environment.setdefault("TF_NUM_INTEROP_THREADS", "2")
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
        stopped = []
        while more := [pid for pid in descendants(self.process.pid) if pid not in stopped]:
            for pid in more:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)  # it starts nothing any more
            stopped += more
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.process.pid, 0)
        self._ended(status, usage)
        # A shell whose children were killed may still have ended well.
        self.verdict = "FAILED"
        with open(self.log, "a") as log:
            log.write(f"\nscripts/test: {self.job.name} {reason}\n")


class Scheduler:
    """`report(run)` is called for each job that has ended, and may find that it has failed."""

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
            while (waiting or self.running) and not _told_to_end:
                self._start(waiting)
                time.sleep(0.05)
                self._check_services()
                for run in [run for run in self.running if run.poll()]:
                    self.running.remove(run)
                    self.report(run)
                    self.done[run.job.name] = run.verdict
                    told = time.monotonic()
                if time.monotonic() - told > 60:
                    told = time.monotonic()
                    print(f"… still running: {', '.join(run.job.name + run._now() for run in self.running)}", flush=True)
        finally:
            for run in self.running + [run for run in self.services if run.verdict is None]:
                run.kill("was ended with scripts/test")
        if _told_to_end:
            sys.exit(_told_to_end[0])
        return all(verdict == "passed" for verdict in self.done.values())


# The status to end with. An exception of a signal's handler could lose a job that is being started.
_told_to_end = []


def default_signals():
    """A shell without job control, and `nohup`, start processes with signals ignored, which all descendants would inherit."""
    signal.signal(signal.SIGINT, lambda *_: _told_to_end.append(130))
    signal.signal(signal.SIGTERM, lambda *_: _told_to_end.append(143))
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        # Children start with the default, and this process goes on.
        signal.signal(signal.SIGHUP, lambda *_: None)
    else:
        # Jobs have sessions of their own, so the end of the terminal does not reach them.
        signal.signal(signal.SIGHUP, lambda *_: _told_to_end.append(129))
