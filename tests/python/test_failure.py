"""Processes that die, stop, hang, leave and return. Whatever must be noticed without waiting is noticed although keep-alive would take an hour."""

import os
import signal

import pytest

import steps
import zygote
from cluster import ROOT, RemoteError, is_stock, is_tensorflow_1, library_path, load, start_server, state, tf, worker_call
from metrics import counters
from steps import fork_with_server
from waiting import HANGS, wait_for, wait_until


REASON = "the two kinds of star calls differ in what a call contains, not in how tasks lose each other"
ONE_KIND = pytest.mark.quick(lambda of: of["protocol"] != "star_server_lite", reason=REASON)
# A death that is noticed within a test's patience is then not noticed by keep-alive.
NO_KEEPALIVE = {"STARWIRE_KEEPALIVE": "after_ms=3600000"}
LOST = ("Socket closed", "Connection reset by peer", "failed to connect to all addresses")


@pytest.mark.star
@ONE_KIND
@pytest.mark.parametrize("blocked", [False, True], ids=["busy", "blocked"])
def test_ps_killed_mid_step(fresh_cluster, protocol, tmp_path, blocked):
    """SIGKILL of the ps: the step ends with Unavailable or Aborted, and not by keep-alive. (Stock gRPC of TensorFlow 1 takes minutes.)"""
    # Once as stock gRPC does it.
    with_stock = protocol == "grpc++" and not is_tensorflow_1() and not os.environ.get("STARWIRE_TEST_PROOF")
    for kind in (protocol, "grpc") if with_stock else (protocol,):
        cluster = fresh_cluster(protocol=kind, environment=NO_KEEPALIVE)
        started = str(tmp_path / f"started-{kind}")
        cluster["worker", 0].begin(steps.run_until_error, cluster.target("worker", 0), started, blocked)
        wait_for(started)
        cluster["ps", 0].kill()
        error, message, _ = cluster["worker", 0].result(60)
        assert error in ("UnavailableError", "AbortedError"), message
        if not is_stock(kind):
            assert "/job:ps/replica:0/task:0" in message, message
            # The words by which programs, and TensorFlow's own tests, recognise the loss of a peer over gRPC.
            assert error == "AbortedError" or any(words in message for words in LOST), message
            # Closing the session does not wait for the dead (over stock gRPC it does).
            cluster["worker", 0].call(steps.close_failed_session)


@pytest.mark.star
@ONE_KIND
def test_training_recovers_from_its_checkpoint(fresh_cluster, protocol, tmp_path):
    """The ps is killed and restarted twice under MonitoredTrainingSession: training resumes from the last checkpoint and finishes."""
    cluster = fresh_cluster()
    log = str(tmp_path / "steps")
    cluster["worker", 0].begin(steps.recover_monitored, cluster.target("worker", 0), str(tmp_path / "checkpoints"), 400, log)
    for kill_at in (60, 200):
        wait_until(lambda: os.path.exists(log) and any(int(line) >= kill_at for line in open(log).read().split()), 60, f"step {kill_at}")
        before = failed_connects(cluster)
        cluster["ps", 0].kill()
        if not is_stock(protocol):
            wait_until(lambda: failed_connects(cluster) > before, 60, "the worker looks for the dead ps")
        cluster.start("ps", 0)
    seen, sessions = cluster["worker", 0].result(120)
    assert seen[-1] >= 400
    assert len(sessions) >= 3 and sessions[0] == 0, sessions
    assert all(step % 20 == 0 for step in sessions), f"each session begins at a checkpoint: {sessions}"
    for previous, step in zip(seen, seen[1:]):
        assert step == previous + 1 or (step <= previous + 1 and step - 1 in sessions), f"{previous} was followed by {step}, sessions began at {sessions}"


def failed_connects(cluster):
    return 0 if is_stock(cluster.protocol) else counters(cluster["worker", 0])["connect_failures"]


# The defaults would take 20 s.
KEEPALIVE = {"STARWIRE_KEEPALIVE": "after_ms=400,timeout_ms=4000"}


