"""A cluster of processes on this machine."""

import ctypes
import dataclasses
import json
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import tempfile
import time

from starwire_run import ports
from starwire_run.output import Printer

_JOBS = ("ps", "chief", "worker", "evaluator")
_TICK = 0.1
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass
class Plan:
    """Which tasks there are, and which of them the run waits for."""

    counts: dict
    waited_for: frozenset
    most_workers: int

    def tasks(self):
        return [(job, index) for job in _JOBS for index in range(self.counts.get(job, 0))]


def plan(counts, wait=None, most_workers=0):
    """Raises ValueError if such a cluster makes no sense. ``wait``: names of jobs, separated by commas."""
    most_workers = max(most_workers, counts["worker"])
    if not counts["worker"] and not counts["chief"]:
        raise ValueError("a cluster needs a worker or a chief: give --worker N or --chief")
    if wait is None:
        return Plan(counts, frozenset(["chief" if counts["chief"] else "worker"]), most_workers)
    jobs = [job.strip() for job in wait.split(",")]
    for job in jobs:
        if job not in _JOBS:
            raise ValueError(f"--wait: {job!r} is not a job: use {', '.join(_JOBS)}")
        if not counts[job]:
            raise ValueError(f"--wait: this cluster has no {job}")
    return Plan(counts, frozenset(jobs), most_workers)


def run(plan, command, environment, protocol, options):
    """Runs the cluster to its end. Returns the exit status."""
    try:
        logs = options.logs if options.logs is not None else pathlib.Path(tempfile.mkdtemp(prefix="starwire-run-"))
        logs.mkdir(parents=True, exist_ok=True)
        spare = plan.most_workers - plan.counts["worker"]
        numbers = iter(ports.free(sum(plan.counts.values()) + spare, environment))
    except OSError as error:
        print(f"starwire run: {error}", file=sys.stderr)
        return 1
    addresses = {job: [f"localhost:{next(numbers)}" for _ in range(plan.counts[job])] for job in _JOBS if job != "evaluator" and plan.counts[job]}
    spares = [f"localhost:{next(numbers)}" for _ in range(spare)]
    if spares:
        environment = {"STARWIRE_JOIN": f"worker:{plan.most_workers}", **environment}
    added = [("worker", index) for index in range(plan.counts["worker"], plan.most_workers)]
    printer = Printer([_name(task) for task in plan.tasks() + added], options.color, options.quiet)
    return _Cluster(plan, addresses, spares, command, environment, protocol, logs, printer, options.linger, options.grace).run()


def task_config(addresses, job, index):
    """The value of a task's TF_CONFIG."""
    return json.dumps({"cluster": addresses, "task": {"type": job, "index": index}})


def arguments(command, addresses, job, index):
    """The command of a task, with the placeholders replaced."""
    values = {"{job}": job, "{index}": str(index)}
    for name in ("ps", "worker", "chief"):
        hosts = addresses.get(name, ())
        values[f"{{{name}_hosts}}"] = ",".join(hosts.values() if isinstance(hosts, dict) else hosts)
    made = []
    for word in command:
        for placeholder, value in values.items():
            word = word.replace(placeholder, value)
        made.append(word)
    return made


