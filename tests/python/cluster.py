"""Runs real TensorFlow processes for the tests: starts, controls and kills them, and never leaves one behind.

A `Task` is one process. A test sends it module-level functions (`task.call(f, …)`), which run on its main thread with TensorFlow loaded; results and
exceptions come back. A `Cluster` is a set of tasks with one server each. Every wait has a timeout that raises with the tail of the process's log.
"""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path += [str(ROOT / "python"), str(ROOT / "benches" / "tf"), str(ROOT / "tests" / "runner")]

from authority import identity_for_all  # noqa: E402
from own_ports import free_port  # noqa: E402
from waits import waiting  # noqa: E402

START_TIMEOUT = 120.0
CALL_TIMEOUT = 60.0
LOG_TAIL = 6000
# Read before anything imports JAX (TensorFlow 2.12 does), which raises the minimum log level for everything after it.
LOG_LEVEL = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0")

# Must never appear in the log of our processes, whatever else a test expects.
SCARY = (
    "terminate called", "Check failed", "CHECK failed", "panicked at", "SIGSEGV", "SIGABRT", "Segmentation fault", "Fatal Python error", "pure virtual method",
    "double free", "corrupted", "stack smashing", "AddressSanitizer", "free(): invalid", "malloc():",
)


class _Lazy:
    """Imports TensorFlow at first use: the test runner also imports test modules, but never needs TensorFlow."""

    def __getattr__(self, name):
        import tensorflow

        return getattr(tensorflow, name)


tf = _Lazy()


def one():
    """TensorFlow 1's interface."""
    return tf.compat.v1


def is_tensorflow_1():
    """Without importing it: its package is a facade of another one."""
    return importlib.util.find_spec("tensorflow_core") is not None


# The fork of a shared zygote (STARWIRE_TEST_ZYGOTE) that forks this process's tasks.
shared_zygote_pid = None


class TaskTimeout(AssertionError):
    pass


class TaskDied(AssertionError):
    pass


class RemoteError(Exception):
    """An exception that a function raised in a task process."""

    def __init__(self, task, data):
        self.types, self.message, self.code, self.traceback = data["types"], data["message"], data["code"], data["traceback"]
        super().__init__(f"in {task}: {self.types[0]}: {self.message[:3000]}\n{self.traceback}")

    @property
    def type(self):
        return self.types[0]


def _tail(path, start=0):
    try:
        data = Path(path).read_bytes()[start:]
    except OSError as error:
        return f"({error})"
    return data[-LOG_TAIL:].decode(errors="replace")