@pytest.mark.star
@ONE_KIND
@pytest.mark.ours
@pytest.mark.parametrize("unix", ["auto", "off"])
def test_stopped_ps_is_detected(fresh_cluster, tmp_path, unix):
    """SIGSTOP, which looks like a half-open connection: Unavailable within the keepalive limit; after SIGCONT, the same session works again."""
    cluster = fresh_cluster(environment={**KEEPALIVE, "STARWIRE_UNIX": unix})
    started = str(tmp_path / "started")
    cluster["worker", 0].begin(steps.run_until_error, cluster.target("worker", 0), started)
    wait_for(started)
    cluster["ps", 0].stop()
    try:
        error, message, _ = cluster["worker", 0].result(60)
        assert counters(cluster["worker", 0])["keepalive_losses"] > 0, "it is keep-alive that has noticed"
    finally:
        cluster["ps", 0].resume()
    assert error in ("UnavailableError", "AbortedError"), message
    assert worker_call(cluster, steps.run_steps, 5) == 5


@pytest.mark.ours
def test_long_step_is_not_mistaken_for_a_dead_peer(fresh_cluster, tmp_path):
    """A step that takes twice the keepalive limit without transferring a byte does not fail."""
    cluster = fresh_cluster(environment=KEEPALIVE)
    started = str(tmp_path / "started")
    cluster["worker", 0].begin(steps.run_until_error, cluster.target("worker", 0), started, True)
    wait_for(started)
    # Nothing may happen in this time: 4.4 s would be enough for a loss.
    assert not cluster["worker", 0].ready(9)
    assert not any(counters(task)["keepalive_losses"] for task in cluster.tasks.values())


@pytest.mark.star
@ONE_KIND
def test_operation_timeout(fresh_cluster, tmp_path):
    cluster = fresh_cluster()
    started = str(tmp_path / "started")
    cluster["worker", 0].begin(steps.run_until_error, cluster.target("worker", 0), started, True, 5000)
    wait_for(started)
    error, message, took = cluster["worker", 0].result(90)
    assert error == "DeadlineExceededError", message
    assert took > 1
    assert worker_call(cluster, steps.run_steps, 5) == 5


@pytest.mark.star
@ONE_KIND
@pytest.mark.parametrize("how, expected", [("close", "CancelledError"), ("timeout", "DeadlineExceededError")])
def test_blocked_step_is_ended(fresh_cluster, how, expected):
    """By closing the session from another thread, or by RunOptions.timeout_in_ms. The waiting dequeue on the ps is cancelled: the next session works."""
    cluster = fresh_cluster()
    error, done = worker_call(cluster, steps.end_from_another_thread, how, timeout=60)
    assert error[0] == expected, error
    assert done == 5


@pytest.mark.star
@ONE_KIND
def test_worker_killed_others_go_on(fresh_cluster, protocol, tmp_path):
    """One of two workers dies mid-step and the other is unaffected; the ps drops the dead worker's state."""
    cluster = fresh_cluster(shape=(("ps", 1), ("worker", 2)))
    ps, survivor, victim = cluster["ps", 0], cluster["worker", 0], cluster["worker", 1]
    stop = str(tmp_path / "stop")
    survivor.begin(steps.run_until_stopped, cluster.target("worker", 0), stop, 0, "survivor")
    wait_for(stop + ".started")
    for blocked in (False, True):
        started = str(tmp_path / f"started-{blocked}")
        victim.begin(steps.run_until_error, cluster.target("worker", 1), started, blocked, 0, 1)
        wait_for(started)
        victim.kill()
        victim = cluster.start("worker", 1)
    open(stop, "w").close()
    count, longest = survivor.result(60)
    assert count > 50 and longest < HANGS
    if not is_stock(protocol):
        ps.wait_for_log("sessions of its previous incarnation")
        sockets = ps.call(steps.open_sockets)
        for number in range(3):
            victim.kill()
            victim = cluster.start("worker", 1)
            assert victim.call(steps.run_steps, cluster.target("worker", 1), 5, 1, "again") == 5
        wait_until(lambda: ps.call(steps.open_sockets) <= sockets + 4, 30, "the connections of dead workers are closed")


