"""STARWIRE_PORTS=one: the port of the ClusterSpec serves tensors, HTTP and TensorFlow's gRPC, and no other port is open."""

import contextlib
import json
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import steps
import wire
from cluster import RemoteError, free_port, start_server, state, tf, worker_call, write_map
from metrics import data_port, metric
from settings import ONE, QUICK, SECRET
from steps import attempt, training
from tf2_job import start, train_scheduled
from waiting import HANGS

pytestmark = pytest.mark.ours


def listening(pid):
    """The TCP ports on which a process listens."""
    own = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(fd))
    ports = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


def port_of(address):
    return int(address.rsplit(":", 1)[1])


def test_training_over_one_port(fresh_cluster):
    cluster = fresh_cluster(shape=(("ps", 2), ("worker", 2)), environment=ONE)
    assert worker_call(cluster, steps.run_steps, 20) == 20
    for (job, index), task in cluster.tasks.items():
        address = cluster.spec[job][index]
        assert data_port(task) == address
        assert listening(task.pid) == {port_of(address)}
        assert wire.http_get(address, "/healthz") == (200, "ok\n")
    ps = cluster.spec["ps"][0]
    assert metric(ps, "starwire_tensor_requests_received_total") > 0
    # The tasks of a host know each other's unix sockets, although nobody is asked for an address.
    assert metric(ps, "starwire_lent_bytes_total") > 0
    assert metric(ps, "starwire_grpc_connections_total") == 0


def test_a_stock_client_reaches_the_master(fresh_cluster):
    cluster = fresh_cluster(environment=ONE)
    client = cluster.runner.task("stock-client", {})
    assert client.call(steps.run_steps, cluster.target("worker", 0), 5) == 5
    assert metric(cluster.spec["worker"][0], "starwire_grpc_connections_total") >= 1


def large_feed(target, megabytes):
    import numpy as np

    with tf.Graph().as_default(), tf.compat.v1.Session(target) as sess:
        fed = tf.compat.v1.placeholder(tf.float32)
        doubled = fed * 2.0
        value = np.arange(megabytes << 18, dtype=np.float32)
        for _ in range(3):
            assert np.array_equal(sess.run(doubled, {fed: value}), value * 2.0)


def test_large_messages_are_passed_on(fresh_cluster):
    cluster = fresh_cluster(environment=ONE)
    client = cluster.runner.task("stock-client", {})
    client.call(large_feed, cluster.target("worker", 0), 64)


@pytest.mark.parametrize("host", ["[::1]", "localhost"])
def test_hosts(fresh_cluster, host):
    cluster = fresh_cluster(environment=ONE, host=host)
    assert worker_call(cluster, steps.run_steps, 5) == 5
    client = cluster.runner.task("stock-client", {})
    assert client.call(steps.run_steps, cluster.target("worker", 0), 5) == 5


def test_parameter_server_strategy(fresh_cluster):
    cluster, chief = start(fresh_cluster, workers=1, environment=ONE)
    counter, total, texts, _ = chief.call(train_scheduled, 20, timeout=120)
    assert counter == sum(range(20)) and total == sum(range(20)) * 7000 and len(texts) == 20
    assert metric(cluster.spec["ps"][0], "starwire_grpc_connections_total") >= 1


def stop_and_start(spec, job, index, protocol):
    import starwire

    starwire.stop(state.pop("server"))
    start_server(spec, job, index, protocol)


def test_a_stopped_server_frees_its_port(fresh_cluster):
    cluster = fresh_cluster(environment={**ONE, **QUICK})
    files = []
    for _ in range(4):
        assert worker_call(cluster, steps.run_steps, 3) == 3
        files.append(cluster["ps", 0].call(steps.open_files))
        cluster["ps", 0].call(stop_and_start, cluster.spec, "ps", 0, cluster.protocol)
    assert worker_call(cluster, steps.run_steps, 3) == 3
    # TensorFlow's gRPC may keep some; starwire keeps none per server.
    assert files[-1] - files[1] <= 1 + 2 * (2 if cluster["ps", 0].call(steps.tensorflow_minor) <= (2, 18) else 0), files
    assert listening(cluster["ps", 0].pid) == {port_of(cluster.spec["ps"][0])}