class Runner:
    """Owns the zygote, the log directory and every task process."""

    def __init__(self, keep=None):
        self.directory = Path(tempfile.mkdtemp(prefix="starwire-e2e-"))
        self.tasks = []
        self._keep = keep
        self._count = 0
        self._control = None
        self._process = None
        self._proof = self._prove()

    def _prove(self):
        """With STARWIRE_TEST_PROOF=secret or tls, the variables that every task gets besides its own: the same tests with proof."""
        proof = os.environ.get("STARWIRE_TEST_PROOF")
        if proof == "secret":
            return {"STARWIRE_SECRET": "the-same-secret-for-all-tests"}
        if proof == "tls":
            # One identity for all: eager clients are in no ClusterSpec but their own.
            return identity_for_all(self.directory / "training-ca")
        assert proof is None, f"STARWIRE_TEST_PROOF={proof}: secret or tls"
        return {}

    def _zygote(self):
        if self._control is None:
            address = str(self.directory / "zygote")
            log = self.directory / "zygote.log"
            listener = Listener(address, family="AF_UNIX")
            environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL=LOG_LEVEL, PYTHONUNBUFFERED="1", CUDA_VISIBLE_DEVICES="-1")
            shared = os.environ.get("STARWIRE_TEST_ZYGOTE")
            ended = self._fork_zygote(shared, address, environment, log) if shared else self._start_zygote(address, environment, log)
            with waiting("the zygote"):
                self._control = _accept(listener, START_TIMEOUT, ended, lambda: _tail(log))
            listener.close()
            assert self._control.recv()[0] == "ready"
        return self._control

    def _start_zygote(self, address, environment, log_path):
        """Returns a function that returns its exit status once it has ended."""
        with open(log_path, "wb") as log:
            self._process = subprocess.Popen([sys.executable, str(HERE / "zygote.py"), address], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        return self._process.poll

    def _fork_zygote(self, shared, address, environment, log_path):
        global shared_zygote_pid
        with Client(shared, family="AF_UNIX") as client:
            client.send(("session", address, environment, str(log_path)))
            pid = shared_zygote_pid = client.recv()
        return lambda: None if os.path.exists(f"/proc/{pid}") else "an unknown status"

    def ask(self, *request):
        control = self._zygote()
        control.send(request)
        if not control.poll(START_TIMEOUT):
            raise TaskTimeout(f"the zygote does not answer {request[0]}; its log:\n{_tail(self.directory / 'zygote.log')}")
        return control.recv()

    def task(self, name, environment=None, directory=None, spawn=False):
        self._count += 1
        task = Task(self, f"{self._count:03d}-{name}", {**self._proof, **(environment or {})}, directory, spawn)
        self.tasks.append(task)
        return task

    def close(self):
        kill_all(self.tasks)
        if self._control is not None:
            self._control.close()
            if self._process is not None:
                self._process.kill()  # it has nothing to finish
                self._process.wait()
        if self._keep is None or not self._keep():
            shutil.rmtree(self.directory, ignore_errors=True)


def _accept(listener, timeout, exit_code, log):
    """Listener.accept with a timeout, ending early if the process ends."""
    sock = listener._listener._socket
    sock.settimeout(0.05)
    deadline = time.monotonic() + timeout
    while True:
        try:
            return listener.accept()
        except (TimeoutError, socket.timeout):
            code = exit_code()
            if code is not None:
                raise TaskDied(f"ended with {code} before it was ready; its log:\n{log()}")
            if time.monotonic() > deadline:
                raise TaskTimeout(f"not ready within {timeout} s; its log:\n{log()}")


class Task:
    """A task process."""

    def __init__(self, runner, name, environment, directory, spawn):
        self.name, self.runner = name, runner
        self.log_path = runner.directory / f"{name}.log"
        self.directory = Path(directory) if directory else runner.directory / f"{name}.dir"
        self.directory.mkdir(exist_ok=True)
        self.expected_exit = None  # set by callers that end it on purpose
        self.log_checked = 0
        self.allow_scary = ()
        self._exit = None
        self.busy = False
        address = str(runner.directory / f"{name}.sock")
        listener = Listener(address, family="AF_UNIX")
        self.log_path.touch()
        environment = {k: str(v) for k, v in environment.items()}
        if spawn:
            log = open(self.log_path, "ab")
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "zygote.py"), "--task", address], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.directory,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": LOG_LEVEL, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONUNBUFFERED": "1", **environment},
            )
            log.close()
            self.pid = self._process.pid
        else:
            self._process = None
            self.pid = runner.ask("fork", address, str(self.log_path), environment, str(self.directory))
        with waiting("the start of a process"):
            self._connection = _accept(listener, START_TIMEOUT, self.poll, self.log)
        listener.close()
        assert self._connection.recv()[0] == "hello"

    def __str__(self):
        return self.name

    def log(self, start=0):
        return _tail(self.log_path, start)

    def full_log(self):
        return self.log_path.read_text(errors="replace")

    def poll(self):
        """Returns None while the process lives, else its exit code (negative: the signal)."""
        if self._exit is None:
            self._exit = self._process.poll() if self._process else self.runner.ask("poll", self.pid)
        return self._exit

    def begin(self, function, *args, **kwargs):
        """Sends a function; `result` waits for it."""
        assert not self.busy, f"{self} still runs a function"
        self.busy = True
        try:
            self._connection.send(("call", function, args, kwargs))
        except (BrokenPipeError, ConnectionResetError):
            raise TaskDied(f"{self} is gone (exit {self.poll()}); its log:\n{self.log()}") from None

    def ready(self, timeout=0.0):
        return self._connection.poll(timeout)

    def result(self, timeout=CALL_TIMEOUT):
        with waiting(f"a result of: {self}"):
            answered = self._connection.poll(timeout)
        if not answered:
            self.dump_stacks()
            raise TaskTimeout(f"{self} did not answer within {timeout} s; its log:\n{self.log()}")
        try:
            kind, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            deadline = time.monotonic() + 5
            while self.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            raise TaskDied(f"{self} died (exit {self.poll()}); its log:\n{self.log()}") from None
        self.busy = False
        if kind == "error":
            raise RemoteError(self, value)
        return value

    def call(self, function, *args, timeout=CALL_TIMEOUT, **kwargs):
        self.begin(function, *args, **kwargs)
        return self.result(timeout)

    def dump_stacks(self):
        """Writes the Python stacks of all threads to the log (best effort: a stopped process cannot)."""
        try:
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.5)
        except ProcessLookupError:
            pass

    def signal(self, number):
        os.kill(self.pid, number)

    def begin_kill(self):
        """Sends SIGKILL; `kill` waits."""
        if self.poll() is None:
            self.expected_exit = -signal.SIGKILL
            os.kill(self.pid, signal.SIGKILL)

    def kill(self):
        """Sends SIGKILL and waits for the process to end."""
        self.begin_kill()
        self.wait(60)
        self._connection.close()

    def stop(self):
        self.signal(signal.SIGSTOP)

    def resume(self):
        self.signal(signal.SIGCONT)

    def exit(self, code=0, timeout=60):
        """Ends the interpreter as at the end of a script. Returns the exit code."""
        self.expected_exit = code
        self._connection.send(("exit", code))
        return self.wait(timeout)

    def wait(self, timeout):
        deadline = time.monotonic() + timeout
        with waiting(f"the end of: {self}"):
            while True:
                code = self.poll()
                if code is not None:
                    return code
                if time.monotonic() > deadline:
                    self.dump_stacks()
                    raise TaskTimeout(f"{self} did not end within {timeout} s; its log:\n{self.log()}")
                time.sleep(0.02)

    def wait_for_log(self, text, timeout=20, start=0):
        """Waits until the log has `text`; returns the log from `start`."""
        deadline = time.monotonic() + timeout
        with waiting(f"a line in a log: {text!r} of {self}"):
            while True:
                log = self.log_path.read_text(errors="replace")[start:]
                if text in log:
                    return log
                if time.monotonic() > deadline or self.poll() is not None:
                    raise TaskTimeout(f"{self} did not log {text!r} within {timeout} s (exit {self.poll()}); its log:\n{self.log()}")
                time.sleep(0.02)

    def log_size(self):
        return self.log_path.stat().st_size

    def complaints(self):
        """Returns signs of failure, whatever the test asserts: scary log lines and unexpected exits."""
        found = []
        text = self.full_log()
        for line in text[self.log_checked:].splitlines():
            if any(word in line for word in SCARY) and not any(word in line for word in self.allow_scary):
                found.append(f"{self}: {line}")
        self.log_checked = len(text)
        code = self.poll()
        if code is not None and code != self.expected_exit:
            found.append(f"{self} ended with {code}, expected {self.expected_exit}")
            self.expected_exit = code
        return found


