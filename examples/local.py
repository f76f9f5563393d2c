"""Runs an example as a local cluster: one process per task, each with its own TF_CONFIG, as a cluster manager would do.

    python examples/local.py examples/tf_config.py --ps 2 --worker 2
    python examples/local.py examples/parameter_server_strategy.py --ps 1 --worker 2 --chief

Exits when the workers (or the chief) have finished, or with the first failure.
"""

import argparse
import json
import os
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.append(os.path.join(ROOT, "python"))

from starwire_run import ports  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script")
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--worker", type=int, default=1)
    parser.add_argument("--chief", action="store_true")
    parser.add_argument("--protocol", default="grpc++")
    parser.add_argument("--timeout", type=float, default=300, help="seconds")
    options, rest = parser.parse_known_args()

    counts = {"chief": int(options.chief), "ps": options.ps, "worker": options.worker}
    addresses = [f"localhost:{port}" for port in ports.free(sum(counts.values()))]
    cluster = {job: [addresses.pop() for _ in range(count)] for job, count in counts.items() if count}
    waited_for = "chief" if options.chief else "worker"
    path = os.pathsep.join(filter(None, [os.path.join(ROOT, "python"), os.environ.get("PYTHONPATH")]))

    processes = {}
    deadline = time.monotonic() + options.timeout
    try:
        for job, tasks in cluster.items():
            for index in range(len(tasks)):
                config = {"cluster": cluster, "task": {"type": job, "index": index}, "rpc_layer": options.protocol}
                environment = dict(os.environ, TF_CONFIG=json.dumps(config), PYTHONPATH=path, CUDA_VISIBLE_DEVICES="-1")
                environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
                processes[job, index] = subprocess.Popen([sys.executable, options.script, *rest], env=environment)
        waiting = {task for task in processes if task[0] == waited_for}
        while waiting:
            for task, process in processes.items():
                code = process.poll()
                if code is None:
                    continue
                if code != 0 or task not in waiting:
                    if task[0] == waited_for and code == 0:
                        continue
                    sys.exit(f"/job:{task[0]}/task:{task[1]} ended with exit code {code}")
                waiting.discard(task)
            if time.monotonic() > deadline:
                sys.exit(f"not finished after {options.timeout} s: {sorted(waiting)}")
            time.sleep(0.1)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
