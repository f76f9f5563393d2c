"""Trains for an hour while tasks are killed, stopped, restarted and sent garbage, and checks for leaks.

    make soak                                                  # 60 minutes of star_server
    make soak SOAK_ARGS="--minutes 10 --protocol grpc++"
    make soak SOAK_ARGS="--minutes 10 --protocol grpc"         # the same for stock TensorFlow
    make soak SOAK_ARGS="--state sync"                         # a server is killed every 20 s, and no worker may notice

The tasks ps/0 and worker/0 live throughout: their memory, descriptors and threads must not grow. Every worker must keep making steps, no process
may abort, and all errors must be ones that a training job recovers from. With a state, servers are killed and nothing else happens: there must be
no error at all, and with `sync` as many steps on the server as the workers have made.
"""

import argparse
import collections
import json
import os
import random
import re
import signal
import socket
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))
sys.path.insert(0, str(HERE))

import cluster as harness  # noqa: E402
import training  # noqa: E402

SERVERS, WORKERS = 2, 3
# Errors from which MonitoredTrainingSession recovers itself, and those it reports if a peer is away for longer than a step may take.
EXPECTED = {"UnavailableError", "AbortedError", "DeadlineExceededError", "CancelledError"}
STUCK_S = 150
SAMPLE_S = 5


def sample(pid):
    """Returns resident bytes, descriptors and threads."""
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return {"rss": int(fields["VmRSS"].split()[0]) * 1024, "descriptors": len(os.listdir(f"/proc/{pid}/fd")), "threads": int(fields["Threads"])}


def last_heap(path):
    """Returns the latest heap figures that a worker has written."""
    with open(path) as file:
        file.seek(max(0, os.path.getsize(path) - 20_000))
        found = [line for line in file if " heap " in line]
    return json.loads(found[-1].split(" ", 2)[2]) if found else {}


def slope(points):
    """Theil-Sen estimator: the median slope of all pairs, per second."""
    pairs = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] > a[0]]
    return statistics.median(pairs) if pairs else 0.0


