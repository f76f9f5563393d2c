"""Mutual TLS on the one port of servers: training, statistics, TensorFlow's gRPC, and those who have no certificate or the wrong one."""

import contextlib
import http.client
import shutil
import socket
import ssl
import threading

import numpy as np
import pytest

import steps
from authority import Authority
from cluster import RemoteError, tf, worker_call
from settings import QUICK, TCP
from steps import attempt, training
from waiting import wait_for

pytestmark = [pytest.mark.ours, pytest.mark.skipif(not shutil.which("openssl"), reason="needs the openssl command")]


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "training-ca")


def https_get(address, path, identity=None):
    """Returns status and body; `identity` has the files of the client."""
    context = ssl.create_default_context(cafile=identity and identity["STARWIRE_TLS_CA"])
    context.check_hostname = False
    if identity:
        context.load_cert_chain(identity["STARWIRE_TLS_CERT"], identity["STARWIRE_TLS_KEY"])
    else:
        context.verify_mode = ssl.CERT_NONE
    host, port = address.rsplit(":", 1)
    connection = http.client.HTTPSConnection(host, int(port), timeout=10, context=context)
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.read().decode()


def metric(address, name, identity):
    status, body = https_get(address, "/metrics", identity)
    assert status == 200
    return sum(float(line.rsplit(" ", 1)[1]) for line in body.splitlines() if line.startswith((name + "{", name + " ")))


def test_training_over_one_port(fresh_cluster, authority):
    """Each task has its own certificate, a SPIFFE id, and one for its address."""
    tasks = [(job, index) for job in ("ps", "worker") for index in range(2)]
    identities = {(job, index): authority.issue(f"{job}-{index}", f"URI:spiffe://example.org/train/{job}/{index}") for job, index in tasks}
    names = {"STARWIRE_TLS_PEERS": "spiffe://example.org/train/{job}/{task}"}
    cluster = fresh_cluster(shape=(("ps", 2), ("worker", 2)), environment={**TCP, **names}, per_task=identities)
    assert worker_call(cluster, steps.run_steps, 20) == 20
    ps = cluster.spec["ps"][0]
    scraper = authority.issue("prometheus", "DNS:prometheus")
    assert metric(ps, "starwire_tls_handshakes_total", scraper) >= 1
    assert metric(ps, "starwire_payload_bytes_sent_total", scraper) > 20 * 400_000
    assert metric(ps, "starwire_tls_failures_total", scraper) == 0
    assert https_get(ps, "/healthz", scraper) == (200, "ok\n")
    with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
        https_get(ps, "/metrics")


def test_hosts_and_required_authentication(fresh_cluster, authority):
    """Without STARWIRE_TLS_PEERS, a certificate names the host of the ClusterSpec."""
    identity = authority.issue("here", "IP:127.0.0.1")
    cluster = fresh_cluster(environment={**TCP, **identity, "STARWIRE_REQUIRE_AUTH": "true"})
    assert worker_call(cluster, steps.run_steps, 5) == 5


def test_those_without_a_certificate_are_refused(fresh_cluster, authority, tmp_path):
    identity = authority.issue("here", "IP:127.0.0.1")
    cluster = fresh_cluster(environment={**TCP, **QUICK, **identity})
    client = cluster.runner.task("stock-client", {})
    with training(cluster, tmp_path):
        with pytest.raises(RemoteError) as caught:
            client.call(steps.run_steps, cluster.target("ps", 0), 1, timeout=30)
    assert caught.value.type == "PermissionDeniedError" and "without TLS" in caught.value.message, caught.value
    plain = fresh_cluster(per_task={("ps", 0): {**TCP, **identity}, ("worker", 0): TCP})
    error = attempt(plain)
    assert isinstance(error, RemoteError) and "requires TLS" in error.message, error
    plain = fresh_cluster(per_task={("ps", 0): TCP, ("worker", 0): {**TCP, **identity}})
    error = attempt(plain)
    assert isinstance(error, RemoteError) and "does not use TLS" in error.message, error