@pytest.mark.star
@ONE_KIND
def test_restarted_peer_is_a_new_one(fresh_cluster, protocol):
    """The ps is replaced between two steps: the old session ends with Aborted or Unavailable (its variables are gone), a new one in the same worker works."""
    cluster = fresh_cluster()
    worker = cluster["worker", 0]
    assert worker.call(steps.keep_session, cluster.target("worker", 0))
    for _ in range(2):
        cluster["ps", 0].kill()
        cluster.start("ps", 0)
        with pytest.raises(RemoteError) as caught:
            worker.call(steps.use_kept_session)
        assert caught.value.type in ("AbortedError", "UnavailableError"), caught.value
        assert worker_call(cluster, steps.run_steps, 10) == 10
        assert worker.call(steps.keep_session, cluster.target("worker", 0))
        assert worker.call(steps.use_kept_session) == 2


def test_ps_that_starts_late(fresh_cluster, protocol):
    """A session waits for tasks that start later, as in stock TensorFlow."""
    cluster = fresh_cluster(start=False)
    cluster.start("worker", 0)
    cluster["worker", 0].begin(steps.run_steps, cluster.target("worker", 0), 5)
    if not is_stock(protocol):
        wait_until(lambda: failed_connects(cluster) > 1, 60, "the worker looks for the ps, and again")
    assert not cluster["worker", 0].ready(1 if is_stock(protocol) else 0)  # stock gRPC does not say when it has looked
    cluster.start("ps", 0)
    assert cluster["worker", 0].result(60) == 5


@pytest.mark.ours
def test_server_again_in_one_process(fresh_cluster, protocol, runner):
    """A server is created and stopped repeatedly on the same address without leaking threads or sockets."""
    cluster = fresh_cluster(start=False)
    task = cluster.process("worker", 0)
    spec = {"worker": cluster.spec["worker"]}
    assert task.call(steps.serve_again, spec, "worker", 0, protocol, 2) == [1.0, 2.0]
    threads, files, rss = task.call(steps.threads), task.call(steps.open_files), task.call(steps.rss_mib)
    assert task.call(steps.serve_again, spec, "worker", 0, protocol, 5, timeout=120) == [1.0, 2.0, 3.0, 4.0, 5.0]
    # The gRPC of TensorFlow up to 2.18 (poller "epollex") leaks an epoll and an event descriptor per server.
    forgotten = 2 * 5 if task.call(steps.tensorflow_minor) <= (2, 18) else 0
    assert task.call(steps.open_files) <= files + forgotten + 3
    # The kernel lists a thread that was joined for some time.
    ours = lambda threads: [count(threads, name) for name in ("starwire", "grpcpp")]  # noqa: E731
    wait_until(lambda: all(new <= old for new, old in zip(ours(task.call(steps.threads)), ours(threads))), 60, "the threads' end")
    now = task.call(steps.threads)
    # Not per server: a TensorFlow pool shared by all servers may still grow.
    # The servers of TensorFlow 1 leave three threads each.
    kept = 3 * 5 if is_tensorflow_1() else 0
    assert sum(now.values()) <= sum(threads.values()) + 3 + kept, (threads, now)
    # TensorFlow leaks 2 MiB per server.
    assert task.call(steps.rss_mib) <= rss + 5 * 8
    assert task.exit() == 0


def count(threads, prefix):
    return sum(number for name, number in threads.items() if name.startswith(prefix))


@pytest.mark.ours
def test_stopped_server(fresh_cluster, protocol):
    """starwire.stop() ends a referenced server: its threads end, its port is free, its sessions fail, and it accepts nothing new."""
    cluster = fresh_cluster()
    assert worker_call(cluster, steps.keep_session)
    assert cluster["ps", 0].call(stop_kept_server)
    with pytest.raises(RemoteError) as caught:
        cluster["worker", 0].call(steps.use_kept_session)
    assert caught.value.type in ("UnavailableError", "AbortedError"), caught.value
    assert cluster["ps", 0].call(restart_server, cluster.spec, "ps", 0, protocol)
    assert worker_call(cluster, steps.run_steps, 5) == 5


