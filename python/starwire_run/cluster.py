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

    def tasks(self):
        return [(job, index) for job in _JOBS for index in range(self.counts.get(job, 0))]


def plan(counts, wait=None):
    """Raises ValueError if such a cluster makes no sense. ``wait``: names of jobs, separated by commas."""
    if not counts["worker"] and not counts["chief"]:
        raise ValueError("a cluster needs a worker or a chief: give --worker N or --chief")
    if wait is None:
        return Plan(counts, frozenset(["chief" if counts["chief"] else "worker"]))
    jobs = [job.strip() for job in wait.split(",")]
    for job in jobs:
        if job not in _JOBS:
            raise ValueError(f"--wait: {job!r} is not a job: use {', '.join(_JOBS)}")
        if not counts[job]:
            raise ValueError(f"--wait: this cluster has no {job}")
    return Plan(counts, frozenset(jobs))


def run(plan, command, environment, protocol, options):
    """Runs the cluster to its end. Returns the exit status."""
    logs = options.logs if options.logs is not None else pathlib.Path(tempfile.mkdtemp(prefix="starwire-run-"))
    try:
        logs.mkdir(parents=True, exist_ok=True)
        numbers = iter(ports.free(sum(plan.counts.values()), environment))
    except OSError as error:
        print(f"starwire run: {error}", file=sys.stderr)
        return 1
    addresses = {job: [f"localhost:{next(numbers)}" for _ in range(plan.counts[job])] for job in _JOBS if job != "evaluator" and plan.counts[job]}
    printer = Printer([_name(task) for task in plan.tasks()], options.color, options.quiet)
    return _Cluster(plan, addresses, command, environment, protocol, logs, printer, options.linger, options.grace).run()


def task_config(addresses, job, index):
    """The value of a task's TF_CONFIG."""
    return json.dumps({"cluster": addresses, "task": {"type": job, "index": index}})


def arguments(command, addresses, job, index):
    """The command of a task, with the placeholders replaced."""
    values = {"{job}": job, "{index}": str(index)}
    values.update({f"{{{name}_hosts}}": ",".join(addresses.get(name, ())) for name in ("ps", "worker", "chief")})
    made = []
    for word in command:
        for placeholder, value in values.items():
            word = word.replace(placeholder, value)
        made.append(word)
    return made


class _Task:
    def __init__(self, job, index, process, log):
        self.job, self.index, self.name = job, index, _name((job, index))
        self.process, self.log = process, log
        self.begun = time.monotonic()
        self.status = None
        self.serves = False
        self.is_asked = self.is_buried = False

    def signal(self, number):
        """To the task and to the processes that it has started."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def bury(self):
        """Kills what is left of the task, including processes that it has left behind."""
        if not self.is_buried:
            self.is_buried = True
            self.signal(signal.SIGKILL)
            self.process.wait()


class _Cluster:
    def __init__(self, plan, addresses, command, environment, protocol, logs, printer, linger, grace):
        self.plan, self.addresses, self.command, self.environment = plan, addresses, command, environment
        self.protocol, self.logs, self.printer, self.linger, self.grace = protocol, logs, printer, linger, grace
        self.tasks = []
        self.selector = selectors.DefaultSelector()
        self.interrupts = 0
        self.stop_signal = None
        self.begun = self.looked_at = time.monotonic()

    def run(self):
        # An ignored signal (nohup) stays ignored.
        numbers = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
        old = {number: signal.signal(number, self._on_signal) for number in numbers}
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
        for job, index in self.plan.tasks():
            try:
                self._start(job, index)
            except OSError as error:
                self.printer.say(f"{_name((job, index))} cannot be started: {error}", bad=True)
                self._stop(signal.SIGTERM)
                return 1
        status = self._watch()
        if self.stop_signal is not None:
            self.printer.say(f"stopping after {signal.Signals(self.stop_signal).name}; once more kills all tasks at once")
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

    def _start(self, job, index):
        environment = dict(self.environment, TF_CONFIG=task_config(self.addresses, job, index))
        environment.setdefault("PYTHONUNBUFFERED", "1")
        # Several processes share this machine's GPUs, and parameter servers do not need them.
        environment.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
        if job == "ps":
            environment["CUDA_VISIBLE_DEVICES"] = "-1"
        log = open(self.logs / f"{job}-{index}.log", "wb")
        try:
            process = subprocess.Popen(
                arguments(self.command, self.addresses, job, index),
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
        task = _Task(job, index, process, log)
        self.tasks.append(task)
        self.selector.register(process.stdout, selectors.EVENT_READ, task)

    def _watch(self):
        """Until the tasks that are waited for have ended, one has failed, or a signal came. Returns the exit status so far."""
        while self.stop_signal is None:
            self._tick()
            failed = [task for task in self.tasks if task.status]
            if failed:
                return self._failed(failed[0])
            if all(task.status == 0 for task in self.tasks if task.job in self.plan.waited_for):
                return 0
        return 0

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
            failed = [task for task in self.tasks if task.status and task.job != "ps"]
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
                task.status = task.process.poll()
                if task.status == 0 and not task.is_asked:
                    self._read(0)
                    self.printer.say(f"{task.name} finished after {time.monotonic() - task.begun:.1f} s")
            if not task.serves and task.job in self.addresses:
                address = self.addresses[task.job][task.index]
                if int(address.rpartition(":")[2]) in listening:
                    task.serves = True
                    self.printer.say(f"{task.name} serves at {address} after {time.monotonic() - task.begun:.1f} s")
        self._show_progress()

    def _listening(self):
        due = time.monotonic() - self.looked_at > 2 * _TICK
        if not due or all(task.serves or task.status is not None for task in self.tasks):
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
                task.log.write(data)
                task.log.flush()
                self.printer.output(task.name, data)
            else:
                self._close(task)

    def _close(self, task):
        self.selector.unregister(task.process.stdout)
        task.process.stdout.close()
        task.log.close()
        self.printer.end_of_output(task.name)

    def _drain(self, close=False):
        """What tasks that have ended wrote last. A process that such a task has left behind may hold the pipe: it is not waited for."""
        end = time.monotonic() + 1
        while self.selector.get_map() and time.monotonic() < end and self.selector.select(0):
            self._read(0)
        if close:
            for key in list(self.selector.get_map().values()):
                self._close(key.data)

    def _on_signal(self, number, frame):
        self.interrupts += 1
        if self.stop_signal is None:
            self.stop_signal = number


def _name(task):
    return f"{task[0]} {task[1]}"


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
