"""Name servers that say nothing, and that lie: who needs no name is not held up, and who does gets there when the truth is told."""

import os
import re
import socket
import threading

import client
import cluster as harness
import pytest
import scarcity
import steps
import wire
from cluster import one, state, tf
from name_server import NameServer
from waiting import wait_until

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root, for port 53 and to mount")
NAMED, OTHER = "/job:ps/task:1", "/job:ps/task:0"


@pytest.fixture
def names():
    with NameServer() as server:
        yield server


@pytest.fixture
def cluster(runner, names):
    """A worker, a parameter server that it knows by address, and one that it knows by name, which is not started yet."""
    environment = {"NETWORK_MAX_CONNECTION_TIMEOUT": 500}
    with harness.Cluster(runner, "star_server", {"ps": 2, "worker": 1}, environment=environment, start=False) as made:
        port = made.spec["ps"][1].rsplit(":", 1)[1]
        made.spec["ps"][1] = f"ps1.train.test:{port}"
        made.start("ps", 0)
        worker = made.process("worker", 0)
        worker.call(scarcity.mount_file, "/etc/resolv.conf", f"nameserver {names.ip}\noptions timeout:5 attempts:1\n", str(worker.directory))
        worker.call(harness.start_server, made.spec, "worker", 0, made.protocol)
        yield made


# In the worker.


def begin_with_the_named(target):
    """A thread runs a step on the server that has a name."""

    def run():
        with tf.Graph().as_default():
            with tf.device(NAMED):
                number = tf.random.uniform((10,)) * 0.0 + 2.0
            with one().Session(target, config=one().ConfigProto(device_filters=[NAMED, "/job:worker/task:0"])) as session:
                state["number"] = float(session.run(number)[3])

    state["thread"] = threading.Thread(target=run, daemon=True)
    state["thread"].start()


def end_with_the_named(timeout):
    state["thread"].join(timeout)
    return state.get("number")


def steps_with_the_other(target):
    with tf.Graph().as_default():
        model = steps.Model(ps=OTHER)
        with one().Session(target, config=one().ConfigProto(device_filters=[OTHER, "/job:worker/task:0"])) as session:
            session.run(model.initializer)
            for _ in range(20):
                model.check(session.run(model.sums))
    return model.steps


def failures(cluster):
    """Returns the number of failed attempts to connect."""
    proof = cluster.runner._proof
    tls = client.tls_with(proof, ()) if "STARWIRE_TLS_CERT" in proof else None
    text = wire.http_get(cluster.spec["worker"][0], "/metrics", tls=tls)[1]
    return int(re.search(r"^starwire_connect_failures_total\S* (\d+)", text, re.M)[1])


def test_silent_name_server(cluster, names):
    names.silent = True
    worker, target = cluster["worker", 0], cluster.target("worker", 0)
    worker.call(begin_with_the_named, target)
    assert names.asked.wait(30)
    assert worker.call(steps_with_the_other, target) == 20
    cluster.start("ps", 1)
    names.addresses["ps1.train.test"], names.silent = ["127.0.0.1"], False
    assert worker.call(end_with_the_named, 30) == 2.0


LIES = {
    "garbage": ({"garbage": b"\xff" * 40}, []),
    "nothing": ({}, []),
    "sixty closed ports": ({}, [f"127.88.0.{n + 1}" for n in range(60)]),
    "nobody's addresses": ({}, ["0.0.0.0", "224.0.0.1", "255.255.255.255"]),
    "one that accepts and is silent": ({}, ["127.88.0.1"]),
}


def test_lying_name_server(cluster, names):
    worker, target = cluster["worker", 0], cluster.target("worker", 0)
    port = int(cluster.spec["ps"][1].rsplit(":", 1)[1])
    worker.call(begin_with_the_named, target)
    for how, (options, addresses) in LIES.items():
        names.garbage, names.addresses["ps1.train.test"] = options.get("garbage"), addresses
        names.asked.clear()
        with socket.create_server(("127.88.0.1", port)) if "silent" in how else socket.socket():
            assert names.asked.wait(60), how
            begun = failures(cluster)
            wait_until(lambda: failures(cluster) > begun, 60, how)
    assert worker.call(steps_with_the_other, target) == 20
    cluster.start("ps", 1)
    names.garbage, names.addresses["ps1.train.test"] = None, ["127.0.0.1"]
    assert worker.call(end_with_the_named, 30) == 2.0