def stop_kept_server():
    import socket
    import sys

    sys.path.insert(0, str(ROOT / "python"))
    import starwire

    server = state["server"]
    starwire.stop(server)
    starwire.stop(server)  # has no effect
    with pytest.raises(tf.errors.UnavailableError), tf.compat.v1.Session(server.target) as sess:
        sess.list_devices()
    with socket.socket() as sock:
        free = sock.connect_ex(("127.0.0.1", int(server.target.rsplit(":", 1)[1]))) != 0
    # The kernel lists a thread that was joined for some time.
    wait_until(lambda: not count(steps.threads(), "starwire"), 60, "the threads' end")
    return free


@pytest.mark.ours
def test_server_again_while_peers_are_connected(fresh_cluster, protocol):
    """The ps replaces its server in the same process while a worker runs steps."""
    cluster = fresh_cluster()
    assert worker_call(cluster, steps.run_steps, 5) == 5
    for _ in range(3):
        cluster["ps", 0].call(restart_server, cluster.spec, "ps", 0, protocol)
        assert worker_call(cluster, steps.run_steps, 5) == 5


MIB = 1 << 20


@pytest.mark.ours
@pytest.mark.tensorflow2  # the allocator with this limit
def test_a_tensor_without_room_does_not_stall_others(fresh_cluster, protocol):
    """TensorFlow's allocator waits 10 s for memory, the step does not. If the worker's only reactor did, it would block all its transfers."""
    limits = {"TF_MKL_ALLOC_MAX_BYTES": 100 * MIB, "TF_ENABLE_ONEDNN_OPTS": "1", "STARWIRE_REACTORS": "1"}
    cluster = fresh_cluster(shape=(("ps", 2), ("worker", 1)), per_task={("worker", 0): limits}, spawn=[("worker", 0)])
    fitted, error, message = worker_call(cluster, fetch_with_and_without_room, timeout=120)
    assert fitted == 1
    assert error == "ResourceExhaustedError" and "bytes for a received tensor" in message, message
    # TensorFlow logs this, and what is in use, when it has waited in vain.
    assert "ran out of memory trying to allocate" not in cluster["worker", 0].full_log()


def fetch_with_and_without_room(target):
    """Fetches 56 MiB from ps 0, alone and with 48 MiB in use, while another session steps with ps 1, and goes on after the error."""
    import threading

    one = tf.compat.v1
    made, stop = [], threading.Event()

    def step():
        with tf.Graph().as_default():
            with tf.device("/job:ps/task:1"):
                number = tf.random.uniform([100])
            with tf.device("/job:worker/task:0"):
                total = tf.reduce_sum(number)
            with one.Session(target) as sess:
                while not stop.is_set():
                    sess.run(total)
                    made.append(total)

    def more_steps():
        before = len(made)
        wait_until(lambda: len(made) > before + 10 or not thread.is_alive(), 60, "steps with another ps")

    with tf.Graph().as_default():
        with tf.device("/job:ps/task:0"):
            big = tf.fill([56 * MIB], tf.cast(one.placeholder_with_default(1, []), tf.uint8))
        with tf.device("/job:worker/task:0"):
            highest = tf.reduce_max(big)
            held = one.get_variable("held", initializer=lambda: tf.zeros([48 * MIB], tf.uint8), dtype=tf.uint8)
        with one.Session(target) as sess:
            fitted = int(sess.run(highest))
            sess.run(held.initializer)
            thread = threading.Thread(target=step)
            thread.start()
            more_steps()
            error = "nothing", ""
            try:
                sess.run(highest)
            except tf.errors.OpError as caught:
                error = type(caught).__name__, caught.message
            more_steps()
            goes_on = thread.is_alive()
            stop.set()
            thread.join()
    assert goes_on, "the steps with another ps ended with an error"
    return (fitted, *error)