def kill_all(tasks):
    for task in tasks:
        task.begin_kill()
    for task in tasks:
        task.kill()


class Cluster:
    """Servers in task processes; `shape` is the number of tasks per job. `spawn`: all processes import TensorFlow themselves, or those of these tasks."""

    def __init__(self, runner, protocol, shape, environment=None, host="127.0.0.1", endpoint_map=None, per_task=None, start=True, config=None, spawn=False):
        self.runner, self.protocol, self.config = runner, protocol, config
        self.environment = dict(environment or {})
        self.per_task = per_task or {}
        self.spawn = spawn
        self.spec = {job: [f"{host}:{free_port()}" for _ in range(count)] for job, count in shape.items()}
        self.tasks = {}
        self.endpoint_map = None
        if endpoint_map:
            self.endpoint_map = Path(tempfile.mkdtemp(dir=runner.directory, prefix="map-"))
            write_map(self.endpoint_map, [f"{address}={host}:{free_port()}" for job in self.spec.values() for address in job])
            self.environment["TF_SEASTAR_ENDPOINT_MAP_PATH"] = str(self.endpoint_map)
        if start:
            for job, count in shape.items():
                for index in range(count):
                    self.begin_start(job, index)
            for task in self.tasks.values():
                task.result(START_TIMEOUT)

    def start(self, job, index, protocol=None, spec=None, **environment):
        """Starts or restarts one task and its server."""
        task = self.begin_start(job, index, protocol, spec, **environment)
        task.result(START_TIMEOUT)
        return task

    def begin_start(self, job, index, protocol=None, spec=None, **environment):
        task = self.process(job, index, **environment)
        task.begin(start_server, spec or self.spec, job, index, protocol or self.protocol, self.config)
        return task

    def start_error(self, job="worker", **environment):
        """Returns the error of a server that must not start."""
        task = self.process(job, 0, **environment)
        try:
            task.call(start_server, self.spec, job, 0, self.protocol)
        except RemoteError as error:
            assert task.poll() is None, "an exception, not the end of the process"
            return error
        raise AssertionError("the server has started")

    def process(self, job, index, **environment):
        spawn = self.spawn if isinstance(self.spawn, bool) else (job, index) in self.spawn
        task = self.runner.task(f"{self.protocol.replace('+', 'p')}-{job}{index}", {**self.environment, **self.per_task.get((job, index), {}), **environment}, spawn=spawn)
        self.tasks[job, index] = task
        return task

    def __getitem__(self, key):
        return self.tasks[key]

    def target(self, job, index):
        return f"grpc://{self.spec[job][index]}"

    def usable(self):
        return all(task.poll() is None and not task.busy for task in self.tasks.values())

    def logs(self):
        return "\n".join(task.full_log() for task in self.tasks.values())

    def close(self):
        kill_all(self.tasks.values())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def write_map(directory, lines, name=".endpoint_map"):
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text("\n".join(lines) + "\n")
    return path