class Soak:
    def __init__(self, options, runner, out):
        self.options, self.out = options, out
        self.random = random.Random(options.seed)
        environment = {"STARWIRE_KEEPALIVE": "after_ms=2000,timeout_ms=4000", "TF_CPP_MIN_LOG_LEVEL": 1}
        per_task = {("ps", index): {"TF_CPP_MIN_LOG_LEVEL": 0} for index in range(SERVERS)}
        if options.state:
            environment["STARWIRE_RECOVER_S"] = 120
            for settings in per_task.values():
                settings |= {"STARWIRE_STATE": out / "state", "STARWIRE_STATE_MODE": options.state}
        self.cluster = harness.Cluster(runner, options.protocol, {"ps": SERVERS, "worker": WORKERS}, environment=environment, per_task=per_task)
        if not harness.is_stock(options.protocol):
            self.cluster["ps", 0].wait_for_log("data port")
        self.checkpoints, self.end = None if options.state else str(out / "checkpoints"), str(out / "end")
        self.events = collections.Counter()
        self.complaints = []
        self.begun = {}
        for task in range(WORKERS):
            self.begin(task)

    def progress(self, task):
        return self.out / f"worker{task}"

    def begin(self, task):
        self.begun[task] = time.time()
        self.cluster["worker", task].begin(
            training.train, self.cluster.target("worker", task), task, SERVERS, self.checkpoints, str(self.progress(task)), self.end, self.options.steps_per_second
        )

    def replace(self, job, index):
        """Kills a task with SIGKILL and starts a new one after a while."""
        old = self.cluster[job, index]
        old.kill()
        self.complaints += old.complaints()
        time.sleep(self.random.uniform(0.2, 3))
        self.cluster.start(job, index)
        if job == "worker":
            self.begin(index)

    def kill_worker(self):
        self.replace("worker", self.random.randrange(1, WORKERS))

    def kill_server(self):
        self.replace("ps", self.random.randrange(SERVERS) if self.options.state else SERVERS - 1)

    def stop_worker(self):
        """Stops a worker, sometimes long enough to be taken for dead."""
        task = self.cluster["worker", self.random.randrange(1, WORKERS)]
        task.signal(signal.SIGSTOP)
        time.sleep(self.random.uniform(0.5, 9))
        task.signal(signal.SIGCONT)

    def send_garbage(self):
        # The data port; stock TensorFlow has only its gRPC port.
        told = re.findall(r"data port (\S+):(\d+),", self.cluster["ps", 0].full_log())
        host, port = told[-1] if told else self.cluster.spec["ps"][0].rsplit(":", 1)
        with socket.create_connection((host, int(port)), 5) as peer:
            peer.settimeout(1)
            try:
                peer.sendall(self.random.randbytes(self.random.randrange(1, 100_000)))
                peer.recv(1000)
            except OSError:
                pass

    def happen(self):
        weights = [0, 1, 0, 0] if self.options.state else [5, 1, 3, 3]
        what = self.random.choices([self.kill_worker, self.kill_server, self.stop_worker, self.send_garbage], weights)[0]
        what()
        self.events[what.__name__] += 1

    def watch(self, started, samples):
        now = time.monotonic() - started
        for (job, _), task in self.cluster.tasks.items():
            if task.poll() is not None or job == "worker" and task.ready():
                self.complaints.append(f"{task} ended unasked")
                return False
        seen = {"worker/0": sample(self.cluster["worker", 0].pid) | (last_heap(self.progress(0)) if self.progress(0).exists() else {})}
        if not self.options.state:
            seen["ps/0"] = sample(self.cluster["ps", 0].pid) | self.cluster["ps", 0].call(training.heap)
        samples.append({"t": now, "events": sum(self.events.values()), **seen})
        for task in range(WORKERS):
            path = self.progress(task)
            # A worker that is killed repeatedly before it starts is not stuck; worker/0 is never killed.
            last = max(self.begun[task], path.stat().st_mtime if path.exists() else 0)
            if time.time() - last > STUCK_S:
                self.complaints.append(f"worker/{task} has done nothing for {STUCK_S} s")
                return False
        return True

    def run(self):
        started, samples = time.monotonic(), []
        next_event = next_sample = 20.0
        until = self.options.minutes * 60
        while (now := time.monotonic() - started) < until:
            if now >= next_sample:
                next_sample = now + SAMPLE_S
                if not self.watch(started, samples):
                    break
            if now >= next_event:
                self.happen()
                next_event = time.monotonic() - started + (self.options.pause if self.options.state else self.random.expovariate(1 / self.options.pause))
            time.sleep(0.2)
        Path(self.end).touch()
        made = 0
        for task in range(WORKERS):
            try:
                made += self.cluster["worker", task].result(120)[0]
            except (harness.TaskTimeout, harness.TaskDied, harness.RemoteError) as error:
                self.complaints.append(str(error)[:2000])
        if self.options.state and not self.complaints:
            self.compare(made)
        for task in self.cluster.tasks.values():
            self.complaints += task.complaints()
        return samples

    def compare(self, made):
        """Compares the steps that the workers have made with those that the server has counted."""
        counted = self.cluster["worker", 0].call(training.counted, self.cluster.target("worker", 0), 0, SERVERS)
        print(f"soak: {made} steps made, {counted} on the server", flush=True)
        if counted > made or self.options.state == "sync" and counted != made:
            self.complaints.append(f"the workers have made {made} steps, and the server has {counted}")

    def errors(self):
        found = collections.Counter()
        for task in range(WORKERS):
            for line in self.progress(task).read_text().splitlines() if self.progress(task).exists() else ():
                _, what, detail = line.split(" ", 2)
                if what == "error":
                    found[detail.split()[0]] += 1
        return found

    def steps(self):
        made = 0
        for task in range(WORKERS):
            last = 0
            for line in self.progress(task).read_text().splitlines() if self.progress(task).exists() else ():
                _, what, detail = line.split(" ", 2)
                if what == "steps":
                    value = int(detail)
                    made += value - last if value > last else value
                    last = value
        return made