class _Task:
    def __init__(self, job, index, address, process, log):
        self.job, self.index, self.address, self.name = job, index, address, _name((job, index))
        self.process, self.log = process, log
        self.begun = time.monotonic()
        self.status = None
        self.serves = self.log_has_gap = False
        self.is_asked = self.is_buried = False
        self.killed_at = None  # when it is killed, if it was asked to leave

    def signal(self, number):
        """To the task and to the processes that it has started. False if they belong to another user."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            return False
        return True

    def poll(self):
        """Its status, once it has ended; if it was asked to, with all processes that it has started. As long as it has left some behind it stays a
        zombie: no other group gets its number before bury()."""
        if self.process.returncode is not None:
            return self.process.returncode
        end = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is None:
            return None
        if not _has_others(self.process.pid):
            self.is_buried = True
            self.process.wait()
        elif self.is_asked or self.killed_at is not None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def record(self, data):
        """Into the log. Returns the first error of a disk: the run goes on without the log."""
        try:
            while data:
                data = data[self.log.write(data) :]
        except OSError as error:
            return self._lacks(error)

    def close_log(self):
        """The same: disks in a network may say only now that they are full."""
        try:
            self.log.close()
        except OSError as error:
            return self._lacks(error)

    def _lacks(self, error):
        is_first, self.log_has_gap = not self.log_has_gap, True
        return error if is_first else None

    def bury(self):
        """Kills what is left of the task, including processes that it has left behind."""
        if not self.is_buried:
            self.is_buried = True
            if self.signal(signal.SIGKILL):
                self.process.wait()


class _Cluster:
    def __init__(self, plan, addresses, spares, command, environment, protocol, logs, printer, linger, grace):
        self.plan, self.addresses, self.spares, self.command, self.environment = plan, addresses, spares, command, environment
        self.protocol, self.logs, self.printer, self.linger, self.grace = protocol, logs, printer, linger, grace
        self.tasks = []
        self.selector = selectors.DefaultSelector()
        self.interrupts = 0
        self.changes = []  # of the number of workers, as signals
        self.stop_signal = None
        self.begun = self.looked_at = time.monotonic()
        printer.is_stopping = lambda: self.interrupts > 0

    def run(self):
        # An ignored signal (nohup) stays ignored.
        numbers = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
        old = {number: signal.signal(number, self._on_signal) for number in numbers}
        # Ignored, it would hide how tasks end.
        old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if self.spares:
            old.update({number: signal.signal(number, lambda number, _: self.changes.append(number)) for number in (signal.SIGUSR1, signal.SIGUSR2)})
        try:
            return self._run()
        finally:
            for task in self.tasks:
                task.bury()
            self._drain(close=True)
            self.printer.close()
            for number, handler in old.items():
                signal.signal(number, handler)

    def _run(self):
        counts = ", ".join(f"{count} {job}" for job, count in ((job, self.plan.counts.get(job, 0)) for job in _JOBS) if count)
        self.printer.say(f"{counts} over {self.protocol}; logs in {self.logs}")
        if self.spares:
            self.printer.say(f"up to {self.plan.most_workers} workers: kill -USR1 {os.getpid()} adds one, -USR2 removes it")
        for job, index in self.plan.tasks():
            try:
                self._start(job, index)
            except OSError as error:
                self.printer.say(f"{_name((job, index))} cannot be started: {error}", bad=True)
                self._stop(signal.SIGTERM)
                return 1
        status = self._watch()
        if self.stop_signal is not None:
            self.printer.say(f"stopping after {signal.Signals(self.stop_signal).name}; another SIGINT or SIGTERM kills all tasks at once")
            self._stop(signal.SIGINT if self.stop_signal == signal.SIGINT else signal.SIGTERM)
            return 128 + self.stop_signal
        if status == 0:
            status = self._wait_for_the_rest()
        self._stop(signal.SIGTERM)
        if self.stop_signal is not None:
            return 128 + self.stop_signal
        if status == 0:
            self.printer.say(f"done after {time.monotonic() - self.begun:.1f} s")
        return status

    def _start(self, job, index, address=None):
        """``address``: that of a worker that is not in the others' ClusterSpec."""
        addresses = self.addresses if address is None else {**self.addresses, "worker": {str(index): address}}
        environment = dict(self.environment, TF_CONFIG=task_config(addresses, job, index))
        environment.setdefault("PYTHONUNBUFFERED", "1")
        # Several processes share this machine's GPUs, and parameter servers do not need them.
        environment.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
        if job == "ps":
            environment["CUDA_VISIBLE_DEVICES"] = "-1"
        log = open(self.logs / f"{job}-{index}.log", "wb" if address is None else "ab", buffering=0)
        try:
            process = subprocess.Popen(
                arguments(self.command, addresses, job, index),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches only this process, which stops the tasks in order.
                start_new_session=True,
                preexec_fn=_die_with_parent(),
            )
        except OSError:
            log.close()
            raise
        os.set_blocking(process.stdout.fileno(), False)
        task = _Task(job, index, address or self.addresses.get(job, {index: None})[index], process, log)
        self.tasks.append(task)
        self.selector.register(process.stdout, selectors.EVENT_READ, task)

    def _watch(self):
        """Until the tasks that are waited for have ended, one has failed, or a signal came. Returns the exit status so far."""
        while self.stop_signal is None:
            self._tick()
            while self.changes:
                change = self._add if self.changes.pop(0) == signal.SIGUSR1 else self._remove
                change()
            failed = [task for task in self.tasks if task.status and task.killed_at is None]
            if failed:
                return self._failed(failed[0])
            if all(task.status is not None for task in self.tasks if task.job in self.plan.waited_for):
                return 0
        return 0

    def _add(self):
        """Starts a worker with a free number."""
        begun = self.plan.counts["worker"]
        used = {task.index for task in self.tasks if task.job == "worker" and task.status is None}
        free = [index for index in range(begun, self.plan.most_workers) if index not in used]
        if not free:
            return self.printer.say(f"there are already {self.plan.most_workers} workers", bad=True)
        try:
            self._start("worker", free[0], self.spares[free[0] - begun])
        except OSError as error:
            self.printer.say(f"worker {free[0]} cannot be started: {error}", bad=True)

    def _remove(self):
        """Ends the worker that was added last."""
        added = [task for task in self.tasks if task.job == "worker" and task.index >= self.plan.counts["worker"]]
        left = [task for task in added if task.status is None and task.killed_at is None]
        if not left:
            return self.printer.say("no worker was added that could be removed", bad=True)
        left[-1].killed_at = time.monotonic() + self.grace
        left[-1].signal(signal.SIGTERM)

    def _wait_for_the_rest(self):
        """Of the tasks that nobody waits for, workers and evaluators may still be at their last step."""
        end = time.monotonic() + self.linger
        announced = False
        while self.stop_signal is None:
            rest = [task for task in self.tasks if task.status is None and task.job != "ps"]
            if not rest or time.monotonic() > end:
                break
            if not announced:
                jobs, names = " and ".join(sorted(self.plan.waited_for)), ", ".join(task.name for task in rest)
                self.printer.say(f"{jobs} finished; {names}: {self.linger:g} s to finish too")
                announced = True
            self._tick()
            failed = [task for task in self.tasks if task.status and task.job != "ps" and task.killed_at is None]
            if failed:
                return self._failed(failed[0])
        return 0

    def _failed(self, task):
        self._drain()
        self.printer.say(f"{task.name} failed: {_describe(task.status)}; its log is {task.log.name}", bad=True)
        return task.status if task.status > 0 else 128 - task.status

    def _tick(self):
        """Passes output on for a moment and looks after the tasks."""
        self._read(_TICK)
        listening = self._listening()
        for task in self.tasks:
            if task.status is None:
                if task.killed_at is not None and time.monotonic() > task.killed_at:
                    task.bury()
                task.status = task.poll()
                if task.status is not None and task.killed_at is not None:
                    self._read(0)
                    self.printer.say(f"{task.name} was removed after {time.monotonic() - task.begun:.1f} s")
                elif task.status == 0 and not task.is_asked:
                    self._read(0)
                    self.printer.say(f"{task.name} finished after {time.monotonic() - task.begun:.1f} s")
            if not task.serves and task.status is None and task.address and int(task.address.rpartition(":")[2]) in listening:
                task.serves = True
                self.printer.say(f"{task.name} serves at {task.address} after {time.monotonic() - task.begun:.1f} s")
        self._show_progress()

    def _listening(self):
        due = time.monotonic() - self.looked_at > 2 * _TICK
        if not due or all(task.serves or task.status is not None or not task.address for task in self.tasks):
            return set()
        self.looked_at = time.monotonic()
        return ports.listening()

    def _show_progress(self):
        parts = []
        for job in _JOBS:
            tasks = [task for task in self.tasks if task.job == job]
            ended = sum(task.status is not None for task in tasks)
            up = sum(task.serves for task in tasks) if job in self.addresses else len(tasks)
            if tasks:
                parts.append(f"{job} {ended} ended of {len(tasks)}" if ended else f"{job} {up} up of {len(tasks)}")
        self.printer.progress(f"{time.monotonic() - self.begun:4.0f} s  " + " · ".join(parts))

    def _stop(self, number):
        """Workers first: they may want to write to the parameter servers once more. Nothing of the cluster is left at the end."""
        for jobs, first in ((("worker", "chief", "evaluator"), number), (("ps",), signal.SIGTERM)):
            tasks = [task for task in self.tasks if task.job in jobs]
            # TensorFlow's Server.join() does not hear SIGINT.
            for request in (first, signal.SIGTERM) if first == signal.SIGINT else (first,):
                left = [task for task in tasks if task.status is None]
                if not left or self.interrupts > 1:
                    break
                for task in left:
                    task.is_asked = True
                    task.signal(request)
                end = time.monotonic() + self.grace
                while any(task.status is None for task in left) and time.monotonic() < end and self.interrupts < 2:
                    self._tick()
            for task in tasks:
                if task.status is None:
                    self.printer.say(f"{task.name} does not stop and is killed", bad=True)
                task.bury()

    def _read(self, timeout):
        for key, _ in self.selector.select(timeout):
            task = key.data
            try:
                data = os.read(task.process.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                continue
            if data:
                self._report(task, task.record(data))
                self.printer.output(task.name, data)
            else:
                self._close(task)

    def _close(self, task):
        self.selector.unregister(task.process.stdout)
        task.process.stdout.close()
        self._report(task, task.close_log())
        self.printer.end_of_output(task.name)

    def _report(self, task, error):
        if error:
            self.printer.say(f"{task.name}: its log lacks output: {error}", bad=True)

    def _drain(self, close=False):
        """What tasks that have ended wrote last. A process that such a task has left behind may hold the pipe: it is not waited for."""
        end = time.monotonic() + 1
        while self.selector.get_map() and time.monotonic() < end and self.selector.select(0):
            self._read(0)
        if close:
            for key in list(self.selector.get_map().values()):
                self._close(key.data)

    def _on_signal(self, number, frame):
        # A terminal that goes may send several SIGHUPs.
        if number != signal.SIGHUP or self.stop_signal is None:
            self.interrupts += 1
        if self.stop_signal is None:
            self.stop_signal = number


def _name(task):
    return f"{task[0]} {task[1]}"


def _has_others(group):
    """Whether a process group has members besides its leader that run."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != group:
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, _, its_group = file.read().rpartition(b")")[2].split()[:3]
                if int(its_group) == group and state != b"Z":
                    return True
            except OSError:
                continue
    return False


def _describe(status):
    if status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"
    return f"exit status {status}"


def _die_with_parent():
    """A killed launcher must not leave a cluster behind."""
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def prepare():
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
