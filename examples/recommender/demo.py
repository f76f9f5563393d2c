"""Trains the same recommender over stock grpc, grpc++ and star_server in real processes, and compares speed and results.

The clusters run side by side and train in alternating turns, so that other load on the machine affects all of them alike.
"""

import argparse
import multiprocessing
import os
import signal
import socket
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
    """A process that runs one server and takes commands over a pipe."""

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

        if job == "ps":
            server, _ = tasks.serve(cluster, job, task, protocol)
            pipe.send(("ready", None))
            server.join()
        worker = tasks.Worker(cluster, task, protocol, batch)
        pipe.send(("ready", None))
        while True:
            (steps,) = pipe.recv()
            pipe.send(("trained", worker.train(steps)))
    except EOFError:
        pass
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


class Cluster:
    def __init__(self, protocol, options):
        import tensorflow as tf

        self.protocol = protocol
        ports = _free_ports(options.ps + options.workers)
        addresses = [f"localhost:{port}" for port in ports]
        spec = tf.train.ClusterSpec({"ps": addresses[: options.ps], "worker": addresses[options.ps :]})
        self.servers = [Task(spec, "ps", number, protocol, options.batch) for number in range(options.ps)]
        self.workers = []
        for server in self.servers:
            server.receive()
        for number in range(options.workers):
            self.workers.append(Task(spec, "worker", number, protocol, options.batch))
            self.workers[-1].receive()
        self.rates, self.losses, self.steps, self.exact = [], [], 0, []

    def train_exactly(self):
        """Trains on worker 0 only, so that the result does not depend on timing."""
        self.workers[0].send(EXACT_STEPS)
        _, self.exact, at = self.workers[0].receive()
        self._count(at, EXACT_STEPS)

    def train(self, steps, measured=True):
        """Trains `steps` steps on every worker at once."""
        for worker in self.workers:
            worker.send(steps)
        answers = [worker.receive(120) for worker in self.workers]
        self._count(max(at for _, _, at in answers), steps * len(self.workers))
        if measured:
            self.rates.append(sum(steps / seconds for seconds, _, _ in answers))
        self.losses.append(statistics.mean(float(loss) for _, losses, _ in answers for loss in losses[-10:]))

    def _count(self, at, steps):
        self.steps += steps
        if at != self.steps:
            raise Failure(f"{self.protocol}: the parameter server counted {at} steps, the workers ran {self.steps}")

    def stop(self):
        for task in self.workers + self.servers:
            task.stop()


def _free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("localhost", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def compare(options):
    import tensorflow as tf

    tf.compat.v1.disable_eager_execution()
    clusters = []
    try:
        for protocol in ["grpc", *options.protocols]:
            print(f"starting {options.ps} parameter servers and {options.workers} workers over {protocol}", flush=True)
            clusters.append(Cluster(protocol, options))
        for cluster in clusters:
            cluster.train_exactly()
        # Warm up, and measure the pace to size the turns.
        for cluster in clusters:
            cluster.train(20)
        steps = max(20, int(min(cluster.rates[0] for cluster in clusters) / options.workers * options.seconds))
        for turn in range(options.turns):
            for cluster in clusters if turn % 2 == 0 else reversed(clusters):
                cluster.train(steps)
                rate = cluster.rates[-1]
                print(f"  {cluster.protocol:12} {rate:8.1f} steps/s  {rate * options.batch:9.0f} examples/s  loss {cluster.losses[-1]:.4f}", flush=True)
    finally:
        for cluster in clusters:
            cluster.stop()
    return clusters


def report(clusters, options):
    """Prints the measurements and checks; returns True if all checks passed."""
    stock, *ours = clusters
    print()
    for cluster in clusters:
        print(f"{cluster.protocol:12} {statistics.median(cluster.rates[1:]):8.1f} steps/s (median of {options.turns} turns)")
    for cluster in ours:
        ratios = [b / a for a, b in zip(stock.rates[1:], cluster.rates[1:])]
        print(f"{cluster.protocol} : {stock.protocol} = {statistics.median(ratios):.2f} (turns: {', '.join(f'{ratio:.2f}' for ratio in ratios)})")
    print()
    checks = []
    for cluster in ours:
        same = sum(a.tobytes() == b.tobytes() for a, b in zip(stock.exact, cluster.exact))
        checks.append((f"one worker, same seed: {same} of {EXACT_STEPS} losses are the same bits over {cluster.protocol} and {stock.protocol}", same == EXACT_STEPS))
    counts = ", ".join(f"{cluster.steps} ({cluster.protocol})" for cluster in clusters)
    checks.append((f"no update lost: {counts} steps run, as many counted on the parameter server", True))
    for cluster in clusters:
        first, last = float(cluster.exact[0]), cluster.losses[-1]
        checks.append((f"{cluster.protocol} learns: loss {first:.4f} -> {last:.4f}", last < first - 0.005))
    for text, held in checks:
        print(("verified: " if held else "FAILED:   ") + text)
    return all(held for _, held in checks)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protocols", nargs="+", default=["grpc++", "star_server"], help="what to compare with stock grpc")
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="about the length of a turn")
    options = parser.parse_args()
    log, failed = Log(), True
    try:
        clusters = compare(options)
        failed = False
    except Failure as failure:
        sys.exit(f"demo: {failure}")
    finally:
        log.close(show=failed)
    sys.exit(0 if report(clusters, options) else 1)


if __name__ == "__main__":
    main()
