"""SIGTERM and SIGINT in every role, mid-work: a process ends, or survives, exactly as over stock gRPC, and its peers see the same.

TensorFlow's blocking calls do not check for signals: SIGINT reaches Python when the call returns. So only SIGTERM ends a server in `join()`, or a session that
waits for a missing task. starwire must not change that: no handler, no thread that keeps the process alive, no abort at exit. CASES lists the outcomes over
stock gRPC; STARWIRE_DEEP_TESTS=1 also checks stock gRPC itself, and all our ways in all roles.
"""

import signal
import sys
import threading
import time
from typing import NamedTuple

import pytest

import steps
import tf2_job
from cluster import TaskDied, free_port, is_tensorflow_1, load, one, state, tf
from compared import OURS
from waiting import wait_for

pytestmark = pytest.mark.ours

ENDS = 60  # seconds within which a process that ends does so
STAYS = 1.0  # seconds after which a process that has not seen the signal will not see it any more: nothing else tells that
SHAPE = (("ps", 1), ("worker", 2))


# In the processes that receive the signal. ----------------------------------------------------------------------------


def leave(number, frame):
    raise SystemExit(3)


def handle(handled):
    """Installs handlers as scripts that exit cleanly do: raise in the main thread. Also records that Python saw SIGINT."""

    def note(number, frame):
        open("interrupted", "w").close()  # in the task's own directory
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    if handled:
        signal.signal(signal.SIGTERM, leave)


def idle():
    handle(False)


def join(started):
    handle(False)
    open(started, "w").close()
    state["server"].join()


def train(target, started, blocked, handled=False, task=0, protocol=None):
    if protocol:
        load(protocol)
    handle(handled)
    steps.run_until_error(target, started, blocked, task=task)


def train_on(target, started):
    """Is interrupted mid-step and continues with the same session."""
    with tf.Graph().as_default():
        model = steps.Model()
        with one().Session(target) as sess:
            sess.run(model.initializer)
            count = 0
            try:
                deadline = time.monotonic() + ENDS
                while time.monotonic() < deadline:
                    count = float(sess.run(model.sums)[0])
                    if count == 5:
                        open(started, "w").close()
            except KeyboardInterrupt:
                after = [float(sess.run(model.sums)[0]) for _ in range(3)]
                return "interrupted", [number - after[0] for number in after], after[0] - count in (1.0, 2.0)
    return "not interrupted", count


def create_session(target, started):
    """In a cluster with a missing task."""
    handle(False)
    with tf.Graph().as_default(), tf.device("/job:ps/task:0"):
        value = one().placeholder_with_default(1.0, ()) + 1.0
        with one().Session(target) as sess:
            threading.Thread(target=note_call, args=(started,), daemon=True).start()
            sess.run(value)


def note_call(started):
    """Makes the file once the main thread stays in a call of TensorFlow's C++, during which Python sees no signal."""
    place, before = None, ()
    while place != before or not place[0].endswith("client/session.py"):
        time.sleep(0.02)
        before, frame = place, sys._current_frames()[threading.main_thread().ident]
        place = frame.f_code.co_filename, frame.f_code.co_name, frame.f_lasti
    open(started, "w").close()


def evaluate(protocol, started, handled=False):
    """Uses neither server nor cluster, only the loaded library."""
    load(protocol)
    handle(handled)
    with tf.Graph().as_default():
        value = tf.reduce_sum(tf.random.uniform((200, 200)))
        with one().Session() as sess:
            sess.run(value)
            open(started, "w").close()
            while True:
                sess.run(value)


def coordinate(protocol, spec, started, handled=False):
    """A ClusterCoordinator with functions in flight."""
    tf2_job.coordinate(protocol, spec)
    step, _ = tf2_job.long_step()
    state["coordinator"].schedule(step)
    state["coordinator"].join()
    handle(handled)
    while True:
        # Many: an exception that is raised while TensorFlow's C++ calls Python, as it does in schedule(), may be lost.
        for _ in range(500):
            state["coordinator"].schedule(step)
        open(started, "w").close()
        state["coordinator"].join()


# In the test process. -------------------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """A signal, and whether the process is expected to continue: then it is not waited for as long as for one that ends."""

    number: int
    stays: bool


