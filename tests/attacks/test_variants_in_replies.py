"""A parameter server that sends its workers variants which TensorFlow's decoder trusts blindly."""

import arena
import cluster as harness
import pytest
import training
from hostile_variants import FEEDS
from impostor import Impostor

TASK = "/job:ps/replica:0/task:0"
NAMES = ["a tensor without tensors", "a list of missing tensors", "one float for a huge shape", "a list with an element that nobody has"]


@pytest.fixture(scope="module")
def pair(runner):
    """Creates one worker per protocol, and the impostor that is its only parameter server."""
    made = {}

    def drop(protocol):
        cluster, impostor = made.pop(protocol)
        impostor.close()
        cluster.close()

    def make(protocol):
        if protocol in made and not made[protocol][0].usable():
            drop(protocol)
        if protocol not in made:
            cluster = harness.Cluster(runner, protocol, {"ps": 1, "worker": 1}, start=False, endpoint_map=True)
            lines = dict(line.split("=") for line in (cluster.endpoint_map / ".endpoint_map").read_text().splitlines())
            made[protocol] = cluster, Impostor(lines[cluster.spec["ps"][0]], TASK, protocol)
            cluster.start("worker", 0)
            # A first session, so that one-time allocations are not blamed on the attack.
            ask(*made[protocol], FEEDS["an unknown object"])
        return made[protocol]

    yield make
    for protocol in list(made):
        drop(protocol)


def ask(cluster, impostor, hostile):
    """Answers one step with `hostile`; returns the step's error and whether the worker still works."""
    impostor.hostile, impostor.served = hostile, []
    return cluster["worker", 0].call(training.read_objects, cluster.target("worker", 0), timeout=40)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("protocol", ["star_server", "grpc++"])
def test_a_lying_server(pair, protocol, name):
    cluster, impostor = pair(protocol)
    worker = cluster["worker", 0]
    process = arena.Process(worker.pid)
    before = process.memory()
    process.forget_peak()
    (kind, message), works = ask(cluster, impostor, FEEDS[name])
    assert (16 if protocol == "star_server" else "RECV") in impostor.served, impostor.served
    assert kind in ("DataLossError", "InvalidArgumentError"), (kind, message)
    assert TASK in message, message
    assert works
    assert process.peak() - before < 64 << 20, f"+{process.peak() - before >> 20} MiB"
    assert not worker.complaints()