def worker_call(cluster, function, *args, **kwargs):
    """Runs a function in worker 0, whose session target is its first argument."""
    return cluster["worker", 0].call(function, cluster.target("worker", 0), *args, **kwargs)


# In the task processes. ------------------------------------------------------------------------------------------------

state = {}  # per process: servers, sessions and strategies that outlive one call


def library_path():
    """Returns the plug-in: from the environment, or as built by the Makefile."""
    path = os.environ.get("STARWIRE_LIBRARY")
    if not path:
        made = subprocess.run(["make", "-s", "print-plugin"], cwd=ROOT, capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(f"set STARWIRE_LIBRARY, or make `make -s print-plugin` work: {made.stderr.strip()}")
        path = made.stdout.strip()
    if not os.path.exists(path):
        raise RuntimeError(f"no library at {path}: run `make build`")
    return path


def is_stock(protocol):
    return protocol == "grpc"


def load(protocol):
    """Registers `protocol` with this process's TensorFlow. Stock gRPC runs without the plug-in, so that comparisons use unmodified TensorFlow."""
    if not is_stock(protocol):
        tf.load_library(library_path())


def start_server(spec, job, index, protocol, config=None):
    load(protocol)
    if isinstance(config, bytes):
        config = tf.compat.v1.ConfigProto.FromString(config)
    state["server"] = tf.distribute.Server(tf.train.ClusterSpec(spec), job_name=job, task_index=index, protocol=protocol, config=config)
    return state["server"].target


def drop_server():
    import gc

    state.pop("server", None)
    gc.collect()
