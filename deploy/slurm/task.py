#!/usr/bin/env python3
"""One task of a cluster under Slurm: makes TF_CONFIG and becomes the command. starwire.sbatch starts it with srun, once per job.

    srun … task.py --job worker --ps 2 --chief COMMAND…

The first nodes of the allocation are the parameter servers, then the chief if there is one, then the workers; one task per node.
"""

import argparse
import json
import os
import sys

PORT = 2222


def cluster(hosts, ps, chief, port):
    """Returns {job: addresses}. Raises ValueError if the nodes do not suffice."""
    if len(hosts) < ps + 1 + chief:
        raise ValueError(f"{len(hosts)} nodes are not enough for {ps} parameter servers{', a chief' if chief else ''} and a worker")
    addresses = [f"{host}:{port}" for host in hosts]
    jobs = {"ps": addresses[:ps], "chief": addresses[ps : ps + chief], "worker": addresses[ps + chief :]}
    return {job: tasks for job, tasks in jobs.items() if tasks}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", required=True, choices=("ps", "chief", "worker"))
    parser.add_argument("--ps", type=int, required=True, help="number of parameter servers")
    parser.add_argument("--chief", action="store_true")
    parser.add_argument("--port", type=int, default=PORT, help="TensorFlow's port on each node (%(default)s)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    hosts = os.environ.get("STARWIRE_SLURM_HOSTS", "").split()
    index = os.environ.get("SLURM_PROCID")
    if not hosts or index is None or not options.command:
        parser.error("give a command, and start this with srun from starwire.sbatch, which sets STARWIRE_SLURM_HOSTS")
    try:
        jobs = cluster(hosts, options.ps, options.chief, options.port)
    except ValueError as error:
        parser.error(str(error))
    # starwire would warn about a variable that is not its own.
    del os.environ["STARWIRE_SLURM_HOSTS"]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": jobs, "task": {"type": options.job, "index": int(index)}})
    # Jobs of one user on a node must not mix.
    os.environ.setdefault("STARWIRE_CLUSTER_ID", f"slurm-{os.environ.get('SLURM_JOB_ID', '0')}")
    print(f"{options.job} {index} on {os.uname().nodename}", flush=True)
    os.execvp(options.command[0], options.command)


if __name__ == "__main__":
    sys.exit(main())
