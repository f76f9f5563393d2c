"""Trains the same recommender over stock grpc, grpc++ and star_server in real processes, as sessions and as functions, and compares speed and results.
Then kills a parameter server that keeps its state, and lets a worker join.

The clusters run side by side and train in alternating turns, so that other load on the machine affects all of them alike.
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE, os.path.join(ROOT, "python")]

from starwire_run import ports  # noqa: E402

# Importing TensorFlow takes several CPU seconds, so the tasks are forked after this process has imported it.
fork = multiprocessing.get_context("fork")
EXACT_STEPS = 20


class Failure(Exception):
    pass


class Log:
    """Captures stderr of this process and its tasks; shown only after a failure."""

    def __init__(self):
        self._file = tempfile.TemporaryFile()
        self._stderr = os.dup(2)
        os.dup2(self._file.fileno(), 2)

    def close(self, show):
        sys.stderr.flush()
        os.dup2(self._stderr, 2)
        if show:
            self._file.seek(0)
            sys.stderr.write(self._file.read().decode(errors="replace")[-8000:])
        self._file.close()


class Task:
    """A process of the cluster, which takes commands over a pipe."""

    def __init__(self, cluster, job, task, protocol, batch):
        self.name = f"{protocol} /job:{job}/task:{task}"
        self._pipe, theirs = fork.Pipe()
        self._process = fork.Process(target=_run, args=(theirs, cluster, job, task, protocol, batch), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, *request):
        self._pipe.send(request)

    def receive(self, timeout=60):
        deadline = time.monotonic() + timeout
        while not self._pipe.poll(0.2):
            if not self._process.is_alive() and not self._pipe.poll(0):
                raise Failure(f"{self.name} ended by itself (exit code {self._process.exitcode})")
            if time.monotonic() > deadline:
                raise Failure(f"{self.name} gave no answer in {timeout} s")
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            raise Failure(f"{self.name} ended by itself (exit code {self._process.exitcode})") from None
        if kind == "error":
            raise Failure(f"{self.name}: {value}")
        return value

    def stop(self):
        self._process.kill()
        self._process.join()


def _run(pipe, cluster, job, task, protocol, batch):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import task as tasks

        if job == "ps" or (job == "worker" and "chief" in cluster.jobs):
            server, _ = tasks.serve(cluster, job, task, protocol)
            pipe.send(("ready", None))
            server.join()
        if job == "chief":
            import coordinated

            driver = coordinated.Chief(cluster, protocol, batch)
        else:
            tasks.sessions_only()
            driver = tasks.Worker(cluster, task, protocol, batch)
        pipe.send(("ready", None))
        while True:
            steps, exactly = pipe.recv()
            pipe.send(("trained", driver.train(steps, exactly)))
    except EOFError:
        pass
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


class Job:
    """A cluster of one protocol, and the processes that drive its training."""

    def __init__(self, protocol, options):
        import tensorflow as tf

        self.protocol, self.workers = protocol, options.workers
        addresses = [f"localhost:{port}" for port in ports.free(options.ps + options.workers + 1)]
        spec = {"ps": addresses[: options.ps], "worker": addresses[options.ps : -1], **self.more_tasks(addresses[-1])}
        self._cluster, self._batch, self.tasks = tf.train.ClusterSpec(spec), options.batch, []
        self.drivers = self.start(options)
        self.rates, self.losses, self.steps, self.exact = [], [], 0, []

    def more_tasks(self, address):
        return {}

    def start(self, options):
        """Starts the tasks and returns those that train on command."""
        raise NotImplementedError

    def task(self, job, number):
        self.tasks.append(Task(self._cluster, job, number, self.protocol, self._batch))
        return self.tasks[-1]

    def train_exactly(self):
        """Trains in a way that the result does not depend on timing."""
        self.drivers[0].send(EXACT_STEPS, True)
        _, self.exact, at = self.drivers[0].receive(120)
        self._count(at, EXACT_STEPS)

    def train(self, steps, measured=True):
        """Trains `steps` steps on every worker at once."""
        share = steps * self.workers // len(self.drivers)
        for driver in self.drivers:
            driver.send(share, False)
        answers = [driver.receive(120) for driver in self.drivers]
        self._count(max(at for _, _, at in answers), share * len(self.drivers))
        if measured:
            self.rates.append(sum(share / seconds for seconds, _, _ in answers))
        self.losses.append(statistics.mean(float(loss) for _, losses, _ in answers for loss in losses[-10:]))

    def _count(self, at, steps):
        self.steps += steps
        if at != self.steps:
            raise Failure(f"{self.protocol}: the parameter server counted {at} steps, the workers ran {self.steps}")

    def stop(self):
        for task in self.tasks:
            task.stop()


class Sessions(Job):
    title = "Sessions (TensorFlow 1 code, Estimator)"
    exactly = "one worker, same seed"

    def start(self, options):
        for number in range(options.ps):
            self.task("ps", number)
        for task in self.tasks:
            task.receive()
        drivers = []
        for number in range(options.workers):
            drivers.append(self.task("worker", number))
            drivers[-1].receive()
        return drivers


class Functions(Job):
    title = "Functions (TensorFlow 2: ParameterServerStrategy and ClusterCoordinator)"
    exactly = "one step at a time, same seed"

    def more_tasks(self, address):
        return {"chief": [address]}

    def start(self, options):
        for job, count in (("ps", options.ps), ("worker", options.workers)):
            for number in range(count):
                self.task(job, number)
        for task in self.tasks:
            task.receive()
        chief = self.task("chief", 0)
        chief.receive(120)
        return [chief]


class Durable(Sessions):
    """A server that is killed comes back with its variables, and workers join that no ClusterSpec of the others has."""

    title = "A parameter server that dies, a worker that joins (sessions over star_server)"

    def __init__(self, options, folder):
        os.environ.update({"STARWIRE_STATE": folder, "STARWIRE_STATE_MODE": "sync", "STARWIRE_RECOVER_S": "60", "STARWIRE_JOIN": f"worker:{options.workers + 1}"})
        super().__init__("star_server", options)

    def more_tasks(self, address):
        self._free = address
        return {}

    def kill_and_restart(self, delay):
        """Server 0, which has the global step, after some seconds. Returns when it was killed, and when it serves again."""
        time.sleep(delay)
        killed = time.monotonic()
        self.tasks[0].stop()
        server = Task(self._cluster, "ps", 0, self.protocol, self._batch)
        self.tasks[0] = server
        server.receive()
        return killed, time.monotonic()

    def join(self):
        import tensorflow as tf

        spec = {"ps": self._cluster.job_tasks("ps"), "worker": {self.workers: self._free}}
        self._cluster = tf.train.ClusterSpec(spec)
        self.drivers.append(self.task("worker", self.workers))
        self.drivers[-1].receive()
        self.workers += 1


JOBS = {"sessions": Sessions, "functions": Functions}
DURABLE = "durable"


class Progress:
    """A line that is drawn again and again on a terminal, and once for each call elsewhere."""

    WIDTH = 24

    def __init__(self, total):
        self._total, self._done, self._live = total, 0, sys.stdout.isatty()

    def show(self, text):
        bar = "#" * (self.WIDTH * self._done // self._total)
        line = f"   [{bar:{self.WIDTH}}] {text}"
        print(f"\r\033[K{line}" if self._live else line, end="" if self._live else "\n", flush=True)
        self._done = min(self._total, self._done + 1)

    def close(self):
        if self._live:
            print("\r\033[K", end="", flush=True)


def compare(kind, options):
    """→ [the finished job of each protocol, …], stock grpc's first."""
    protocols = ["grpc", *options.protocols]
    progress = Progress(len(protocols) * (options.turns + 2))
    jobs = []
    try:
        for protocol in protocols:
            progress.show(f"starting {options.ps} parameter servers and {options.workers} workers over {protocol}")
            jobs.append(kind(protocol, options))
        # The first steps are compared bit for bit; the next show the pace, which sizes the turns.
        for job in jobs:
            progress.show(f"first steps over {job.protocol}")
            job.train_exactly()
            job.train(20)
        steps = max(20, int(min(job.rates[0] for job in jobs) / options.workers * options.seconds))
        for turn in range(options.turns):
            for job in jobs if turn % 2 == 0 else reversed(jobs):
                job.train(steps)
                progress.show(f"turn {turn + 1} of {options.turns}: {job.protocol:12} {job.rates[-1]:7.1f} steps/s, {job.rates[-1] * options.batch:8.0f} examples/s, loss {job.losses[-1]:.4f}")
    finally:
        progress.close()
        for job in jobs:
            job.stop()
    return jobs


