"""Operations of a parameter server that wait for another worker: queues, barriers, accumulators, readers.

One worker's step waits on the server until another worker provides the value or closes the object, or until the waiting worker ends the step itself, by a
timeout or by closing its session. Each step pulls and updates variables of the same server before, beside and after the wait, so that grouping into calls
and messages must wait where required and nowhere else. All outcomes must be those of stock gRPC, and other steps must keep running meanwhile.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster import is_stock, one, tf
from compared import outcome
from graphs import PS0, PS1, WORKER0, WORKER1
from metrics import counters
from waiting import wait_until

pytestmark = pytest.mark.ours

WAIT = 120  # seconds, for steps that take a tenth of one on an idle machine
SOON = 0.4  # seconds for which a step that has begun is seen to wait


# The objects. Each provides operations that wait, that serve the wait, and that close the object. ---------------------


class Waiting:
    """A case: `wait` builds the blocking part and returns a float to fetch; `serve` and `close` build an operation each. All share an object on ps 0."""

    def __init__(self, wait, serve, close=None, prepare=None):
        self.wait, self.serve, self.close, self.prepare = wait, serve, close, prepare


def queue_of(make):
    """Dequeue from an empty queue."""
    return Waiting(
        wait=lambda name: make(name).dequeue(), serve=lambda name: make(name).enqueue(sent(3.0)), close=lambda name: make(name).close(cancel_pending_enqueues=True)
    )


def sent(value):
    """A value computed by the serving worker."""
    with tf.device(WORKER1):
        return one().placeholder_with_default(value, ()) * 2.0


def fifo(name):
    return tf.queue.FIFOQueue(2, [tf.float32], [()], shared_name=name)


def padding(name):
    return tf.queue.PaddingFIFOQueue(2, [tf.float32], [()], shared_name=name)


def shuffle(name):
    return tf.queue.RandomShuffleQueue(5, 1, [tf.float32], [()], shared_name=name)


def priority(name):
    return tf.queue.PriorityQueue(5, [tf.float32], [()], shared_name=name)


def enqueue_twice(queue):
    first = queue.enqueue(sent(3.0))
    with tf.control_dependencies([first]):
        return queue.enqueue(sent(4.0))


def full(name):
    """Enqueue to a full queue."""
    queue = fifo(name)
    with tf.device(WORKER0):
        value = one().placeholder_with_default(5.0, ()) + 1.0
    with tf.control_dependencies([queue.enqueue(value)]):
        return tf.cast(queue.size(), tf.float32)


def barrier(name):
    return tf.raw_ops.Barrier(component_types=[tf.float32, tf.string], shapes=[[2], []], shared_name=name)


def take_many(name):
    indices, keys, values = tf.raw_ops.BarrierTakeMany(handle=barrier(name), num_elements=2, component_types=[tf.float32, tf.string])
    return tf.reduce_sum(values[0]) + tf.cast(tf.reduce_sum(tf.strings.length(tf.concat([keys, values[1]], 0))), tf.float32) + tf.cast(tf.reduce_sum(indices), tf.float32)


def fill_barrier(name):
    """Two elements whose components are inserted one after the other, in different orders."""
    handle = barrier(name)
    with tf.device(WORKER1):
        keys = one().placeholder_with_default(["a", "bc"], (2,))
        numbers, words = tf.reshape(tf.range(4.0), (2, 2)) * 3.0, tf.strings.join([keys, keys])
    first = tf.raw_ops.BarrierInsertMany(handle=handle, keys=tf.reverse(keys, [0]), values=tf.reverse(words, [0]), component_index=1)
    with tf.control_dependencies([first]):
        ready = tf.raw_ops.BarrierReadySize(handle=handle)
        with tf.control_dependencies([one().assert_equal(ready, 0)]):
            return tf.raw_ops.BarrierInsertMany(handle=handle, keys=keys, values=numbers, component_index=0)


def accumulator(name):
    return one().ConditionalAccumulator(tf.float32, (), shared_name=name)


def sparse_accumulator(name):
    return one().SparseConditionalAccumulator(tf.float32, (None, 2), shared_name=name)


def take_sparse(name):
    indices, values, shape = sparse_accumulator(name).take_grad(2)
    return tf.reduce_sum(values) + tf.cast(tf.reduce_sum(indices) + tf.reduce_sum(shape), tf.float32)


def give_sparse(name):
    handle = sparse_accumulator(name)
    first = handle.apply_grad(tf.constant([1, 3], tf.int64), tf.fill((2, 2), sent(1.0)), tf.constant([5, 2], tf.int64))
    with tf.control_dependencies([first]):
        return handle.apply_grad(tf.constant([3], tf.int64), tf.fill((1, 2), sent(10.0)), tf.constant([5, 2], tf.int64))


def give_twice(name):
    handle = accumulator(name)
    with tf.control_dependencies([handle.apply_grad(sent(1.0))]):
        return handle.apply_grad(sent(4.0))


def resource_accumulator(name):
    return tf.raw_ops.ResourceConditionalAccumulator(dtype=tf.float32, shape=[], shared_name=name)


def give_resource(name):
    handle = resource_accumulator(name)
    step = tf.constant(0, tf.int64)
    with tf.control_dependencies([tf.raw_ops.ResourceAccumulatorApplyGradient(handle=handle, local_step=step, gradient=sent(1.0))]):
        return tf.raw_ops.ResourceAccumulatorApplyGradient(handle=handle, local_step=step, gradient=sent(4.0))


def read_work(name):
    """A reader waits for a file name."""
    reader = one().WholeFileReader(name + "reader")
    key, value = reader.read(tf.queue.FIFOQueue(3, [tf.string], [()], shared_name=name))
    return tf.cast(tf.strings.length(tf.strings.join([key, value])), tf.float32)


def files(name):
    return tf.queue.FIFOQueue(3, [tf.string], [()], shared_name=name)


def name_of_file(name):
    with tf.device(WORKER1):
        path = tf.strings.join(["/dev", "null"], "/")
    return files(name).enqueue(path)


CASES = {
    "fifo": queue_of(fifo),
    "padding": queue_of(padding),
    "dequeue_many": Waiting(lambda name: tf.reduce_sum(fifo(name).dequeue_many(2)), lambda name: enqueue_twice(fifo(name)), lambda name: fifo(name).close()),
    "dequeue_up_to": Waiting(lambda name: tf.reduce_sum(fifo(name).dequeue_up_to(2)), lambda name: enqueue_twice(fifo(name)), lambda name: fifo(name).close()),
    "shuffle": Waiting(lambda name: shuffle(name).dequeue() * 0.0, lambda name: enqueue_twice(shuffle(name)), lambda name: shuffle(name).close()),
    "priority": Waiting(
        lambda name: priority(name).dequeue()[1], lambda name: priority(name).enqueue((tf.constant(7, tf.int64), sent(3.0))), lambda name: priority(name).close()
    ),
    "full": Waiting(full, lambda name: fifo(name).dequeue(), lambda name: fifo(name).close(cancel_pending_enqueues=True), prepare=lambda name: enqueue_twice(fifo(name))),
    "barrier": Waiting(take_many, fill_barrier, lambda name: tf.raw_ops.BarrierClose(handle=barrier(name), cancel_pending_enqueues=True)),
    "accumulator": Waiting(lambda name: accumulator(name).take_grad(2), give_twice),
    "sparse_accumulator": Waiting(take_sparse, give_sparse),
    "resource_accumulator": Waiting(
        lambda name: tf.raw_ops.ResourceAccumulatorTakeGradient(handle=resource_accumulator(name), num_required=2, dtype=tf.float32), give_resource
    ),
    "reader": Waiting(read_work, name_of_file, lambda name: files(name).close()),
}


# In the worker processes. ---------------------------------------------------------------------------------------------


def variables(task):
    """Two variables of this worker per ps, counted up beside and after the wait."""
    with tf.device(PS0):
        near = [one().get_variable(f"near{i}_{task}", initializer=float(i), use_resource=i == 1) for i in range(2)]
    with tf.device(PS1):
        far = one().get_variable(f"far_{task}", initializer=0.0)
    return near, far


def wait_step(case, name):
    """A pull, the wait, a push that depends on the wait, and a read after the push."""
    near, far = variables(0)
    with tf.device(WORKER0):
        pulled = near[0] + near[1] + far
    with tf.device(PS0):
        beside = one().assign_add(near[1], 1.0)
        waited = CASES[case].wait(name)
    with tf.device(WORKER0):
        used = waited * 2.0 + 1.0
    with tf.device(PS0):
        pushed = one().assign_add(near[0], used)
    with tf.device(PS1), tf.control_dependencies([pushed]):
        after = one().assign_add(far, 1.0)
    with tf.device(WORKER0):
        return [pulled * 0.0 + used, pushed + 0.0, after + 0.0, beside * 0.0]


def all_have_begun(target, number):
    """Waits until as many steps have made their update beside the wait, and a little longer: nothing tells that the wait itself has begun."""
    with tf.Graph().as_default():
        near, _ = variables(0)
        with one().Session(target) as sess:
            deadline = time.monotonic() + WAIT
            while float(sess.run(near[1])) < 1.0 + number:
                assert time.monotonic() < deadline, f"{number} steps do not begin"
                time.sleep(0.02)
    time.sleep(SOON / 2)


def wait(target, case, name, end=None, closing=None):
    """Runs the waiting step; `end` is how this worker itself ends it: by a timeout, or by closing the session at an event. Returns its outcome, and that of a plain step afterwards."""
    with tf.Graph().as_default():
        fetches = wait_step(case, name)
        near, far = variables(2)
        with tf.device(WORKER0):
            plain = tf.add_n([*near, far]) + 0.5
        prepare = CASES[case].prepare
        with tf.device(PS0):
            prepare = prepare(name) if prepare else tf.no_op()
            serve = CASES[case].serve(name) if end == "timeout" else tf.no_op()
        sess = one().Session(target)
        sess.run(prepare)
        if end == "timeout":
            # TensorFlow's master loses a timeout that comes before the step has begun on every task, also over stock gRPC. So all tasks have begun it once.
            sess.run(serve)
            begun = time.monotonic()
            sess.run(fetches)
            took = time.monotonic() - begun
        closer = threading.Thread(target=lambda: closing.wait(WAIT) and sess.close())
        if end == "close":
            closer.start()
        # It begins in a fraction of the time that the first one took, which was prepared on every task and ended.
        options = one().RunOptions(timeout_in_ms=int(max(2.0, 4 * took) * 1000)) if end == "timeout" else None
        result = outcome(lambda: [float(v) for v in sess.run(fetches, options=options)])
        if end == "close":
            closer.join()
        else:
            result = result, float(sess.run(plain))
            sess.close()
        return result


def in_threads(function, calls):
    """Runs all calls concurrently; returns the outcomes by first argument."""
    with ThreadPoolExecutor(len(calls)) as pool:
        running = {call[0]: pool.submit(function, *call) for call in calls}
        return {name: future.result() for name, future in running.items()}


def wait_all(target, end=None, **names):
    """Runs all cases concurrently, each in its own session."""
    closing = threading.Event()
    if end == "close":
        threading.Thread(target=lambda: all_have_begun(target, len(names)) or closing.set()).start()
    return in_threads(lambda case, name: wait(target, case, name, end, closing), list(names.items()))


def initialise(target):
    with tf.Graph().as_default():
        for task in range(3):
            variables(task)
        with one().Session(target) as sess:
            sess.run(one().global_variables_initializer())


def serve_all(target, how, **names):
    """Runs plain steps while the other worker waits, then the operations that end its waits, one by one."""
    counts = []
    for case, name in names.items():
        with tf.Graph().as_default():
            near, far = variables(1)
            with tf.device(WORKER1):
                total = tf.add_n([*near, far]) + 1.0
            with tf.device(PS0):
                counted = one().assign_add(near[0], total * 0.0 + 1.0)
            with tf.device(WORKER1):
                counted = counted + 0.0
            with tf.device(PS0):
                operation = getattr(CASES[case], how)(name)
            with one().Session(target) as sess:
                counts += [float(sess.run(counted)) for _ in range(2)]
                sess.run(operation)
    return counts


def serve_and_take(target, case, name):
    """A value must not go to a dead worker: this worker provides it and takes it."""
    with tf.Graph().as_default():
        with tf.device(PS0):
            given, taken = CASES[case].serve(name), CASES[case].wait(name)
        with tf.device(WORKER0):
            taken = taken + 0.0
        with one().Session(target) as sess:
            sess.run(given)
            return outcome(lambda: float(sess.run(taken, options=one().RunOptions(timeout_in_ms=30000))))


# In the test process. -------------------------------------------------------------------------------------------------


def ended_by_another(cluster, end):
    """All cases wait; then the other worker ends every wait."""
    waiting, other = cluster["worker", 0], cluster["worker", 1]
    names = {case: f"{case}_{end}" for case in CASES if getattr(CASES[case], end)}
    waiting.call(initialise, cluster.target("worker", 0))
    waiting.begin(wait_all, cluster.target("worker", 0), **names)
    other.call(all_have_begun, cluster.target("worker", 1), len(names), timeout=2 * WAIT)
    assert not waiting.ready(), "waits"
    served = other.call(serve_all, cluster.target("worker", 1), end, **names, timeout=WAIT)
    results = waiting.result(WAIT)
    assert served == [1.0 + i for i in range(2 * len(names))], "the other worker went on"
    # How far they had counted at that point is chance; the values are not.
    return {case: ((kind, value[0] if kind == "value" else value), plain == 0.5 + int(plain)) for case, ((kind, value), plain) in results.items()}


def ended_by_itself(cluster, end):
    cluster["worker", 0].call(initialise, cluster.target("worker", 0))
    results = cluster["worker", 0].call(wait_all, cluster.target("worker", 0), end, **{case: f"{case}_self_{end}" for case in CASES}, timeout=2 * WAIT)
    return {case: result if end == "close" else result[0] for case, result in results.items()}


def check_each(stock, ours):
    different = [f"{case}: {ours[case]} instead of {stock[case]}" for case in stock if ours[case] != stock[case]]
    assert not different and len(ours) == len(stock), "\n".join(different)


# Transfers are grouped over these, and over grpc++ cross as those that are left with fused tensors.
GROUPED = pytest.mark.quick(lambda of: of["way"] in ("fused", "star_server"), reason="grouping must not make them wait, neither messages nor calls")


@GROUPED
def test_served(compared, way):
    stock, ours = compared.stock(ended_by_another, "serve"), compared.run(way, ended_by_another, "serve")
    check_each(stock, ours)
    assert all(kind == "value" for (kind, _), _ in ours.values())


@GROUPED
def test_closed(compared, way):
    stock, ours = compared.stock(ended_by_another, "close"), compared.run(way, ended_by_another, "close")
    check_each(stock, ours)
    assert all(kind in ("OutOfRangeError", "CancelledError") for (kind, _), _ in ours.values())


@GROUPED
@pytest.mark.parametrize("end", ["timeout", "close"])
def test_ended_by_itself(compared, way, end):
    """By the step's timeout, or by closing its session from another thread."""
    check_each(compared.stock(ended_by_itself, end), compared.run(way, ended_by_itself, end))