def judge(samples, options):
    """Returns the growth of the tasks that live throughout, and the violations. The first third is warm-up."""
    rows, wrong = {}, []
    settled = [s for s in samples if s["t"] >= samples[-1]["t"] / 3]
    events = settled[-1]["events"] - settled[0]["events"]
    hours = (settled[-1]["t"] - settled[0]["t"]) / 3600
    for task in sorted(settled[0].keys() & {"ps/0", "worker/0"}):
        row = {}
        for what, key in (("rss", "rss"), ("heap_used", "used"), ("heap_free", "free")):
            points = [(s["t"], s[task][key]) for s in settled if key in s[task]]
            if points:
                row[f"{what}_mb"] = [points[0][1] / 1e6, points[-1][1] / 1e6]
                row[f"{what}_mb_per_hour"] = slope(points) * 3600 / 1e6
        row["rss_kb_per_event"] = row["rss_mb_per_hour"] * hours * 1000 / max(events, 1)
        # A run of a few minutes shows only warm-up: caches, malloc arenas, first checkpoints.
        if options.minutes >= 30 and row["rss_mb_per_hour"] > options.rss_mb_per_hour:
            wrong.append(f"{task}: resident memory grows by {row['rss_mb_per_hour']:.1f} MB an hour, allowed are {options.rss_mb_per_hour}")
        half = len(settled) // 2
        for what, slack in (("descriptors", 4), ("threads", 4)):
            before, after = (max(s[task][what] for s in part) for part in (settled[:half], settled[half:]))
            row[what] = [before, after]
            if after > before + slack:
                wrong.append(f"{task}: {what} grew from {before} to {after}")
        rows[task] = row
    return rows, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protocol", default="star_server")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--state", choices=["async", "sync"], help="of the servers, of which one is killed every PAUSE seconds, and nothing else happens")
    parser.add_argument("--pause", type=float, help="mean seconds between two events (default: 5, with a state 20)")
    parser.add_argument("--steps-per-second", type=float, default=0, help="of each worker, at most: a soak that leaves the machine to others (default: no limit)")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--rss-mb-per-hour", type=float, default=20)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.pause = options.pause or (20 if options.state else 5)
    print(f"soak: {options.protocol}{f' with a state ({options.state})' if options.state else ''} for {options.minutes:g} minutes, seed {options.seed}", flush=True)
    # Absolute, because tasks run in their own folders.
    out = options.out.resolve() / f"{options.protocol}-{time.strftime('%Y%m%d-%H%M%S')}"
    out.mkdir(parents=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))  # tasks import `training`
    runner = harness.Runner(keep=lambda: True)
    try:
        soak = Soak(options, runner, out)
        samples = soak.run()
    finally:
        runner.close()
    errors, steps = soak.errors(), soak.steps()
    wrong = soak.complaints + [f"{count} times {name}, which training does not recover from" for name, count in errors.items() if options.state or name not in EXPECTED]
    rows = {}
    if len(samples) < 12:
        wrong.append(f"only {len(samples)} samples: too short to judge")
    else:
        rows, found = judge(samples, options)
        wrong += found
    result = {"protocol": options.protocol, "state": options.state, "minutes": options.minutes, "seed": options.seed, "steps": steps, "events": soak.events, "errors": errors, "growth": rows, "wrong": wrong}
    (out / "result.json").write_text(json.dumps({**result, "samples": samples}, indent=1))
    print(json.dumps(result, indent=1))
    print(f"soak: {'FAILED' if wrong else 'passed'}; everything is in {out}, the tasks' logs in {runner.directory}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