def test_foreign_certificates(fresh_cluster, authority, tmp_path):
    ours, theirs = authority.issue("here", "IP:127.0.0.1"), Authority(tmp_path / "foreign-ca").issue("there", "IP:127.0.0.1")
    cluster = fresh_cluster(per_task={("ps", 0): {**TCP, **ours}, ("worker", 0): {**TCP, **theirs}})
    error = attempt(cluster)
    assert isinstance(error, RemoteError) and error.type == "UnauthenticatedError", error
    assert "not issued by a CA" in error.message and "/job:ps/replica:0/task:0" in error.message, error.message


def test_unusable_files_are_named(fresh_cluster, authority):
    cluster = fresh_cluster(start=False, environment=TCP)
    wrong = authority.issue("elsewhere", "IP:10.0.0.1")
    error = cluster.start_error(**wrong)
    assert error.type == "InvalidArgumentError" and "elsewhere.crt" in error.message and "127.0.0.1" in error.message, error
    mixed = {**authority.issue("here", "IP:127.0.0.1"), "STARWIRE_TLS_KEY": wrong["STARWIRE_TLS_KEY"]}
    error = cluster.start_error(**mixed)
    assert error.type == "InvalidArgumentError" and "elsewhere.key" in error.message, error


class Narrow:
    """Passes connections on to `target`, and no more than some bytes in all, until it is opened."""

    def __init__(self, target, most):
        self.target, self.left, self.more = target, most, threading.Event()
        self.is_full = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:{}".format(self.listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                one = self.listener.accept()[0]
                host, port = self.target.rsplit(":", 1)
                other = socket.create_connection((host, int(port)))
                threading.Thread(target=self._pass, args=(one, other, True), daemon=True).start()
                threading.Thread(target=self._pass, args=(other, one, False), daemon=True).start()

    def _pass(self, one, other, counts):
        with contextlib.suppress(OSError), one, other:
            while data := one.recv(1 << 16):
                self.left -= len(data) if counts else 0
                if self.left < 0:
                    self.is_full.set()
                    self.more.wait()
                other.sendall(data)

    def close(self):
        self.more.set()
        self.listener.close()


def step_with_a_large_plan(target, megabytes, stopped):
    """A step whose session is closed when the file `stopped` appears; the server's part of the graph contains a constant of that size. Returns the error."""
    with tf.Graph().as_default() as graph:
        with tf.device("/job:ps/task:0/device:CPU:0"):
            large = tf.constant(np.ones(megabytes << 18, np.float32))
        with tf.device("/job:worker/task:0/device:CPU:0"):
            fed = tf.compat.v1.placeholder(tf.float32, ())
        with tf.device("/job:ps/task:0/device:CPU:0"):
            product = tf.reduce_sum(large * fed)
        with tf.device("/job:worker/task:0/device:CPU:0"):
            result = tf.identity(product)
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.compat.v1.Session(target, graph=graph, config=config) as session:
        session.run(fed, {fed: 1.0})

        def close():
            wait_for(stopped)
            session.close()

        threading.Thread(target=close, daemon=True).start()
        try:
            session.run(result, {fed: 1.0})
        except tf.errors.OpError as error:
            return type(error).__name__


def test_a_plan_outlives_its_kernel(request, fresh_cluster, authority, tmp_path):
    """The network stops while a worker sends a plan, which is encrypted piece by piece. Its session is closed, and the network goes on."""
    settings = {**TCP, **authority.issue("all", "DNS:localhost", "IP:127.0.0.1"), "STARWIRE_KEEPALIVE": "timeout_ms=60000"}
    cluster = fresh_cluster(protocol="star_server", environment=settings, start=False)
    server = cluster.start("ps", 0)
    narrow = Narrow(cluster.spec["ps"][0], 20 << 20)
    request.addfinalizer(narrow.close)
    worker = cluster.start("worker", 0, spec={**cluster.spec, "ps": [narrow.address]})
    stopped = tmp_path / "stopped"
    worker.begin(step_with_a_large_plan, cluster.target("worker", 0), 100, str(stopped))
    assert narrow.is_full.wait(60), "the plan does not arrive"
    stopped.touch()
    assert worker.result(60) == "CancelledError"
    narrow.more.set()
    assert worker_call(cluster, steps.run_steps, 3) == 3
    assert worker.poll() is None and server.poll() is None, worker.log()