def end_of(task, sent):
    """Sends the signal; returns the exit code, or that the process continues."""
    task.signal(sent.number)
    start = time.monotonic()
    heard = task.directory / "interrupted"
    while task.poll() is None:
        waited = time.monotonic() - start
        if sent.stays and waited > STAYS and not heard.exists():
            task.kill()
            return GOES_ON
        if waited > ENDS:
            task.dump_stacks()
            answer = f" and answered {task._connection.recv()}" if task.ready() else ""
            raise TaskDied(f"{task} {'saw the signal, but' if heard.exists() else 'has not seen the signal, and'} did not end{answer}; its log:\n{task.log()}")
        time.sleep(0.02)
    task.expected_exit = task.poll()
    return task.expected_exit


def lost(result):
    """True if a peer's error reports that the other task is gone, else the error."""
    kind, message, _ = result
    return kind in ("UnavailableError", "AbortedError") or (kind, message)


def ps(joined):
    def scenario(cluster, folder, sent, handled):
        server, worker = cluster["ps", 0], cluster["worker", 0]
        server.call(idle)
        if joined:
            server.begin(join, f"{folder}/joined")
            wait_for(f"{folder}/joined")
        worker.begin(steps.run_until_error, cluster.target("worker", 0), f"{folder}/started")
        wait_for(f"{folder}/started")
        end = end_of(server, sent)
        error = lost(worker.result(ENDS))
        worker.kill()  # over stock gRPC, its session waits for the dead ps
        return end, error

    return scenario


def worker(blocked):
    def scenario(cluster, folder, sent, handled):
        victim, other = cluster["worker", 1], cluster["worker", 0]
        victim.begin(train, cluster.target("worker", 1), f"{folder}/started", blocked, handled, task=1)
        wait_for(f"{folder}/started")
        end = end_of(victim, sent)
        cluster.start("worker", 1)  # sessions without filters wait for it
        return end, other.call(steps.run_steps, cluster.target("worker", 0), 5)

    return scenario


def worker_goes_on(cluster, folder, sent, handled):
    cluster["worker", 0].begin(train_on, cluster.target("worker", 0), f"{folder}/started")
    wait_for(f"{folder}/started")
    cluster["worker", 0].signal(sent.number)
    return cluster["worker", 0].result(ENDS + 5)


def session_creation(cluster, folder, sent, handled):
    cluster["ps", 0].kill()
    victim = cluster["worker", 1]
    victim.begin(create_session, cluster.target("worker", 1), f"{folder}/started")
    wait_for(f"{folder}/started")
    return end_of(victim, sent)


def client(blocked):
    """A process without a server; its master survives."""

    def scenario(cluster, folder, sent, handled):
        victim = cluster.runner.task("client")
        try:
            victim.begin(train, cluster.target("worker", 0), f"{folder}/started", blocked, handled, protocol=cluster.protocol)
            wait_for(f"{folder}/started")
            end = end_of(victim, sent)
        finally:
            victim.kill()
        return end, cluster["worker", 0].call(steps.run_steps, cluster.target("worker", 0), 5)

    return scenario


def master(cluster, folder, sent, handled):
    """Signals the worker that serves as master of a client in mid-step. (The client's error and its timing are gRPC's.)"""
    peer, victim = cluster.runner.task("client"), cluster["worker", 1]
    try:
        peer.begin(steps.run_until_error, cluster.target("worker", 1), f"{folder}/started", True, task=1)
        victim.begin(join, f"{folder}/joined")
        wait_for(f"{folder}/joined")
        wait_for(f"{folder}/started")
        end = end_of(victim, sent)
        cluster.start("worker", 1)
        return end, cluster["worker", 0].call(steps.run_steps, cluster.target("worker", 0), 5)
    finally:
        peer.kill()


def evaluator(cluster, folder, sent, handled):
    victim = cluster.runner.task("evaluator")
    try:
        victim.begin(evaluate, cluster.protocol, f"{folder}/started", handled)
        wait_for(f"{folder}/started")
        return end_of(victim, sent)
    finally:
        victim.kill()


def coordinator(cluster, folder, sent, handled):
    spec = {**cluster.spec, "chief": [f"127.0.0.1:{free_port()}"]}
    victim = cluster.runner.task("chief")
    try:
        victim.begin(coordinate, cluster.protocol, spec, f"{folder}/started", handled)
        wait_for(f"{folder}/started")
        return end_of(victim, sent)
    finally:
        victim.kill()