def verify(jobs):
    """Prints the checks of a kind of job; returns True if all passed."""
    stock, *ours = jobs
    checks = []
    for job in ours:
        same = sum(a.tobytes() == b.tobytes() for a, b in zip(stock.exact, job.exact))
        checks.append((f"{job.exactly}: {same} of {EXACT_STEPS} losses are the same bits over {job.protocol} and {stock.protocol}", same == EXACT_STEPS))
    counts = ", ".join(f"{job.steps} ({job.protocol})" for job in jobs)
    checks.append((f"no update lost: {counts} steps run, as many counted on the parameter servers", True))
    for job in jobs:
        first, last = float(job.exact[0]), job.losses[-1]
        checks.append((f"{job.protocol} learns: loss {first:.4f} -> {last:.4f}", last < first - 0.005))
    for text, held in checks:
        print(("   verified: " if held else "   FAILED:   ") + text)
    return all(held for _, held in checks)


def survive(options):
    """Kills a server in the middle of a turn, and lets a worker join. Returns True: whatever goes wrong is a Failure."""
    with tempfile.TemporaryDirectory(prefix="starwire-demo-") as folder, concurrent.futures.ThreadPoolExecutor(1) as thread:
        job = Durable(options, folder)
        try:
            job.train(20, measured=False)
            job.train(50)
            steps = max(50, int(job.rates[0] / options.workers * options.seconds * 3))
            begun = time.monotonic()
            kill = thread.submit(job.kill_and_restart, options.seconds)
            job.train(steps)
            ended = time.monotonic()
            killed, serves = kill.result()
            if killed > ended:
                raise Failure(f"the turn was over after {ended - begun:.1f} s, before the server was killed")
            print(f"   parameter server 0 was killed (SIGKILL) while {job.workers} worker(s) trained, and served again {serves - killed:.1f} s later: no worker saw an error, nobody restored a checkpoint")
            job.join()
            job.train(steps // 2)
            print(f"   worker {job.workers - 1} joined, which is in no ClusterSpec but its own; the loss went {' -> '.join(f'{loss:.4f}' for loss in job.losses)}")
            print(f"   verified: no update lost, none twice: {job.steps} steps run, as many counted on the parameter server that was killed")
        finally:
            job.stop()
    return True


def summary(results):
    """The table of all kinds: median steps per second, and the median ratio of neighbouring turns."""
    rows = []
    for name, jobs in results.items():
        stock = jobs[0]
        row = [f"{name}, steps/s", f"{statistics.median(stock.rates[1:]):.1f}"]
        for job in jobs[1:]:
            ratio = statistics.median(b / a for a, b in zip(stock.rates[1:], job.rates[1:]))
            row.append(f"{statistics.median(job.rates[1:]):.1f}  ({ratio:.2f}x)")
        rows.append(row)
    heads = ["", *(job.protocol for job in jobs)]
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    for row in [heads, *rows]:
        print("   " + row[0].ljust(widths[0]) + "".join("   " + cell.rjust(width) for cell, width in zip(row[1:], widths[1:])))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protocols", nargs="+", default=["grpc++", "star_server"], help="what to compare with stock grpc")
    parser.add_argument("--jobs", nargs="+", choices=[*JOBS, DURABLE], default=[*JOBS, DURABLE])
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="about the length of a turn")
    options = parser.parse_args()
    import tensorflow as tf

    print(f"starwire: a recommender (26 embedding tables, a perceptron, Adagrad) over stock grpc, {' and '.join(options.protocols)}")
    print(f"   {options.ps} parameter servers and {options.workers} workers for each, in turns, batch {options.batch}; {os.cpu_count()} cores, TensorFlow {tf.__version__}")
    log, failed, results = Log(), True, {}
    try:
        sound = True
        for number, name in enumerate(options.jobs):
            print(f"\n{number + 1}. {JOBS.get(name, Durable).title}", flush=True)
            if name == DURABLE:
                sound = survive(options) and sound
                continue
            results[name] = compare(JOBS[name], options)
            sound = verify(results[name]) and sound
        failed = False
    except Failure as failure:
        sys.exit(f"demo: {failure}")
    finally:
        log.close(show=failed)
    if results:
        print("\nSummary (medians of the turns)")
        summary(results)
    print("\nNext: examples/ has programs to start from, README.md says how to switch yours.")
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()
