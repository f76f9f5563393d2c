"""Real processes, each with its own server, forked from this one after it imported TensorFlow (so that a start takes milliseconds)."""

import ctypes
import json
import os
import pathlib
import select
import shutil
import signal
import socket
import sys
import tempfile
import time

import node

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "python"))

from starwire_run import ports  # noqa: E402


class BenchError(Exception):
    pass


class Channel:
    """JSON lines over a socket pair."""

    def __init__(self, sock):
        self.sock, self.file = sock, sock.makefile("rb")

    def lines(self):
        return self.file

    def answer(self, value):
        self.sock.sendall(json.dumps(value).encode() + b"\n")

    ask = answer

    def hear(self, timeout):
        ready, _, _ = select.select([self.sock], [], [], timeout)
        if not ready:
            raise BenchError(f"no answer within {timeout:.0f} s")
        line = self.file.readline()
        if not line:
            raise BenchError("the process ended")
        return json.loads(line)


def free_port():
    return ports.free(1)[0]


class Loopback:
    """The network of a cluster on this host. benches/wire/network.py has an emulated one."""

    def host(self, job, index):
        """Where a task runs: `address()` is an unused one, `enter()` brings the calling process there."""
        return self

    def address(self):
        return f"127.0.0.1:{free_port()}"

    def enter(self):
        pass

    def counters(self):
        return None

    def since(self, before, steps, elapsed):
        """Measurements of the network itself in a turn that began at `before` (`counters()`)."""
        return {}


def _die_with_parent():
    # Servers must not outlive the orchestrator, even if it is killed.
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    def __init__(self, spec, env, log, serve=node.serve, host=Loopback()):
        mine, theirs = socket.socketpair()
        self.name, self.log = f"{spec['job']}:{spec['task']}", log
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _die_with_parent()
                mine.close()
                out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(out, 1)
                os.dup2(out, 2)
                os.environ.update(env)
                host.enter()
                serve(Channel(theirs), spec)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(0)
        theirs.close()
        self.channel = Channel(mine)

    def hear(self, timeout=60.0):
        try:
            answer = self.channel.hear(timeout)
        except BenchError as error:
            raise BenchError(f"{self.name}: {error} (log: {self.log})") from None
        if not answer["ok"]:
            raise BenchError(f"{self.name}: {answer['error']} (log: {self.log})\n{answer.get('traceback', '')}")
        return answer

    def call(self, timeout=60.0, **command):
        self.channel.ask(command)
        return self.hear(timeout)

    def kill(self):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
            self.channel.file.close()
            self.channel.sock.close()


class Cluster:
    """The processes of one column for one case."""

    def __init__(self, case, column, library, logs, network=Loopback()):
        tasks = [("ps", i) for i in range(case.ps)] + [("worker", i) for i in range(case.workers)]
        if case.driver not in ("ps", "worker"):
            tasks.append((case.driver, 0))
        if not column.protocol:
            tasks = [(case.driver, 0)]
        addresses = {}
        for job, index in tasks:
            addresses.setdefault(job, []).append(network.host(job, index).address())
        env = {**case.env, **column.env}  # the column takes precedence
        self.state = tempfile.mkdtemp(prefix="starwire-state-") if column.state else None
        if self.state:
            env["STARWIRE_STATE"] = self.state
        self.processes, self.workers = [], []
        try:
            for job, index in tasks:
                if case.together and job == "worker" and index > 0:
                    continue
                servers = case.workers if case.together and job == "worker" else 1
                spec = {"cluster": addresses, "job": job, "task": index, "servers": servers, "protocol": column.protocol, "library": library if column.needs_library else None, "case": case, "options": column.options}
                log = logs / f"{case.name}.{column.name.replace(':', '-')}.{job}{index}.log"
                log.exists() and log.unlink()
                self.processes.append(Process(spec, env, log, host=network.host(job, index)))
            self.workers = [process for process in self.processes if process.name.startswith(case.driver)]
            for process in self.processes:
                process.hear()
            for worker in self.workers:
                worker.channel.ask({"do": "open"})
            for worker in self.workers:
                worker.hear()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self):
        return [process.pid for process in self.processes]

    @property
    def server_pids(self):
        return [process.pid for process in self.processes if process.name.startswith("ps:")]

    @property
    def chief_pids(self):
        return [process.pid for process in self.processes if process.name.startswith("chief:")]

    def each_worker(self, timeout=60.0, **command):
        for worker in self.workers:
            worker.channel.ask(command)
        return [worker.hear(timeout) for worker in self.workers]

    def settle(self):
        """Waits until the processes use no CPU (TensorFlow's threads have start-up work)."""
        import procstat

        before = procstat.usage(self.pids).cpu_s
        for _ in range(20):
            time.sleep(0.05)
            after = procstat.usage(self.pids).cpu_s
            if after - before < 0.011:
                return
            before = after

    def close(self):
        # Killed, not shut down: the tests cover shutdown.
        for process in self.processes:
            process.kill()
        if self.state:
            shutil.rmtree(self.state, ignore_errors=True)
