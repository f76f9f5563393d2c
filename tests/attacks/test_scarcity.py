"""Servers whose process may have no more threads, descriptors or disk: at the start, while they run, and when they stop."""

import contextlib
import os
import random
import re
import resource
import select
import signal
import struct
import sys
from pathlib import Path

import client
import cluster as harness
import protobuf
import pytest
import scarcity
import steps
import wire
from cluster import RemoteError, TaskDied, state, tf

needs_root = pytest.mark.skipif(
    os.getuid() != 0 or os.environ.get("STARWIRE_TEST_PROOF") == "tls", reason="needs root, to become another user, who cannot read root's certificates, or to mount"
)
# What TensorFlow and gRPC log before they abort.
OF_TENSORFLOW = ("env.cc", "thd.cc", "Check failed: ret == 0")


@pytest.fixture
def cluster(runner):
    """A parameter server, and a worker; neither is started."""
    with harness.Cluster(runner, "star_server", {"ps": 1, "worker": 1}, start=False) as made:
        yield made


def target_of(cluster):
    proof = cluster.runner._proof
    address = cluster.spec["ps"][0]
    certificates = proof if "STARWIRE_TLS_CERT" in proof else {}
    return client.Target(address, address, "/job:ps/replica:0/task:0", cluster.protocol, proof.get("STARWIRE_SECRET", ""), "", "127.0.0.1", certificates)


def healthy(target):
    with contextlib.suppress(OSError):
        return wire.http_get(target.address, "/healthz", tls=target.tls(protocols=()))[0] == 200


def import_starwire():
    """Takes descriptors."""
    sys.path.insert(0, str(harness.ROOT / "python"))
    import starwire  # noqa: F401


def stop_server():
    import starwire

    starwire.stop(state["server"])


def start_within(kind, used, more, arguments):
    """Makes a server in a process that may have `more` than it has. Returns what the server took."""
    harness.load(arguments[3])
    before = used()
    scarcity.limit(kind, before + more)
    try:
        harness.start_server(*arguments)
    finally:
        scarcity.limit(kind)
    return used() - before


def attempt(cluster, kind, used, more, uid=None):
    """Returns what the server took, or the error; and its task."""
    task = cluster.process("ps", 0)
    if uid:
        task.call(scarcity.become, uid + more)
    arguments = cluster.spec, "ps", 0, cluster.protocol
    try:
        return task.call(start_within, kind, used, more, arguments), task
    except RemoteError as error:
        return error, task
    except TaskDied as error:
        task.expected_exit = -signal.SIGABRT
        task.allow_scary = OF_TENSORFLOW
        return error, task


def new_uid():
    return 100_000 + random.randrange(1 << 30)


@needs_root
def test_start_without_threads(cluster):
    """TensorFlow aborts where it gets none. starwire says so, and the server can be made later."""
    most, task = attempt(cluster, resource.RLIMIT_NPROC, scarcity.threads, 1000, new_uid())
    task.kill()
    uid = new_uid()
    for more in range(most - 3, most - 13, -1):
        outcome, task = attempt(cluster, resource.RLIMIT_NPROC, scarcity.threads, more, uid)
        if isinstance(outcome, RemoteError):
            break
        assert not isinstance(outcome, TaskDied) or any(words in task.full_log() for words in OF_TENSORFLOW), task.log()
        task.kill()
    assert outcome.type == "UnavailableError" and "cannot start reactor thread" in outcome.message, outcome
    assert task.call(harness.start_server, cluster.spec, "ps", 0, cluster.protocol)


def test_start_without_descriptors(cluster):
    most, task = attempt(cluster, resource.RLIMIT_NOFILE, scarcity.descriptors, 100)
    task.kill()
    for more in (1, most - 4, most - 2):
        outcome, task = attempt(cluster, resource.RLIMIT_NOFILE, scarcity.descriptors, more)
        assert isinstance(outcome, RemoteError) and "Too many open files" in outcome.message, (more, most, outcome)
        assert task.call(harness.start_server, cluster.spec, "ps", 0, cluster.protocol)
        task.kill()


