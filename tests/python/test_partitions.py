"""Partitions on starwire's executor, compared with TensorFlow's (`STARWIRE_EXECUTOR`)."""

import re
import threading
import time

import pytest

import test_differential as differential
from cluster import RemoteError, tf
from graphs import CASES, ERRORS, PS0, WORKER0

pytestmark = pytest.mark.ours

WRAPPER = "starwire_partition_"


# In the worker process. -----------------------------------------------------------------------------------------------


def traced(sess, fetches, feeds=None):
    """Returns a traced step's values, the kernels in its timeline and the graphs that it ran, by task."""
    options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE, output_partition_graphs=True)
    metadata = tf.compat.v1.RunMetadata()
    values = sess.run(fetches, feeds, options=options, run_metadata=metadata)
    kernels = {}
    for device in metadata.step_stats.dev_stats:
        kernels.setdefault(device.device.split("/device:")[0], set()).update(node.node_name for node in device.node_stats)
    graphs = {}
    for graph in metadata.partition_graphs:
        for node in graph.node:
            graphs.setdefault(node.device.split("/device:")[0], set()).add((node.name, node.op))
    return values, kernels, graphs


def pull_and_push(target):
    """A step that uses a variable: returns the kernels that ran on each task, and the nodes of the reported graphs."""
    with tf.Graph().as_default(), differential.session(target) as sess:
        with tf.device(PS0):
            w = tf.compat.v1.get_variable("w", initializer=[1.0, 2.0], use_resource=True)
        with tf.device(WORKER0):
            update = tf.multiply(w.read_value(), 0.5, name="update")
        with tf.device(PS0):
            pushed = tf.raw_ops.AssignAddVariableOp(resource=w.handle, value=update, name="push")
        sess.run(w.initializer)
        for _ in range(3):
            sess.run(pushed)
        _, kernels, graphs = traced(sess, pushed)
        assert sess.run(w.read_value()).tolist() == [1.5**4, 2 * 1.5**4]
        return kernels, graphs


def loop(target):
    """A loop on the server, which stays on TensorFlow's executor, beside a worker's partition."""
    tf.compat.v1.disable_control_flow_v2()
    with tf.Graph().as_default(), differential.session(target) as sess:
        with tf.device(PS0):
            start = tf.compat.v1.placeholder_with_default(1.0, ())
            total = tf.while_loop(lambda x: x < 100.0, lambda x: x * 3.0, [start])[0]
        with tf.device(WORKER0):
            out = tf.identity(total) + 1.0
        value, kernels, _ = traced(sess, out)
        return float(value), kernels


def message_of(target, name):
    return differential.run_error(target, name)


def many_wait(target, count):
    """More steps wait on a queue of the server than it has threads; other steps still run, and end the waits."""
    with tf.Graph().as_default():
        with tf.device(PS0):
            queue = tf.queue.FIFOQueue(2 * count, [tf.float32], [()], shared_name="many_wait")
            item = queue.dequeue()
            fill = queue.enqueue_many([tf.constant([float(i) for i in range(count)])])
            other = tf.compat.v1.placeholder_with_default(1.0, ())
            other = other + 1.0
        with tf.device(WORKER0):
            taken = item + 0.5
            seen = other * 2.0
        with differential.session(target) as sess:
            results = []
            threads = [threading.Thread(target=lambda: results.append(float(sess.run(taken)))) for _ in range(count)]
            for thread in threads:
                thread.start()
            time.sleep(0.3)
            for _ in range(20):
                assert sess.run(seen) == 4.0
            assert results == []
            sess.run(fill)
            for thread in threads:
                thread.join(30)
            return sorted(results)


def wait_within_a_step(target, device):
    """A kernel blocks its thread until another kernel of the same step has run."""
    with tf.Graph().as_default(), differential.session(target) as sess:
        with tf.device(device):
            value = tf.compat.v1.placeholder_with_default(3.0, ())
            # Several pairs, so that in some the blocking kernel starts first.
            taken = [tf.raw_ops.Unstage(dtypes=[tf.float32], shared_name=f"stage{i}")[0] for i in range(4)]
            put = [tf.raw_ops.Stage(values=[value + float(i)], shared_name=f"stage{i}") for i in range(4)]
            total = tf.add_n(taken)
        with tf.device(WORKER0):
            out = tf.identity(total)
        for _ in range(5):
            value, _ = sess.run([out, put])
        return float(value)


