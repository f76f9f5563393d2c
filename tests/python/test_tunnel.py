"""TensorFlow's gRPC between tasks that have a secret or TLS travels inside their connections."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys

import pytest

import steps
from authority import Authority
from cluster import RemoteError, free_port
from settings import ONE, SECRET, TCP
from tf2_job import coordination, replace_worker, start, train_keras_like, train_scheduled

pytestmark = pytest.mark.ours


@pytest.fixture(params=["secret", "tls", "both"])
def proof(request, tmp_path):
    """The environment of all tasks: what an unauthenticated peer lacks."""
    environment = {**ONE, "STARWIRE_REQUIRE_AUTH": "true"}
    if request.param != "tls":
        environment["STARWIRE_SECRET"] = SECRET
    if request.param != "secret":
        if not shutil.which("openssl"):
            pytest.skip("needs the openssl command")
        environment.update(TCP, **Authority(tmp_path / "training-ca").issue("here", "IP:127.0.0.1"))
    return environment


@pytest.fixture
def chief(fresh_cluster, proof):
    return start(fresh_cluster, environment=proof)


@pytest.mark.quick(lambda of: of["proof"] == "both", reason="a connection proves itself by both; test_the_coordination_service has a tunnel with each alone")
def test_parameter_server_strategy(chief, tmp_path):
    cluster, task = chief
    count, total, _, devices = task.call(train_scheduled, 40, timeout=120)
    assert (count, total) == (sum(range(40)), sum(range(40)) * 7000)
    assert {device.split("/device")[0] for device in devices} == {"/job:ps/replica:0/task:0", "/job:ps/replica:0/task:1"}
    losses = task.call(train_keras_like, 30, timeout=120)
    assert losses[-1] < losses[0], losses
    # A worker that comes back is used again.
    replace_worker(cluster, task, str(tmp_path / "stop"))
    # TensorFlow's clients outside the cluster have no way in.
    outside = cluster.runner.task("stock-client", {})
    with pytest.raises(RemoteError) as caught:
        outside.call(steps.run_steps, cluster.target("ps", 0), 1, timeout=30)
    assert caught.value.type == "PermissionDeniedError", caught.value


@contextlib.contextmanager
def coordinated(runner, protocol, environment):
    """Two workers that have exchanged values through the coordination service; yields the ClusterSpec and their tasks."""
    spec = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(2)]}
    tasks = [runner.task(f"coordinated{i}", environment) for i in range(2)]
    try:
        for i, task in enumerate(tasks):
            task.begin(coordination, protocol, spec, i)
        for i, task in enumerate(tasks):
            assert task.result(90) == f"value{1 - i}"
        yield spec, tasks
    finally:
        for task in tasks:
            task.kill()


def test_the_coordination_service(runner, protocol, proof):
    with coordinated(runner, protocol, proof):
        pass


INTRUDER = """
import os, socket, sys
"".encode("idna")  # its module cannot be read afterwards
os.setgid(65534), os.setuid(65534)
answers = []
for port in map(int, sys.argv[1:]):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as probe:
        try:
            probe.sendall(bytes.fromhex(os.environ["HELLO"]))
            answers.append(len(probe.recv(100)))
        except ConnectionError:
            answers.append(0)
print(answers)
"""
# HTTP/2's preface and the first frame of gRPC's C core.
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 6, 4, 0, 0, 0, 0, 0, 0xFE, 3, 0, 0, 0, 1])


def listening(pid):
    """The ports on 127.0.0.1 that a process listens on."""
    own = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd") if os.path.islink(f"/proc/{pid}/fd/{fd}")}
    lines = [line.split() for line in open(f"/proc/{pid}/net/tcp").read().splitlines()[1:]]
    return [int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A" and line[1].startswith("0100007F:") and f"socket:[{line[9]}]" in own]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_other_users_of_the_host_cannot_use_it(runner, protocol):
    with coordinated(runner, protocol, {**ONE, "STARWIRE_SECRET": SECRET}) as (spec, tasks):
        own = int(spec["worker"][1].rsplit(":", 1)[1])
        entrances = [port for port in listening(tasks[1].pid) if port != own]
        assert entrances
        with socket.create_connection(("127.0.0.1", entrances[0]), timeout=10) as probe:
            probe.sendall(HELLO)
            assert probe.recv(100), "the same user reaches TensorFlow's server"
        run = subprocess.run([sys.executable, "-c", INTRUDER, *map(str, entrances)], env={**os.environ, "HELLO": HELLO.hex()}, capture_output=True, text=True, timeout=60)
        assert run.stdout.strip() == str([0] * len(entrances)), run.stderr
        tasks[1].wait_for_log("it belongs to another user")