def start_on_full_disks(folders, spec, job, index, protocol):
    harness.load(protocol)
    scarcity.fill_disks(folders)
    state["server"] = tf.distribute.Server(tf.train.ClusterSpec(spec), job_name=job, task_index=index, protocol=protocol)


@needs_root
@pytest.mark.parametrize("full", [("/dev/shm", "/var/tmp"), ("/tmp", "/dev/shm", "/var/tmp")], ids=["but one", "all"])
def test_start_without_disk(cluster, full, tmp_path):
    """The private socket of TensorFlow's gRPC needs a directory."""
    task = cluster.process("ps", 0, TMPDIR=tmp_path)
    start = lambda: task.call(start_on_full_disks, [str(tmp_path), *full], cluster.spec, "ps", 0, cluster.protocol)  # noqa: E731
    if "/tmp" not in full:
        return start()
    with pytest.raises(RemoteError, match="found no directory for the private socket") as caught:
        start()
    assert all(f"{folder}: No space left on device" in caught.value.message for folder in full), caught.value


# While a server runs.


def lose_the_log():
    """What is written there meets a full disk."""
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.dup2(full, 2)


def test_log_on_a_full_disk(cluster):
    ps = cluster.start("ps", 0)
    cluster.start("worker", 0)
    ps.call(lose_the_log)
    target, size = target_of(cluster), ps.log_size()
    assert harness.worker_call(cluster, steps.run_steps, 3) == 3
    for _ in range(3):
        with wire.Peer(target.address) as peer:
            peer.send(b"garbage" * 10)
            assert peer.wait_closed()
    assert ps.log_size() == size and healthy(target)
    assert harness.worker_call(cluster, steps.run_steps, 3, name="again") == 3


@needs_root
def test_no_more_threads(cluster):
    """Members are served; who needs a thread is refused, in one line, and gets it later."""
    uid = new_uid()
    for job in ("ps", "worker"):
        cluster.process(job, 0).call(scarcity.become, uid)
        cluster[job, 0].call(harness.start_server, cluster.spec, job, 0, cluster.protocol)
    ps, target = cluster["ps", 0], target_of(cluster)
    assert harness.worker_call(cluster, steps.run_steps, 3) == 3  # TensorFlow starts threads with the first graph
    size = ps.log_size()
    ps.call(scarcity.limit, resource.RLIMIT_NPROC, 1)
    # With proof, gRPC between tasks has started the thread of the control service already.
    refused = sum(not healthy(target) for _ in range(2))
    assert refused == 2 or cluster.runner._proof
    with client.Member(target) as member:
        plan = member.known_plan()
        assert member.star(plan, [client.floats(16)]).code == 0
    assert harness.worker_call(cluster, steps.run_steps, 3, name="again") == 3
    lines = [line for line in ps.full_log()[size:].splitlines() if "starwire" in line]
    assert len(lines) == (refused > 0) and all("cannot start the thread of the control service" in line for line in lines), lines
    ps.call(scarcity.limit, resource.RLIMIT_NPROC)
    assert healthy(target)


def test_no_more_descriptors(cluster):
    """Steps go on; newcomers are served as soon as there are some."""
    ps, worker = cluster.start("ps", 0), cluster.start("worker", 0)
    target = target_of(cluster)
    assert harness.worker_call(cluster, steps.run_steps, 3) == 3
    size = ps.log_size()
    ps.call(scarcity.limit, resource.RLIMIT_NOFILE, 3)
    with target.connect(30) as newcomer:
        ps.wait_for_log("cannot accept a connection", start=size)
        assert harness.worker_call(cluster, steps.run_steps, 3, name="again") == 3
        ps.call(scarcity.limit, resource.RLIMIT_NOFILE)
        if not target.certificates:
            newcomer.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert newcomer.recv(64).startswith(b"HTTP/1.1 200")
    with client.Member(target) as member:
        assert member.devices()
    # The other side: a worker that cannot connect says why, and does later.
    ps.call(import_starwire)
    ps.call(stop_server)
    worker.call(scarcity.limit, resource.RLIMIT_NOFILE, 3)
    ps.call(harness.start_server, cluster.spec, "ps", 0, cluster.protocol)
    worker.begin(steps.run_steps, cluster.target("worker", 0), 3, name="later")
    worker.wait_for_log("Too many open files")
    lift(worker, resource.RLIMIT_NOFILE)
    assert worker.result() == 3