def cancelled(target, device):
    """A timeout ends a step that waits; the next step works."""
    with tf.Graph().as_default(), differential.session(target) as sess:
        with tf.device(device):
            queue = tf.queue.FIFOQueue(1, [tf.float32], [()], shared_name="cancelled")
            item, put = queue.dequeue(), queue.enqueue(1.0)
            fine = tf.compat.v1.placeholder_with_default(1.0, ()) + 1.0
        with tf.device(WORKER0):
            waiting, fine = item + 1.0, fine + 1.0
        # TensorFlow's master loses a timeout that comes before the step has begun on every task.
        sess.run(put)
        assert sess.run(waiting) == 2.0
        raised = []
        for _ in range(3):
            try:
                sess.run(waiting, options=tf.compat.v1.RunOptions(timeout_in_ms=300))
            except tf.errors.OpError as error:
                raised.append(type(error).__name__)
            assert sess.run(fine) == 3.0
        return raised


def partial(target):
    with tf.Graph().as_default(), differential.session(target) as sess:
        with tf.device(PS0):
            a, b = tf.compat.v1.placeholder(tf.float32, ()), tf.compat.v1.placeholder(tf.float32, ())
            doubled = a * 2.0
        with tf.device(WORKER0):
            total = doubled + b
        handle = sess.partial_run_setup([doubled, total], [a, b])
        first = sess.partial_run(handle, doubled, {a: 3.0})
        second = sess.partial_run(handle, total, {b: float(first)})
        return float(first), float(second)


def graphs_share_state(target):
    """Several graphs of a session, and a callable, use the same reference variable."""
    with tf.Graph().as_default(), differential.session(target) as sess:
        with tf.device(PS0):
            w = tf.compat.v1.get_variable("w", initializer=1.0, use_resource=False)
            step = tf.compat.v1.placeholder(tf.float32, ())
            grow = tf.compat.v1.assign_add(w, step)
        with tf.device(WORKER0):
            seen = tf.identity(w) + 0.0
        sess.run(w.initializer)
        call = sess.make_callable(grow, [step])
        out = []
        for i in range(3):
            out += [float(call(float(i))), float(sess.run(seen)), float(sess.run(grow, {step: 10.0}))]
        return out


def busy(target, width, size, steps):
    """Many expensive kernels side by side, with a known sum."""
    with tf.Graph().as_default(), differential.session(target) as sess:
        with tf.device(PS0):
            seed = tf.compat.v1.placeholder_with_default(tf.ones([size, size]) / size, (size, size))
        with tf.device(WORKER0):
            parts = [tf.reduce_sum(tf.matmul(tf.matmul(seed, seed), seed + 0.0)) for _ in range(width)]
            total = tf.add_n(parts)
        return [round(float(sess.run(total)) / (width * size), 3) for _ in range(steps)]


# In the test process. -------------------------------------------------------------------------------------------------


@pytest.fixture
def run_with(make_cluster):
    """Runs a function in worker 0 of a cluster whose tasks have this `STARWIRE_EXECUTOR`."""

    def run(executor, function, *args):
        cluster = make_cluster(environment={"STARWIRE_EXECUTOR": executor})
        return cluster["worker", 0].call(function, cluster.target("worker", 0), *args, timeout=120)

    return run


def wrapped(kernels):
    """The jobs whose partitions ran in a wrapper. Beside the tasks, 1.15's timeline has what its profiler saw of this host."""
    found = {task for task, names in kernels.items() if any(name.startswith(WRAPPER) for name in names)}
    return {task.split("/job:")[1].split("/")[0] for task in found if task != "/host:CPU"}


@pytest.mark.parametrize("executor, jobs", [("on", {"ps", "worker"}), ("auto", {"ps"}), ("off", set())])
def test_which_partitions_run_where(run_with, executor, jobs):
    """Whichever executor runs them, the timeline shows their kernels, and the reported graphs are the session's."""
    kernels, graphs = run_with(executor, pull_and_push)
    assert wrapped(kernels) == jobs
    ps, worker = "/job:ps/replica:0/task:0", "/job:worker/replica:0/task:0"
    assert "push" in kernels[ps] and "update" in kernels[worker]
    assert ("push", "AssignAddVariableOp") in graphs[ps] and ("update", "Mul") in graphs[worker]
    assert not [name for task in graphs.values() for name, _ in task if name.startswith(WRAPPER)]


