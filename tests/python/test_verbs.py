"""grpc+verbs: training over queue pairs, of the fake libibverbs (`tests/verbs/fake`) or, with STARWIRE_TEST_REAL_VERBS=1, of the machine's first RDMA device."""

import os
import subprocess

import pytest

import steps
from cluster import ROOT
from test_failure import wait_for, wait_until, worker_call
from test_security import data_port, metric
from test_training import train

pytestmark = pytest.mark.ours


def fake_library():
    path = os.environ.get("STARWIRE_TEST_VERBS_LIBRARY")
    if path is None:
        subprocess.run(["cargo", "build", "--quiet", "--example", "ibverbs"], cwd=ROOT, check=True, timeout=1200)
        path = str(ROOT / "target" / "debug" / "examples" / "libibverbs.so")
    assert os.path.exists(path), path
    return path


@pytest.fixture(scope="module")
def environment():
    """Tasks of one host would prefer a unix socket."""
    common = {"STARWIRE_UNIX": "off", "STARWIRE_VERBS_FALLBACK": "false"}
    return common if os.environ.get("STARWIRE_TEST_REAL_VERBS") else {**common, "STARWIRE_VERBS_LIBRARY": fake_library()}


def test_training_gives_the_same_bits_as_grpc(fresh_cluster, environment):
    shape = (("ps", 2), ("worker", 2))
    ours = worker_call(fresh_cluster(shape, protocol="grpc+verbs", environment=environment), train, "adam", True)
    theirs = worker_call(fresh_cluster(shape, protocol="grpc"), train, "adam", True)
    assert ours == theirs


def test_the_bytes_go_over_rdma(fresh_cluster, environment):
    """Counted on both sides: what the worker's device read is what the ps offered, and no connection of theirs carries data over TCP."""
    cluster = fresh_cluster(protocol="grpc+verbs", environment=environment)
    ps, worker = (data_port(cluster[job, 0]) for job in ("ps", "worker"))
    assert worker_call(cluster, steps.run_steps, 3) == 3
    read, received, sent = (metric(worker, f"starwire_{name}_total") for name in ("verbs_read_bytes", "payload_bytes_received", "bytes_sent"))
    before = [[metric(task, f"starwire_verbs_{name}_total") for name in ("registrations", "registrations_reused")] for task in (ps, worker)]
    assert worker_call(cluster, steps.run_steps, 20) == 20
    read, received = metric(worker, "starwire_verbs_read_bytes_total") - read, metric(worker, "starwire_payload_bytes_received_total") - received
    assert read >= 20 * 400_000 and read >= 0.9 * received, (read, received)
    assert metric(ps, "starwire_verbs_offered_bytes_total") >= read
    for task, (made, reused) in zip((ps, worker), before):
        assert metric(task, "starwire_verbs_registrations_reused_total") - reused >= 20
        assert metric(task, "starwire_verbs_registrations_total") - made <= 10, "tensors lie in memory that stays registered"
    assert metric(ps, "starwire_verbs_read_bytes_total") > 0, "gradients go the other way"
    for task in (ps, worker):
        assert metric(task, "starwire_verbs_fallbacks_total") == 0
        # One in each direction, and each side counts both.
        assert metric(task, "starwire_verbs_connections_total") >= 1
        assert metric(task, "starwire_verbs_connections_total") == metric(task, "starwire_connects_total") + metric(task, "starwire_accepts_total")
    cluster["ps", 0].wait_for_log("with RDMA (")


def test_a_killed_ps_is_noticed_and_its_next_life_is_found(fresh_cluster, environment, tmp_path):
    cluster = fresh_cluster(protocol="grpc+verbs", environment=environment)
    log = str(tmp_path / "steps")
    cluster["worker", 0].begin(steps.recover_monitored, cluster.target("worker", 0), str(tmp_path / "checkpoints"), 100, log)
    wait_until(lambda: os.path.exists(log) and any(int(line) >= 30 for line in open(log).read().split()), 60, "step 30")
    cluster["ps", 0].kill()
    cluster.start("ps", 0)
    seen, sessions = cluster["worker", 0].result(120)
    assert seen[-1] >= 100 and len(sessions) >= 2


def test_a_step_that_is_under_way_ends_when_the_ps_is_killed(fresh_cluster, environment, tmp_path):
    cluster = fresh_cluster(protocol="grpc+verbs", environment=environment)
    started = str(tmp_path / "started")
    cluster["worker", 0].begin(steps.run_until_error, cluster.target("worker", 0), started)
    wait_for(started)
    cluster["ps", 0].kill()
    error, message, _ = cluster["worker", 0].result(30)
    assert error in ("UnavailableError", "AbortedError"), message
    assert "/job:ps/replica:0/task:0" in message, message


def test_without_a_device_tcp_is_used_and_one_line_says_so(fresh_cluster):
    environment = {"STARWIRE_UNIX": "off", "STARWIRE_VERBS_LIBRARY": "/nonexistent/libibverbs.so.1"}
    cluster = fresh_cluster(protocol="grpc+verbs", environment=environment)
    assert worker_call(cluster, steps.run_steps, 3) == 3
    log = cluster["ps", 0].wait_for_log("using TCP (STARWIRE_VERBS_FALLBACK)")
    assert log.count("cannot be loaded") == 1
    assert metric(data_port(cluster["ps", 0]), "starwire_verbs_fallbacks_total") >= 1