def lift(task, kind):
    """For a task that is busy."""
    hard = resource.prlimit(task.pid, kind)[1]
    resource.prlimit(task.pid, kind, (hard, hard))


MIB = 1 << 20
RESOURCE_EXHAUSTED = 8


def send_large(target, method, meta):
    """A call with a gigabyte, of which as much is sent as the server takes. Returns the code of its answer."""
    with client.Member(target, timeout=30) as member:
        ident, piece = member.new_id(), bytes(4 * MIB)
        if method == client.STAR_CALL:
            described = client.entry(protobuf.FLOAT, client.PLAIN_ENCODING, (256 * MIB,), b"", length=1 << 30)[0]
            meta = client.star_head(member.known_plan()) + struct.pack("<II", 1, 0) + described
            ident = member.new_id()
        control = wire.frame(wire.CALL, code=method, ident=ident, fixed=struct.pack("<IIQ", 0, 1, 1 << 30 | client.BULK), meta=meta)
        for _ in range(256):
            member.send_block(control + wire.frame(wire.DATA, ident=ident, fixed=struct.pack("<Q", len(piece))), piece)
            control = b""
            if select.select([member.socket], [], [], 0)[0]:
                break
        return member.answer(ident).code


def test_no_more_memory(cluster):
    """A tensor that has no room is the error of its sender."""
    ps = cluster.start("ps", 0)
    cluster.start("worker", 0)
    target = target_of(cluster)
    assert harness.worker_call(cluster, steps.run_steps, 3) == 3
    used = int(re.search(r"VmSize:\s+(\d+)", Path(f"/proc/{ps.pid}/status").read_text())[1]) << 10
    resource.prlimit(ps.pid, resource.RLIMIT_AS, (used + 192 * MIB, resource.RLIM_INFINITY))
    for method in (client.STAR_CALL, client.LOGGING):
        assert send_large(target, method, bytes(32) if target.secret else b"") == RESOURCE_EXHAUSTED, method
    assert harness.worker_call(cluster, steps.run_steps, 3, name="again") == 3
    lift(ps, resource.RLIMIT_AS)
    assert healthy(target), ps.log()


@pytest.mark.parametrize("kind, least", [(resource.RLIMIT_NOFILE, 3), pytest.param(resource.RLIMIT_NPROC, 1, marks=needs_root)], ids=["descriptors", "threads"])
def test_stop_without(cluster, kind, least):
    """A server that cannot stop as it should still leaves its port to the next one. Once it can, it is stopped."""
    ps, target = cluster.process("ps", 0), target_of(cluster)
    if kind == resource.RLIMIT_NPROC:
        ps.call(scarcity.become, new_uid())
    start = lambda: ps.call(harness.start_server, cluster.spec, "ps", 0, cluster.protocol)  # noqa: E731
    start()
    ps.call(import_starwire)
    ps.call(scarcity.limit, kind, least)
    try:
        ps.call(stop_server)
        stopped = True
    except RemoteError as error:
        stopped = False
        assert "cannot start a thread to shut down" in error.message, error
    ps.call(scarcity.limit, kind)
    threads = len(os.listdir(f"/proc/{ps.pid}/task"))
    ps.call(stop_server)
    assert stopped or len(os.listdir(f"/proc/{ps.pid}/task")) < threads
    with pytest.raises(ConnectionRefusedError):
        target.connect().close()
    start()
    assert healthy(target)