def killed(cluster, cases):
    """A worker killed while its step waits does not take a value provided later."""
    victim, other = cluster["worker", 1], cluster["worker", 0]
    other.call(initialise, cluster.target("worker", 0))
    names = {case: f"{case}_killed" for case in cases}
    victim.begin(wait_all, cluster.target("worker", 1), **names)
    other.call(all_have_begun, cluster.target("worker", 0), len(names), timeout=2 * WAIT)
    assert not victim.ready(), "waits"
    victim.kill()
    if is_stock(cluster.protocol):
        time.sleep(2 * SOON)  # stock gRPC does not count what it has to answer
    else:
        wait_until(lambda: not counters(cluster["ps", 0])["requests_unanswered"], 60, "the server gives up")
    cluster.start("worker", 1)
    return {case: other.call(serve_and_take, cluster.target("worker", 0), case, name) for case, name in names.items()}


def test_killed_while_it_waits(compared, way):
    # Without barriers: TensorFlow's keep a reference to a member of the kernel that created them, which is freed with the dead worker's session.
    cases = ("fifo", "priority", "dequeue_many", "accumulator", "resource_accumulator")
    stock, ours = compared.stock(killed, cases), compared.run(way, killed, cases)
    check_each(stock, ours)
    assert all(kind == "value" for kind, _ in ours.values())