def test_a_killed_server_comes_back_on_its_port(fresh_cluster):
    cluster = fresh_cluster(environment={**ONE, **QUICK})
    assert worker_call(cluster, steps.run_steps, 3) == 3
    cluster["ps", 0].kill()
    cluster.start("ps", 0)
    assert worker_call(cluster, steps.run_steps, 3, timeout=60) == 3


def test_a_taken_port_is_an_error(fresh_cluster):
    cluster = fresh_cluster(environment=ONE, start=False)
    host, port = cluster.spec["worker"][0].rsplit(":", 1)
    with socket.create_server((host, int(port))):
        error = cluster.start_error()
    assert error.type == "UnavailableError" and cluster.spec["worker"][0] in error.message and "another process" in error.message, error


# With other tasks. ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["two ports", "stock gRPC"])
def test_a_task_of_another_kind_is_named(fresh_cluster, other):
    cluster = fresh_cluster(start=False)
    cluster.start("ps", 0, protocol="grpc" if other == "stock gRPC" else None, STARWIRE_PORTS="two")
    cluster.start("worker", 0, **ONE)
    error = attempt(cluster)
    assert isinstance(error, RemoteError) and error.type == "FailedPreconditionError", error
    assert cluster.spec["ps"][0] in error.message and "one port" in error.message, error.message


def test_an_endpoint_map_with_the_same_ports(fresh_cluster, tmp_path):
    cluster = fresh_cluster(start=False, environment=ONE, host="localhost")
    addresses = [address for job in cluster.spec.values() for address in job]
    write_map(tmp_path, [f"{address}={address.replace('localhost', '127.0.0.1')}" for address in addresses])
    cluster.environment["TF_SEASTAR_ENDPOINT_MAP_PATH"] = tmp_path
    for job in cluster.spec:
        cluster.start(job, 0)
    assert worker_call(cluster, steps.run_steps, 5) == 5


def test_an_endpoint_map_with_another_port_is_an_error(fresh_cluster, tmp_path):
    cluster = fresh_cluster(start=False, environment=ONE)
    path = write_map(tmp_path, [f"{job[0]}=127.0.0.1:{free_port()}" for job in cluster.spec.values()])
    error = cluster.start_error(TF_SEASTAR_ENDPOINT_MAP_PATH=tmp_path)
    assert error.type == "InvalidArgumentError" and "STARWIRE_PORTS" in error.message, error
    assert f"{path}:2" in error.message and cluster.spec["worker"][0].rsplit(":", 1)[1] in error.message, error.message


# Unauthenticated peers. ------------------------------------------------------------------------------------------------


def test_with_a_secret_grpc_is_closed(fresh_cluster, tmp_path):
    """A session could read the secret."""
    cluster = fresh_cluster(environment={**ONE, "STARWIRE_SECRET": SECRET})
    client = cluster.runner.task("stock-client", {})
    with training(cluster, tmp_path):
        with pytest.raises(RemoteError) as caught:
            client.call(steps.run_steps, cluster.target("ps", 0), 1, timeout=30)
    assert caught.value.type == "PermissionDeniedError" and "STARWIRE_GRPC=on" in caught.value.message, caught.value
    cluster["ps", 0].wait_for_log("TensorFlow's gRPC is closed on this port (STARWIRE_GRPC=on opens it)")


def test_with_a_secret_grpc_can_be_opened(fresh_cluster):
    cluster = fresh_cluster(environment={**ONE, "STARWIRE_SECRET": SECRET, "STARWIRE_GRPC": "on"})
    client = cluster.runner.task("stock-client", {})
    assert client.call(steps.run_steps, cluster.target("worker", 0), 3) == 3


SERVER = """
import json, os, sys
import tensorflow as tf
tf.load_library(os.environ["STARWIRE_LIBRARY"])
spec, protocol = json.loads(sys.argv[1]), sys.argv[2]
server = tf.distribute.Server(tf.train.ClusterSpec(spec), job_name="ps", task_index=0, protocol=protocol)
print("up", flush=True)
sys.stdin.read()
"""

SCAN = """
import json, socket, sys
host, open_ports = sys.argv[1], []
for port in range(1, 65536):
    with socket.socket() as probe:
        probe.settimeout(1)
        try:
            probe.connect((host, port))
            open_ports.append(port)
        except ConnectionRefusedError:
            pass
print(json.dumps(open_ports))
"""


