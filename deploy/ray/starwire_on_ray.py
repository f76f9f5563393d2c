"""Runs a parameter-server job on a Ray cluster, one actor per task.

    python starwire_on_ray.py --ps 2 --worker 2 --protocol star_server train.py --epochs 3

The script is not changed: each task gets TF_CONFIG and runs under `starwire run`. train.py and starwire must be present on the nodes (in
their image, on a shared file system, or through --runtime-env). The exit status is that of the first worker that failed, else 0.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys

import ray


@ray.remote
class Task:
    """A process of the cluster, on whatever node Ray chooses."""

    def address(self):
        """Reserves a port until the process starts."""
        self.reserved = socket.socket()
        self.reserved.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{self.reserved.getsockname()[1]}"

    def run(self, command, cluster, job, index, protocol):
        """Returns the exit status of the process."""
        environment = dict(os.environ, TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}))
        if job == "ps":
            environment["CUDA_VISIBLE_DEVICES"] = "-1"
        self.reserved.close()
        self.process = subprocess.Popen([sys.executable, "-m", "starwire", "run", "--protocol", protocol, *command], env=environment, start_new_session=True)
        return self.process.wait()

    def stop(self):
        try:
            os.killpg(self.process.pid, signal.SIGTERM)
        except (AttributeError, ProcessLookupError):
            pass


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--worker", type=int, default=1)
    parser.add_argument("--chief", action="store_true")
    parser.add_argument("--protocol", default="star_server")
    parser.add_argument("--cpus", type=float, default=1, help="CPUs that Ray reserves for a task")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs that Ray reserves for a worker or chief")
    parser.add_argument("--runtime-env", type=json.loads, default={}, help="Ray's runtime environment, as JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="SCRIPT.py or -m MODULE, with its arguments")
    options = parser.parse_args()
    if not options.command:
        parser.error("what should be run?")

    # Without a running cluster (RAY_ADDRESS), Ray starts one on this machine.
    ray.init(runtime_env=options.runtime_env)
    counts = {"ps": options.ps, "chief": int(options.chief), "worker": options.worker}
    tasks = {}
    for job, count in counts.items():
        for index in range(count):
            # Two threads: `stop` must be heard while `run` waits.
            kind = Task.options(num_cpus=options.cpus, num_gpus=0 if job == "ps" else options.gpus, max_concurrency=2)
            tasks[job, index] = kind.remote()
    addresses = dict(zip(tasks, ray.get([task.address.remote() for task in tasks.values()])))
    cluster = {job: [addresses[job, index] for index in range(count)] for job, count in counts.items() if count}
    print(json.dumps(cluster), flush=True)

    running = {task.run.remote(options.command, cluster, job, index, options.protocol): (job, index) for (job, index), task in tasks.items()}
    awaited = {task for task in tasks if task[0] == ("chief" if options.chief else "worker")}
    status = 0
    try:
        while awaited and status == 0:
            ended, _ = ray.wait(list(running), num_returns=1)
            task = running.pop(ended[0])
            status = ray.get(ended[0])
            print(f"{task[0]} {task[1]} ended with status {status}", flush=True)
            awaited.discard(task)
    finally:
        ray.get([task.stop.remote() for task in tasks.values()])
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
