"""grpc+verbs: training over queue pairs of the fake libibverbs (`crates/engine/tests/verbs/fake`) or, with STARWIRE_TEST_REAL_VERBS=1, of the first real RDMA device."""

import hashlib
import os
import subprocess
import time

import pytest

import steps
from cluster import ROOT, start_server, tf, worker_call
from compared import EAGER_FUSE
from metrics import data_port, metric
from steps import fork_with_server
from training_job import train
from waiting import wait_for, wait_until

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
    """Unix sockets are off, because tasks on one host would prefer them."""
    common = {"STARWIRE_UNIX": "off", "STARWIRE_VERBS_FALLBACK": "false"}
    return common if os.environ.get("STARWIRE_TEST_REAL_VERBS") else {**common, "STARWIRE_VERBS_LIBRARY": fake_library()}


def test_training_gives_the_same_bits_as_grpc(fresh_cluster, environment):
    shape = (("ps", 2), ("worker", 2))
    ours = worker_call(fresh_cluster(shape, protocol="grpc+verbs", environment=environment), train, "adam", True)
    theirs = worker_call(fresh_cluster(shape, protocol="grpc"), train, "adam", True)
    assert ours == theirs


def test_the_bytes_go_over_rdma(fresh_cluster, environment):
    """Metrics on both sides: the worker's device reads what the ps offers, and no connection carries data over TCP."""
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
        # Connections in either direction count on both sides.
        assert metric(task, "starwire_verbs_connections_total") >= 1
        assert metric(task, "starwire_verbs_connections_total") == metric(task, "starwire_connects_total") + metric(task, "starwire_accepts_total")
    cluster["ps", 0].wait_for_log("with RDMA (")


def test_star_calls_cost_no_copy_and_no_registration(fresh_cluster, environment):
    """The payloads of calls are read into memory that stays registered, on both sides."""
    cluster = fresh_cluster(protocol="star_server", environment={**environment, "STARWIRE_TRANSPORT": "verbs"})
    ps, worker = (data_port(cluster[job, 0]) for job in ("ps", "worker"))
    assert worker_call(cluster, steps.run_steps, 3) == 3
    names = ("verbs_read_bytes", "verbs_registrations", "copied_bytes_sent", "copied_bytes_received")
    before = {task: [metric(task, f"starwire_{name}_total") for name in names] for task in (ps, worker)}
    assert worker_call(cluster, steps.run_steps, 20) == 20
    for task in (ps, worker):
        read, made, *copied = (metric(task, f"starwire_{name}_total") - old for name, old in zip(names, before[task]))
        assert read >= 20 * 400_000, (task, read)
        assert made <= 10, (task, made)
        assert all(bytes < 400_000 for bytes in copied), (task, copied)
        assert metric(task, "starwire_verbs_fallbacks_total") == 0


def mixed_sizes(target, count):
    """Variables of 12 bytes to 1.2 MB on two ps, pulled and pushed by a worker; returns a digest of all of them after each step."""
    import numpy as np

    one, rng, digests = tf.compat.v1, np.random.default_rng(5), []
    with tf.Graph().as_default():
        variables, pushed = [], []
        for i, size in enumerate((3, 1_000, 20_000, 100_000, 300_001, 50, 17_000)):
            with tf.device(f"/job:ps/task:{i % 2}"):
                kind = np.float64 if i % 3 == 1 else np.float32
                variable = one.get_variable(f"mixed{i}", initializer=rng.normal(size=size).astype(kind), use_resource=i % 2 == 0)
            with tf.device("/job:worker/task:0"):
                pulled = variable.read_value()
                gradient = tf.sin(pulled) * 0.25 + tf.reduce_sum(pulled[:3])
            with tf.device(f"/job:ps/task:{i % 2}"):
                pushed.append(one.assign_sub(variable, gradient))
            variables.append(variable)
        push, initializer = tf.group(*pushed), one.global_variables_initializer()
        with one.Session(target) as session:
            session.run(initializer)
            for _ in range(count):
                session.run(push)
                values = session.run(variables)
                digests.append(hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest())
    return digests


@pytest.fixture(scope="module")
def stock_digests(runner):
    from cluster import Cluster

    with Cluster(runner, "grpc", {"ps": 2, "worker": 1}) as cluster:
        return worker_call(cluster, mixed_sizes, 5)


@pytest.mark.parametrize(
    "protocol, more",
    [("grpc+verbs", {}), ("grpc+verbs", EAGER_FUSE), ("grpc++", {}), ("star_server", {}), ("star_server_lite", {})],
    ids=["grpc+verbs", "grpc+verbs-fused", "grpc++", "star_server", "star_server_lite"],
)
def test_tensors_of_all_sizes_have_the_same_bits_as_with_grpc(fresh_cluster, environment, stock_digests, protocol, more):
    transport = {} if protocol == "grpc+verbs" else {"STARWIRE_TRANSPORT": "verbs"}
    cluster = fresh_cluster((("ps", 2), ("worker", 1)), protocol=protocol, environment={**environment, **transport, **more})
    assert worker_call(cluster, mixed_sizes, 5) == stock_digests
    for task in (("ps", 0), ("ps", 1), ("worker", 0)):
        address = data_port(cluster[task])
        assert metric(address, "starwire_verbs_read_bytes_total") >= 5 * 80_000, task
        assert metric(address, "starwire_verbs_fallbacks_total") == 0
        assert metric(address, "starwire_verbs_connections_total") == metric(address, "starwire_connects_total") + metric(address, "starwire_accepts_total")