TERM, INT = signal.SIGTERM, signal.SIGINT
GOES_ON = "goes on"
# Before 3.8, Python ends with 1 after a KeyboardInterrupt.
INTERRUPTED = 1 if is_tensorflow_1() else -INT
ROLES = {
    "ps": ps(False), "ps_joined": ps(True), "worker": worker(False), "worker_blocked": worker(True), "worker_goes_on": worker_goes_on, "session_creation": session_creation,
    "client": client(False), "client_blocked": client(True), "master": master, "evaluator": evaluator, "coordinator": coordinator,
}  # fmt: skip
CASES = {  # (role, signal, whether SIGTERM raises SystemExit): the outcome over stock gRPC and, with peers, theirs
    ("ps", TERM, False): (-TERM, True),
    ("ps", INT, False): (INTERRUPTED, True),
    ("ps_joined", TERM, False): (-TERM, True),
    ("ps_joined", INT, False): (GOES_ON, True),
    ("worker", TERM, False): (-TERM, 5),
    ("worker", INT, False): (INTERRUPTED, 5),
    ("worker", TERM, True): (3, 5),
    ("worker_blocked", TERM, False): (-TERM, 5),
    ("worker_blocked", INT, False): (GOES_ON, 5),
    ("worker_goes_on", INT, False): ("interrupted", [0.0, 1.0, 2.0], True),
    ("session_creation", TERM, False): -TERM,
    ("session_creation", INT, False): GOES_ON,
    ("client", TERM, False): (-TERM, 5),
    ("client", INT, False): (INTERRUPTED, 5),
    ("client", TERM, True): (3, 5),
    ("client_blocked", TERM, False): (-TERM, 5),
    ("client_blocked", INT, False): (GOES_ON, 5),
    ("master", TERM, False): (-TERM, 5),
    ("master", INT, False): (GOES_ON, 5),
    ("evaluator", TERM, False): -TERM,
    ("evaluator", INT, False): INTERRUPTED,
    ("evaluator", TERM, True): 3,
    ("coordinator", TERM, False): -TERM,
    ("coordinator", INT, False): INTERRUPTED,
}
# Run always: each role that the protocol affects, with each outcome that it may prevent: an exit through Python, a death in a call of TensorFlow, going on.
ALWAYS = {
    "grpc++": (
        ("ps", INT, False), ("ps_joined", TERM, False), ("ps_joined", INT, False), ("worker", INT, False), ("worker", TERM, True),
        ("worker_blocked", TERM, False), ("worker_goes_on", INT, False), ("session_creation", TERM, False), ("client", INT, False),
        ("client_blocked", INT, False), ("master", TERM, False), ("evaluator", INT, False), ("coordinator", INT, False),
    ),
    "star_server": (("ps", TERM, False), ("worker", INT, False), ("worker", TERM, True), ("worker_blocked", INT, False), ("worker_goes_on", INT, False)),
}  # fmt: skip
# Their sessions are those of another task, by grpc://.
REMOTE = ("client", "client_blocked", "master")


def marks(way, case):
    role = case[0]
    slow = [] if case in ALWAYS.get(way, ()) else [pytest.mark.deep(reason="ALWAYS has each role that the protocol affects with each outcome")]
    return slow + [pytest.mark.grpc_client] * (role in REMOTE) + [pytest.mark.tensorflow2] * (role == "coordinator")


CHOSEN = [
    pytest.param(way, case, marks=marks(way, case), id=f"{way}-{case[0]}-{case[1].name}{'-handled' if case[2] else ''}")
    for way in ("grpc", *OURS)
    for case in CASES
]


@pytest.fixture(scope="module")
def tasks(compared):
    """Returns clusters by way, after restarting the tasks that a signal ended."""

    def get(way):
        cluster = compared.cluster(way, SHAPE, replace=False)
        for (job, index), task in list(cluster.tasks.items()):
            if task.busy or task.poll() is not None:
                task.kill()
                cluster.start(job, index)
        return cluster

    return get


@pytest.mark.parametrize("way, case", CHOSEN)
def test_signal(tasks, tmp_path, way, case):
    role, number, handled = case
    expected = CASES[case]
    sent = Sent(number, GOES_ON in (expected, expected[0] if isinstance(expected, tuple) else None))
    assert ROLES[role](tasks(way), str(tmp_path), sent, handled) == expected