def test_a_loop_stays(run_with):
    value, kernels = run_with("on", loop)
    assert value == 244.0
    assert wrapped(kernels) == {"worker"}


def test_what_stays_with_tensorflow(make_cluster):
    """Partitions that only look wrapped: the wrapper's contents may still run on TensorFlow's executor, and only the log says so."""
    log = {"TF_CPP_MAX_VLOG_LEVEL": "0", "TF_CPP_VMODULE": "pass=1,ops=1"}
    cluster = make_cluster(environment={"STARWIRE_EXECUTOR": "on", **log}, spawn=True)

    def stays(function):
        before = {name: task.log_size() for name, task in cluster.tasks.items()}
        cluster["worker", 0].call(function, cluster.target("worker", 0), timeout=120)
        texts = {name: task.full_log()[before[name] :] for name, task in cluster.tasks.items()}
        return {name: re.findall(r"TensorFlow's executor runs the partition of \S+: (.*)", text) for name, text in texts.items()}

    # The server's partition sends its variable and receives the update; the worker's does the reverse.
    assert not any(stays(pull_and_push).values())
    kept = stays(loop)
    assert kept["ps", 0] and all("belongs to a loop" in reason for reason in kept["ps", 0])
    assert not kept["worker", 0]


@pytest.mark.parametrize("name", CASES)
def test_same_results(run_with, name):
    ours, stock = (run_with(executor, differential.run_case, name, 3) for executor in ("on", "off"))
    assert ours == stock
    assert stock[0]


@pytest.mark.parametrize("name", ERRORS)
def test_same_errors(run_with, name):
    """The error names the failed node, and no node unknown to the session."""
    _, kind, sentence = ERRORS[name]
    ours, stock = (run_with(executor, message_of, name) for executor in ("on", "off"))
    for (our_kind, our_code, our_message), (kind_there, code_there, message_there) in zip(ours, stock):
        assert (our_kind, our_code) == (kind_there, code_there) == (kind, our_code)
        assert sentence in our_message
        # TensorFlow appends lines of its log, which name what really ran.
        assert WRAPPER not in re.sub(r"\n  [IWE]\d{4} [^\n]*(\n\t [^\n]*)*", "", our_message)
        # If several tasks report the error, TensorFlow shows only the start of each report, which cuts off the end of a long message.
        cut = "\n=====" in our_message and name == "long_message"
        assert "node" not in message_there or "node" in our_message or cut


def test_a_kernel_that_cannot_be_created_is_the_same_error(run_with):
    messages = []
    for executor in ("on", "off"):
        with pytest.raises(RemoteError) as caught:
            run_with(executor, make_bad_kernel)
        assert WRAPPER not in caught.value.message
        messages.append((caught.value.type, "node bad_pattern" in caught.value.message, "Invalid pattern" in caught.value.message))
    assert messages[0] == messages[1] == ("InvalidArgumentError", True, True)


def make_bad_kernel(target):
    with tf.Graph().as_default(), differential.session(target) as sess:
        with tf.device(PS0):
            text = tf.compat.v1.placeholder_with_default("text", ())
            return sess.run(tf.raw_ops.StaticRegexFullMatch(input=text, pattern="(", name="bad_pattern"))


@pytest.mark.parametrize("executor", ["on", "off"])
def test_waiting_kernels_take_no_threads(run_with, executor):
    assert run_with(executor, many_wait, 24) == [i + 0.5 for i in range(24)]


@pytest.mark.parametrize("device", [PS0, WORKER0])
def test_a_kernel_that_blocks_until_another_has_run(run_with, device):
    assert run_with("on", wait_within_a_step, device) == 18.0


@pytest.mark.parametrize("device", [PS0, WORKER0])
def test_a_waiting_step_can_be_cancelled(run_with, device):
    assert run_with("on", cancelled, device) == ["DeadlineExceededError"] * 3


def test_partial_run(run_with):
    assert run_with("on", partial) == (6.0, 12.0)


def test_graphs_of_a_session_share_their_variables(run_with):
    assert run_with("on", graphs_share_state) == [1.0, 1.0, 11.0, 12.0, 12.0, 22.0, 24.0, 24.0, 34.0]


def test_expensive_kernels(run_with):
    """Enough runs to measure the kernels and distribute them."""
    assert run_with("on", busy, 8, 200, 60) == [1.0] * 60