def restart_server(spec, job, index, protocol):
    from cluster import drop_server

    drop_server()
    start_server(spec, job, index, protocol)
    return True


@pytest.mark.star
@ONE_KIND
@pytest.mark.parametrize("who", ["ps", "worker", "worker with a session"])
def test_clean_exit(fresh_cluster, protocol, who):
    """Interpreters exit with code 0 without an abort, and a peer notices without keep-alive."""
    cluster = fresh_cluster(environment=NO_KEEPALIVE)
    assert worker_call(cluster, steps.keep_session)
    assert cluster["worker", 0].call(steps.use_kept_session) == 2
    if who == "ps":
        assert cluster["ps", 0].exit() == 0
        with pytest.raises(RemoteError) as caught:
            cluster["worker", 0].call(steps.use_kept_session)
        assert caught.value.type in ("UnavailableError", "AbortedError"), caught.value
        if is_stock(protocol):
            return  # over stock gRPC, a process with a session to a dead peer does not exit
    elif who == "worker":
        cluster["worker", 0].call(close_kept_session)
    assert cluster["worker", 0].exit() == 0


def close_kept_session():
    state.pop("session").close()
    return True


def test_exit_in_the_middle_of_a_step(fresh_cluster, tmp_path):
    """A process exits although one of its threads is in a step."""
    cluster = fresh_cluster()
    assert worker_call(cluster, run_in_thread)
    assert cluster["worker", 0].exit() == 0


def run_in_thread(target):
    import threading

    with tf.Graph().as_default() as graph:
        never = steps.Never("forever")
        with tf.device("/job:worker/task:0"):
            waiting = never.item + 1.0
        session = tf.compat.v1.Session(target, graph=graph)

    def wait():
        try:
            session.run(waiting)
        except Exception:
            pass  # the step may end in any way when the process exits

    waits = threading.Event()
    never.once_it_waits(target, waits.set)
    threading.Thread(target=wait, daemon=True).start()
    return waits.wait(60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_a_server(fresh_cluster, number):
    """SIGTERM has its default action, SIGINT raises KeyboardInterrupt: the library does not keep the process alive."""
    cluster = fresh_cluster()
    assert worker_call(cluster, steps.run_steps, 3) == 3
    ps = cluster["ps", 0]
    # Before 3.8, Python ends with 1 after a KeyboardInterrupt.
    ends_with_1 = is_tensorflow_1() and number == signal.SIGINT
    ps.expected_exit = 1 if ends_with_1 else -number
    ps.signal(number)
    assert ps.wait(60) == ps.expected_exit


def fork_and_run(protocol, spec, job, index):
    """Loads the library and forks; the child starts a server and runs steps; the parent stays usable."""
    load(protocol)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            target = start_server(spec, job, index, protocol)
            with tf.Graph().as_default(), tf.compat.v1.Session(target) as sess:
                value = sess.run(tf.compat.v1.placeholder_with_default(2.0, ()) * 3.0)
            os.write(write, f"{value}".encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    _, status = os.waitpid(child, 0)
    return os.read(read, 100).decode(), zygote.exit_code(status)


def test_fork_after_load(fresh_cluster, protocol):
    cluster = fresh_cluster(start=False)
    task = cluster.process("worker", 0)
    assert task.call(fork_and_run, protocol, {"worker": cluster.spec["worker"]}, "worker", 0) == ("6.0", 0)
    assert task.call(start_server, {"worker": cluster.spec["worker"]}, "worker", 0, protocol)


@pytest.mark.ours
def test_fork_while_a_server_runs(fresh_cluster, protocol, tmp_path):
    cluster = fresh_cluster()
    assert worker_call(cluster, steps.run_steps, 3) == 3
    assert cluster["worker", 0].call(fork_with_server, protocol, cluster.spec) == [7, 7, 8]
    assert worker_call(cluster, steps.run_steps, 3) == 3, "the parent goes on"


def test_the_library_is_the_one_of_this_checkout(protocol):
    if is_stock(protocol):
        pytest.skip("stock gRPC needs no library")
    assert os.path.getsize(library_path()) > 100_000
