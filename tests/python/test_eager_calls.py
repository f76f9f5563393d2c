"""TensorFlow 2's eager calls on the data port: what a step of ParameterServerStrategy waits for."""

import re
import threading

import pytest

from cluster import RemoteError, state, tf
from metrics import counters
from tf2_job import connect, start, train_scheduled
from waiting import wait_until

A, B = "/job:ps/replica:0/task:0", "/job:ps/replica:0/task:1"


def calls_received(cluster, job, count):
    return [counters(cluster[job, index])["calls_received"] for index in range(count)]


@pytest.mark.ours
def test_steps_use_the_data_port(fresh_cluster, protocol):
    """A call of the chief per step; two calls of the worker per step and parameter server: the part of the function, and the end of the step. A star call may
    do the work of both."""
    cluster, chief = start(fresh_cluster)
    chief.call(train_scheduled, 4, timeout=120)
    workers, servers = calls_received(cluster, "worker", 2), calls_received(cluster, "ps", 2)
    steps = 30
    assert chief.call(train_scheduled, steps, timeout=120)[0] == sum(range(steps))
    assert sum(calls_received(cluster, "worker", 2)) - sum(workers) >= steps
    for before, after in zip(servers, calls_received(cluster, "ps", 2)):
        assert after - before >= (steps if protocol.startswith("star_server") else 2 * steps)


# Functions that block. ------------------------------------------------------------------------------------------------


def in_a_ring(count):
    """Functions on a worker wait for each other: each puts a token into the next one's queue and takes its own."""
    from tensorflow.python.eager import context, executor

    with tf.device("/job:worker/task:0/device:CPU:0"):
        queues = [tf.queue.FIFOQueue(2, tf.int64, ()) for _ in range(count)]

    def function(index):
        @tf.function
        def run():
            queues[(index + 1) % count].enqueue(tf.constant(index, tf.int64))
            return queues[index].dequeue()

        return run

    functions = [function(index) for index in range(count)]
    taken = [None] * count

    def call(index):
        # As the coordinator's threads: one request at a time, without a stream.
        with context.executor_scope(executor.new_executor(enable_async=False, enable_streaming_enqueue=False)):
            with tf.device("/job:worker/task:0/device:CPU:0"):
                taken[index] = int(functions[index]())

    threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return taken


@pytest.mark.ours
def test_waiting_functions_leave_threads_for_others(fresh_cluster, protocol, runner):
    """Over stock gRPC this hangs: a function keeps a thread of the compute pool, which has one here."""
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1).SerializeToString()
    cluster = fresh_cluster(shape=(("worker", 1),), config=config)
    client = runner.task("eager-client")
    try:
        client.call(connect, protocol, cluster.spec)
        assert client.call(in_a_ring, 9, timeout=90) == [8, *range(8)]
    finally:
        client.kill()


def start_blocked():
    """A function waits on a ps for an element that does not come."""
    strategy = state["strategy"]
    with strategy.scope(), tf.device(A):
        queue = state["queue"] = tf.queue.FIFOQueue(10, tf.int64, ())

    @tf.function
    def take():
        return queue.dequeue() + 1

    state["take"] = take
    state["result"] = state["coordinator"].schedule(take)


def fail_the_other():
    """The failure of one function cancels the others."""

    @tf.function
    def bad():
        tf.debugging.assert_equal(tf.random.uniform((), 0, 1, tf.int32), 2, "told so")

    state["coordinator"].schedule(bad)
    try:
        state["coordinator"].join()
    except tf.errors.InvalidArgumentError as error:
        return error.message
    return None


def take_after_all():
    state["queue"].enqueue(tf.constant(41, tf.int64))
    result = state["coordinator"].schedule(state["take"])
    state["coordinator"].join()
    return int(result.fetch())


def test_cancelled_functions_end(fresh_cluster, within):
    """Chief to worker to ps. The element that comes later is not taken by the function that was cancelled."""
    cluster, chief = start(fresh_cluster)
    chief.call(start_blocked)
    with within(30):
        assert "told so" in chief.call(fail_the_other)
    # The worker tells the server to give up, the chief tells it of the element: nothing orders the two.
    servers = [task for (job, _), task in cluster.tasks.items() if job == "ps"]
    wait_until(lambda: not any(counters(server)["requests_unanswered"] for server in servers), 60, "the server gives up")
    assert chief.call(take_after_all) == 42


# Errors. --------------------------------------------------------------------------------------------------------------


def fail_on_ps():
    strategy = state["strategy"]
    with strategy.scope():
        words = tf.Variable(["not a number"])

    @tf.function
    def step():
        with tf.device(words.device):
            return tf.strings.to_number(words.read_value())

    state["coordinator"].schedule(step)
    try:
        state["coordinator"].join()
    except tf.errors.OpError as error:
        return type(error).__name__, error.message
    return None


def test_errors_name_the_tasks_as_over_grpc(fresh_cluster, protocol):
    """The coordinator recognises dead tasks by this sentence of TensorFlow's gRPC client."""
    seen = []
    for kind in dict.fromkeys(("grpc", protocol)):
        cluster, chief = start(fresh_cluster, workers=1, protocol=kind)
        name, message = chief.call(fail_on_ps)
        assert name == "InvalidArgumentError" and "not a number" in message
        seen.append(sorted(set(re.findall(r"GRPC error information from remote target (/job:\w+/replica:0/task:\d+)", message))))
        cluster.close()
    assert seen[0] == seen[-1] and any(target.startswith("/job:ps") for target in seen[0]), seen


# Large requests. ------------------------------------------------------------------------------------------------------


def send_large(megabytes):
    import numpy as np

    strategy = state["strategy"]
    with strategy.scope():
        total = tf.Variable(0.0, dtype=tf.float64)

    @tf.function
    def step(values):
        total.assign_add(tf.reduce_sum(tf.cast(values, tf.float64)))
        return tf.shape(values)[0]

    values = np.arange(megabytes << 18, dtype=np.float32) % 1000
    results = [state["coordinator"].schedule(step, args=(values,)) for _ in range(2)]
    state["coordinator"].join()
    return [int(result.fetch()) for result in results], float(total.numpy()), 2 * float(values.sum(dtype=np.float64))


def test_large_arguments(fresh_cluster):
    _, chief = start(fresh_cluster)
    counts, total, expected = chief.call(send_large, 100, timeout=120)
    assert counts == [100 << 18] * 2 and total == expected


# Servers that end. ----------------------------------------------------------------------------------------------------


def join():
    state["coordinator"].join()


@pytest.mark.ours
def test_a_dead_ps_ends_functions_that_wait_for_it(fresh_cluster, within):
    cluster, chief = start(fresh_cluster, workers=1)
    chief.call(start_blocked)
    chief.begin(join)
    received = calls_received(cluster, "ps", 1)[0]
    wait_until(lambda: calls_received(cluster, "ps", 1)[0] != received, 60, "a call of a function")
    cluster["ps", 0].kill()
    with within(60), pytest.raises(RemoteError) as caught:
        chief.result(60)
    assert caught.value.type == "UnavailableError", caught.value
