"""Trains with a parameter server and a worker over grpc+verbs on this machine's RDMA device; run in the guest (`tests/rdma/guest`).

usage: train.py [STEPS]. Importing TensorFlow takes a minute in the virtual machine, so the process forks after the import. Checks the result, and the
counters of both servers, which must show that the tensors went over RDMA.
"""

import os
import re
import signal
import socket
import sys
import time
import urllib.request

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 10
WARM, VARIABLES, SIZE = 3, 3, 100_000
os.environ.update(STARWIRE_UNIX="off", STARWIRE_VERBS_FALLBACK="false", CUDA_VISIBLE_DEVICES="-1")
begun = time.monotonic()


def say(*words):
    print(f"[{time.monotonic() - begun:6.1f}]", *words, flush=True)


def free_ports(count):
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def metrics(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    found = (re.match(r"starwire_(\w+?)(?:_total)?\{.*\} (\d+)$", line) for line in lines)
    return {match[1]: int(match[2]) for match in found if match}


import tensorflow as tf  # noqa: E402

say("TensorFlow", tf.__version__)
ps_port, worker_port = free_ports(2)
TASKS = (("ps", ps_port), ("worker", worker_port))
cluster = tf.train.ClusterSpec({"ps": [f"127.0.0.1:{ps_port}"], "worker": [f"127.0.0.1:{worker_port}"]})
child = os.fork()
job = "ps" if child == 0 else "worker"
tf.load_library(os.environ["STARWIRE_LIBRARY"])
v1 = tf.compat.v1
v1.disable_eager_execution()
server = tf.distribute.Server(cluster, job_name=job, task_index=0, protocol="grpc+verbs")
if child == 0:
    server.join()
    os._exit(0)

try:
    with tf.device("/job:ps/task:0"):
        variables = [v1.get_variable(f"v{i}", [SIZE], initializer=v1.ones_initializer(), use_resource=False) for i in range(VARIABLES)]
    with tf.device("/job:worker/task:0"):
        halves = [variable * 0.5 for variable in variables]
    with tf.device("/job:ps/task:0"):
        step = tf.group(*[v1.assign_sub(variable, half) for variable, half in zip(variables, halves)])
    with v1.Session(server.target) as session:
        session.run(v1.global_variables_initializer())
        say("initialised")
        for _ in range(WARM):
            session.run(step)
        before = {name: metrics(port) for name, port in TASKS}
        for _ in range(STEPS):
            session.run(step)
        say(STEPS, "steps")
        after = {name: metrics(port) for name, port in TASKS}
        values = session.run([tf.reduce_max(variable) for variable in variables] + [tf.reduce_min(variable) for variable in variables])
    assert all(value == 0.5 ** (WARM + STEPS) for value in values), values
    payload = VARIABLES * SIZE * 4
    for name, port in TASKS:
        seen = metrics(port)
        per_step = {key: (value - before[name][key]) / STEPS for key, value in after[name].items() if key.startswith(("verbs_", "blocks_", "bytes_", "payload_"))}
        say(name, "per step:", {key: round(value, 1) for key, value in per_step.items()})
        assert seen["verbs_read_bytes"] >= STEPS * payload, (name, seen["verbs_read_bytes"], payload)
        assert seen["verbs_fallbacks"] == 0 and seen["verbs_connections"] > 0
        assert seen["verbs_connections"] == seen["connects"] + seen["accepts"], "no connection stayed on TCP"
        assert per_step["verbs_read_bytes"] >= payload and per_step["verbs_copied_bytes"] < payload / 50, per_step
        # Tensors are in memory that stays registered.
        assert per_step["verbs_registrations_reused"] >= 1.5 * VARIABLES and per_step["verbs_registrations"] <= 2, per_step
    say("the bytes went over RDMA")
    status = 0
except BaseException as error:  # in any case, the ps must not keep running
    say(type(error).__name__, error)
    status = 1
finally:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
os._exit(status)