def limit_locked_memory(kib):
    import resource

    resource.setrlimit(resource.RLIMIT_MEMLOCK, (kib << 10, kib << 10))


def run_large_steps(target, count):
    """Tensors of 1.6 MB."""
    with tf.Graph().as_default():
        model = steps.Model(large=400_000)
        with tf.compat.v1.Session(target) as session:
            session.run(model.initializer)
            for _ in range(count):
                model.check(session.run(model.sums))
    return model.steps


@pytest.mark.parametrize("kib, fits", [(64, "nothing"), (2600, "buffers")])
def test_too_little_locked_memory_costs_speed_and_nothing_else(fresh_cluster, environment, kib, fits):
    """64 KiB are too little for a queue pair: TCP, with one log line. 2,600 KiB hold the buffers of two, but not a tensor as well: tensors are copied."""
    if os.environ.get("STARWIRE_TEST_REAL_VERBS"):
        pytest.skip("root may lock what it likes")
    cluster = fresh_cluster(protocol="grpc+verbs", environment={**environment, "STARWIRE_VERBS_FALLBACK": "true", "FAKE_VERBS": "fake0:memlock"}, start=False)
    for job in ("ps", "worker"):
        task = cluster.process(job, 0)
        task.call(limit_locked_memory, kib)
        task.call(start_server, cluster.spec, job, 0, "grpc+verbs", timeout=120)
    assert worker_call(cluster, run_large_steps, 5) == 5
    worker = data_port(cluster["worker", 0])
    if fits == "nothing":
        log = cluster["worker", 0].wait_for_log("using TCP")
        assert log.count(f"raise the locked-memory limit of {kib} KiB (ulimit -l") >= 1
        assert metric(worker, "starwire_verbs_connections_total") == 0
    else:
        assert metric(worker, "starwire_verbs_connections_total") == 2
        assert metric(worker, "starwire_verbs_registration_failures_total") > 0
        assert metric(worker, "starwire_verbs_copied_bytes_total") >= 5 * 1_600_000


def test_a_fork_leaves_the_parents_queue_pairs_alone(fresh_cluster, environment):
    """The child cannot use them and exits without harm; the parent's memory stays registered."""
    cluster = fresh_cluster(protocol="grpc+verbs", environment=environment)
    assert worker_call(cluster, steps.run_steps, 3) == 3
    worker = data_port(cluster["worker", 0])
    before = metric(worker, "starwire_verbs_connections_total")
    assert cluster["worker", 0].call(fork_with_server, "grpc+verbs", cluster.spec) == [7, 7, 8]
    assert worker_call(cluster, steps.run_steps, 5) == 5, "the parent goes on"
    assert metric(worker, "starwire_verbs_connections_total") == before and metric(worker, "starwire_losses_total") == 0


def test_a_ps_that_dies_while_it_is_read_is_noticed_at_once(fresh_cluster, environment, tmp_path):
    """Even if the worker's device would retry without end, as soft-RoCE does: not by keepalive, which is off."""
    if os.environ.get("STARWIRE_TEST_REAL_VERBS"):
        pytest.skip("a real device loses nothing on demand")
    environment = {**environment, "STARWIRE_KEEPALIVE": "after_ms=3600000"}
    cluster = fresh_cluster(protocol="grpc+verbs", environment=environment, per_task={("worker", 0): {"FAKE_VERBS": "fake0:lost@20"}})
    started = str(tmp_path / "started")
    cluster["worker", 0].begin(steps.run_until_error, cluster.target("worker", 0), started)
    wait_for(started)
    worker = data_port(cluster["worker", 0])
    wait_until(lambda: metric(worker, "starwire_verbs_reads_total") == 20, 60, "the READ that nobody answers")
    time.sleep(1)  # nothing may happen in this time: keepalive is off, and the device does not give up
    assert metric(worker, "starwire_verbs_reads_total") == 20 and not cluster["worker", 0].ready()
    cluster["ps", 0].kill()
    error, message, _ = cluster["worker", 0].result(60)
    assert error in ("UnavailableError", "AbortedError"), message


def test_a_killed_ps_is_noticed_and_its_next_incarnation_is_found(fresh_cluster, environment, tmp_path):
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
    assert log.count("RDMA: cannot load") == 1
    assert metric(data_port(cluster["ps", 0]), "starwire_verbs_fallbacks_total") >= 1