@pytest.fixture
def two_hosts():
    """Two network namespaces with a cable between them: a name and an address each."""
    names = [f"sw{os.getpid()}{side}" for side in "ab"]
    addresses = ["10.213.7.1", "10.213.7.2"]

    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True, text=True)

    try:
        if os.getuid() != 0 or ip("netns", "add", names[0]).returncode:
            pytest.skip("needs root and iproute2, to make network namespaces")
        assert ip("netns", "add", names[1]).returncode == 0
        cables = [f"{name}v" for name in names]
        made = ip("-n", names[0], "link", "add", cables[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        assert made.returncode == 0, made.stderr
        for name, cable, address in zip(names, cables, addresses):
            for words in (("addr", "add", f"{address}/24", "dev", cable), ("link", "set", cable, "up"), ("link", "set", "lo", "up")):
                done = ip("-n", name, *words)
                assert done.returncode == 0, done.stderr
        yield list(zip(names, addresses))
    except FileNotFoundError:
        pytest.skip("needs iproute2")
    finally:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                ip("netns", "delete", name)


def in_namespace(name, program, *words, **options):
    return ["ip", "netns", "exec", name, sys.executable, "-c", program, *words]


def server_on(host, protocol, environment):
    name, address = host
    spec = {"ps": [f"{address}:2222"]}
    command = in_namespace(name, SERVER, json.dumps(spec), protocol)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment, "CUDA_VISIBLE_DEVICES": "-1"})


@pytest.mark.quick(lambda of: of["ports"] == "one", reason="with two, nothing is promised about others; test_addresses.py trains with two")
@pytest.mark.parametrize("ports", ["one", "two"])
def test_another_host_finds_one_open_port(two_hosts, protocol, ports):
    (here, there) = two_hosts
    with server_on(here, protocol, {"STARWIRE_PORTS": ports}) as server:
        try:
            assert server.stdout.readline() == "up\n"
            scan = subprocess.run(in_namespace(there[0], SCAN, here[1]), capture_output=True, text=True, timeout=120)
            found = json.loads(scan.stdout)
            assert 2222 in found and len(found) == (1 if ports == "one" else 2), (found, scan.stderr)
        finally:
            server.kill()


INTRUDER = """
import os, socket, sys, time
os.setgid(65534), os.setuid(65534)
folder, stop = sys.argv[1:]
print("up", flush=True)
seen = tried = entered = 0
while not os.path.exists(stop):
    for name in os.listdir(folder):
        if not name.startswith("starwire-"):
            continue
        seen += 1
        seen == 1 and print("seen", flush=True)
        path = os.path.join(folder, name, "grpc")
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(path)
                entered += 1
            except PermissionError:
                tried += 1
            except OSError:
                pass
print(seen, tried, entered)
"""


def test_nobody_else_reaches_the_private_socket(fresh_cluster):
    """Another user tries all the time while servers start."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        stop = os.path.join(folder, "stop")
        intruder = subprocess.Popen([sys.executable, "-c", INTRUDER, folder, stop], stdout=subprocess.PIPE, text=True)
        assert intruder.stdout.readline() == "up\n"
        cluster = fresh_cluster(shape=(("ps", 3), ("worker", 1)), environment={**ONE, "TMPDIR": folder})
        assert worker_call(cluster, steps.run_steps, 3) == 3
        # Each start is a short time in which there is something to see.
        while not select.select([intruder.stdout], [], [], 0)[0]:
            cluster["ps", 0].call(stop_and_start, cluster.spec, "ps", 0, cluster.protocol)
        assert intruder.stdout.readline() == "seen\n"
        # No name is left, neither in the directory nor of a socket that could be connected to.
        assert os.listdir(folder) == []
        names = re.findall(rf"{folder}/\S+/grpc", Path("/proc/net/unix").read_text())
        assert names, "TensorFlow's servers listen on unix sockets"
        for name in set(names):
            with socket.socket(socket.AF_UNIX) as client, pytest.raises(FileNotFoundError):
                client.connect(name)
        Path(stop).touch()
        seen, tried, entered = map(int, intruder.communicate(timeout=HANGS)[0].split())
        assert seen > 0 and entered == 0, (seen, tried, entered)
