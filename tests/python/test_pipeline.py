"""starwire.config(pipeline=N): steps overlap by at most N, nothing is lost or reordered, and results are those of an earlier step."""

import itertools
import os
import signal
import threading
import time

import pytest

from cluster import RemoteError, one, state, tf, worker_call
from training_job import batch, regression, setter
from waiting import wait_for


# In the worker process. -----------------------------------------------------------------------------------------------


def session(target, depth):
    import starwire

    return one().Session(target, config=starwire.config(pipeline=depth))


def on_server():
    return one().device("/job:ps/task:0")


def threads_end(before):
    """Whether those that pipelines have started since then end."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("starwire-pipeline") and thread not in before]
    for thread in threads:
        thread.join(20)
    return not any(thread.is_alive() for thread in threads)


def counting(name):
    """A step: takes a number of the worker along, and adds it up on the server. Returns feed, fetches, sum and count."""
    with one().device("/job:worker/task:0"):
        number = one().placeholder(tf.int64, [None], name="number")
        total_here = tf.reduce_sum(number)
    with on_server(), one().variable_scope(name, use_resource=True):
        total = one().get_variable("total", initializer=tf.constant(0, tf.int64))
        count = one().get_variable("count", initializer=tf.constant(0, tf.int64))
        step = tf.group(total.assign_add(total_here), count.assign_add(1))
    return number, {"step": step, "of": [total_here * 10]}, total, count


def results(target, depth, runs, name):
    """What `runs` runs return, and what they did."""
    import numpy as np

    with tf.Graph().as_default():
        number, fetches, total, count = counting(name)
        with session(target, depth) as sess:
            sess.run(one().global_variables_initializer())
            array, seen = np.zeros(1000, np.int64), []
            for run in range(1, runs + 1):
                array[:] = run  # the array belongs to the caller again when run() returns
                got = sess.run(dict(fetches), {number: array})
                assert got["step"] is None and list(got) == ["step", "of"], got
                seen.append(int(got["of"][0]) // 10_000)
            return seen, [int(value) for value in sess.run([total, count])]


def changed_in_place(target, depth):
    """What runs return to a caller that changes each result."""
    import collections

    Pair = collections.namedtuple("Pair", ["of", "names"])
    with tf.Graph().as_default():
        with on_server(), one().variable_scope("changed", use_resource=True):
            v = one().get_variable("v", initializer=tf.constant([1.0, 2.0]))
            step = tf.group(v.assign(v * 1.0))
        with one().device("/job:worker/task:0"):
            doubled, names = v.read_value() * 2.0, tf.constant(["a", "b"])
        with session(target, depth) as sess:
            sess.run(v.initializer)
            seen = []
            for _ in range(depth + 3):
                got = sess.run({"step": step, "pair": Pair([doubled], names)})
                assert isinstance(got["pair"], Pair) and got["step"] is None and len(got) == 2
                seen.append((got["pair"].of[0].tolist(), got["pair"].names.tolist()))
                got["pair"].of[0] *= -100
                got["pair"].names[0] = b"c"
                got["pair"].of.append(None)
                got["more"] = None
            return seen


def overlap(target, depth):
    """How many steps are under way when the caller comes back, and how many at most."""
    with tf.Graph().as_default():
        with on_server():
            begun = tf.queue.FIFOQueue(100, [tf.int32], [()], shared_name=f"begun{depth}")
            go = tf.queue.FIFOQueue(100, [tf.int32], [()], shared_name=f"go{depth}")
            with tf.control_dependencies([begun.enqueue(1)]):
                step = tf.group(go.dequeue())
            allow, size = go.enqueue(1), begun.size()
        with session(target, depth) as sess, one().Session(target) as other:
            other.run(allow)
            sess.run(step)
            for _ in range(depth):
                sess.run(step)  # returns, although nothing lets these go on

            def have_begun(number):
                deadline = time.monotonic() + 60
                while other.run(size) < number and time.monotonic() < deadline:
                    time.sleep(0.01)
                return int(other.run(size))

            counts = [have_begun(1 + depth)]
            thread = threading.Thread(target=sess.run, args=(step,))
            thread.start()
            counts.append(have_begun(2 + depth))
            time.sleep(0.2)  # nothing more may begin in this time
            counts.append((int(other.run(size)), thread.is_alive() or depth == 0))
            for _ in range(depth + 1):
                other.run(allow)
            thread.join(60)
            return counts, thread.is_alive()


def two_threads(target):
    """Each thread gets the results of its own steps; close() waits for those of both."""
    with tf.Graph().as_default():
        number, fetches, total, count = counting("two_threads")
        seen = {}
        with session(target, 2) as sess, one().Session(target) as other:
            other.run(one().global_variables_initializer())

            def steps(first):
                seen[first] = [int(sess.run(fetches, {number: [first + step]})["of"][0]) // 10 - first for step in range(20)]

            threads = [threading.Thread(target=steps, args=(first,)) for first in (1000, 2000)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            sess.close()
            return seen, [int(value) for value in other.run([total, count])]


def blocked(target):
    """close() while another thread waits in a step: whether the thread ends, and what it sees."""
    with tf.Graph().as_default():
        with on_server():
            never = tf.queue.FIFOQueue(1, [tf.int32], [()], shared_name="never")
            begun = tf.queue.FIFOQueue(10, [tf.int32], [()], shared_name="never_begun")
            with tf.control_dependencies([begun.enqueue(1)]):
                step = tf.group(never.dequeue())
            put, size = never.enqueue(1), begun.size()
        sess, seen, runs, before = session(target, 1), [], [], threading.enumerate()

        def steps():
            try:
                while True:
                    runs.append(1)
                    sess.run(step)
            except tf.errors.OpError as error:
                seen.append(type(error).__name__)

        sess.run(put)
        thread = threading.Thread(target=steps)
        thread.start()
        with one().Session(target) as other:
            deadline = time.monotonic() + 60
            # The first step has its element. The second waits for another, and the thread for the second.
            while (other.run(size) < 2 or len(runs) < 3) and time.monotonic() < deadline:
                time.sleep(0.01)
        time.sleep(0.1)  # the thread has called the third run, in which it waits
        sess.close()
        thread.join(60)
        return thread.is_alive(), seen, threads_end(before)


def failing(target, where):
    """The fourth step fails. Returns the runs that raised, the error, and the count afterwards."""
    with tf.Graph().as_default():
        number, fetches, total, count = counting(f"failing_{where}")
        with one().device("/job:worker/task:0"):
            check = one().debugging.assert_less(number, tf.constant(4, tf.int64), message="too large")
        with tf.control_dependencies([check]):
            fetches = [fetches["step"], tf.reduce_sum(tf.identity(number))]
        sess, other = session(target, 1), one().Session(target)
        other.run(one().global_variables_initializer())
        raised = []
        for run in range(1, 5 if where == "close" else 8):
            try:
                sess.run(fetches, {number: [run if run == 4 else 1]})
            except tf.errors.InvalidArgumentError as error:
                raised.append((run, "too large" in error.message))
        try:
            sess.close()
        except tf.errors.InvalidArgumentError as error:
            raised.append(("close", "too large" in error.message))
        return raised, int(other.run(count))


def a_dataset(target, depth):
    """Every batch is used once."""
    with tf.Graph().as_default():
        with one().device("/job:worker/task:0"):
            batch = one().data.make_one_shot_iterator(tf.data.Dataset.range(50)).get_next()
        with on_server(), one().variable_scope(f"dataset{depth}", use_resource=True):
            total = one().get_variable("total", initializer=tf.constant(0, tf.int64))
            step = tf.group(total.assign_add(batch))
        with session(target, depth) as sess:
            sess.run(total.initializer)
            runs = 0
            try:
                while True:
                    sess.run(step)
                    runs += 1
            except tf.errors.OutOfRangeError:
                return int(sess.run(total)), runs


def is_a_step(target):
    """Which runs may return what was there before: what each sees of a counter that another session sets."""
    import numpy as np

    with tf.Graph().as_default():
        with on_server(), one().variable_scope("is_a_step", use_resource=True):
            counter = one().get_variable("counter", initializer=tf.constant(0))
            value = counter.read_value()
            nothing, feed = tf.no_op(), one().placeholder(tf.int32, [])
            setting = counter.assign(feed)
        seen = {}
        with session(target, 1) as sess, one().Session(target) as other:
            called = (lambda call: lambda: call(3)[0])(sess.make_callable([value, nothing], [feed]))
            calls_reads = (lambda call: lambda: call()[0])(sess.make_callable([value, value]))
            kinds = {
                "with an operation": lambda: sess.run([value, nothing])[0],
                "by name": lambda: sess.run([value.name, nothing])[0],
                "in a tuple in a dictionary": lambda: sess.run({"a": (value, [nothing])})["a"][0],
                "fed data": lambda: sess.run([value, nothing], {feed: 3})[0],
                "fed lists": lambda: sess.run([value, nothing], {feed: np.int32(3)})[0],
                "called": called,
                "without an operation": lambda: sess.run([value, value])[0],
                "called, without an operation": calls_reads,
                "with options": lambda: sess.run([value, nothing], options=one().RunOptions(trace_level=one().RunOptions.SOFTWARE_TRACE), run_metadata=one().RunMetadata())[0],
                "with empty options": lambda: sess.run([value, nothing], options=one().RunOptions(), run_metadata=one().RunMetadata())[0],
                "fed an object": lambda: sess.run([value, nothing], {feed: Three()})[0],
            }
            for name, run in kinds.items():
                seen[name] = []
                sess.run([])  # ends the sequence of the kind before, whose fetches may be the same
                for number in (1, 2):
                    other.run(setting, {feed: number})
                    seen[name].append(int(run()))
            # A run of another kind comes after all steps before it.
            alternating = []
            for number in range(6):
                other.run(setting, {feed: number})
                alternating.append(int(sess.run([value, nothing] if number % 2 else {"v": value, "n": nothing}, {})[0 if number % 2 else "v"]))
        return seen, alternating


class Three:
    def __array__(self, dtype=None, copy=None):
        import numpy as np

        return np.array(3, dtype)


def train(target, depth, steps=8):
    """As training_job.train with Adam, with this depth; None: without a configuration."""
    import numpy as np

    with tf.Graph().as_default():
        with one().device(setter()):
            ids, x, loss = regression(True)
            train_op = one().train.AdamOptimizer(0.01).minimize(loss)
        with session(target, depth) if depth is not None else one().Session(target) as sess:
            sess.run(one().global_variables_initializer())
            losses = []
            for step in range(steps):
                i, xs = batch(step % 8)
                losses.append(float(sess.run([loss, train_op], {ids: i, x: xs})[0]))
            return losses, [np.asarray(value).tobytes() for value in sess.run(one().global_variables())]


def monitored(target, directory, depth, until):
    """Returns how often it ran, the steps that a hook saw, and the last checkpoint's name and global step."""
    import starwire

    class Seen(one().train.SessionRunHook):
        def __init__(self):
            self.steps = []

        def before_run(self, run_context):
            return one().train.SessionRunArgs(one().train.get_global_step())

        def after_run(self, run_context, run_values):
            self.steps.append(int(run_values.results))

    seen, runs = Seen(), 0
    with tf.Graph().as_default():
        with one().device(setter()):
            step = one().train.get_or_create_global_step()
            ids, x, loss = regression(True)
            train_op = one().train.AdagradOptimizer(0.1).minimize(loss, global_step=step)
        hooks = [seen, one().train.StopAtStepHook(last_step=until), one().train.NanTensorHook(loss), one().train.LoggingTensorHook([loss], every_n_iter=7)]
        with one().train.MonitoredTrainingSession(
            target, checkpoint_dir=directory, hooks=hooks, save_checkpoint_steps=10, save_summaries_steps=None, save_summaries_secs=None, config=starwire.config(pipeline=depth)
        ) as sess:
            while not sess.should_stop():
                i, xs = batch(runs)
                sess.run([train_op, loss], {ids: i, x: xs})
                runs += 1
    last = tf.train.latest_checkpoint(directory)
    return runs, seen.steps, int(last.rsplit("-", 1)[1]), int(tf.train.load_variable(last, "global_step"))


def monitored_overlap(target, directory, depth):
    """How many steps of a MonitoredTrainingSession with its usual hooks are under way when the caller comes back."""
    import starwire

    with tf.Graph().as_default():
        with on_server():
            counted = one().train.get_or_create_global_step()
            begun = tf.queue.FIFOQueue(100, [tf.int32], [()], shared_name="monitored_begun")
            go = tf.queue.FIFOQueue(100, [tf.int32], [()], shared_name="monitored_go")
            with tf.control_dependencies([begun.enqueue(1)]):
                taken = go.dequeue()
            with tf.control_dependencies([taken]):
                step = tf.group(counted.assign_add(1))
            allow, size = go.enqueue(1), begun.size()
        config = starwire.config(pipeline=depth)
        with one().train.MonitoredTrainingSession(target, checkpoint_dir=directory, config=config) as sess, one().Session(target) as other:
            # The first run's hooks read the global step, so the second is waited for as well.
            for _ in range(2):
                other.run(allow)
                sess.run(step)
            for _ in range(depth):
                sess.run(step)  # returns, although nothing lets these go on
            deadline = time.monotonic() + 60
            while other.run(size) < 2 + depth and time.monotonic() < deadline:
                time.sleep(0.01)
            under_way = int(other.run(size)) - 2
            for _ in range(depth):
                other.run(allow)
    return under_way, int(tf.train.load_variable(directory, "global_step"))


def end_of_input(number):
    if number[0] == 4:
        raise StopIteration  # OutOfRangeError


def monitored_failing(target, how, last):
    """The last step of a session that is no chief fails. Returns the error's type, how many sessions the hook saw, and whether it saw the end."""
    import starwire

    class Seen(one().train.SessionRunHook):
        sessions, ended = 0, False

        def after_create_session(self, session, coord):
            self.sessions += 1

        def end(self, session):
            self.ended = True

    def lose(*_):
        raise tf.errors.UnavailableError(None, None, "gone")

    seen, raised = Seen(), None
    with tf.Graph().as_default():
        number, fetches, _, _ = counting(f"monitored_{how}_{last.replace(' ', '_')}")
        with one().device("/job:worker/task:0"):
            check = one().py_func(end_of_input, [number], []) if last == "the input ends" else one().debugging.assert_less(number, tf.constant(4, tf.int64))
        with tf.control_dependencies([check]):
            fetches = [fetches["step"], tf.identity(number)]
        with one().Session(target) as other:
            other.run(one().global_variables_initializer())
        sess = one().train.MonitoredTrainingSession(target, is_chief=False, hooks=[seen], config=starwire.config(pipeline=1))
        try:
            for run in range(1, 5):
                if run == 4 and last == "the server is lost":
                    sess._tf_sess()._do_run = lose
                sess.run(fetches, {number: [1 if last == "the server is lost" else run]})
            sess.close() if how == "close" else sess.__exit__(None, None, None)
        except tf.errors.OpError as error:
            raised = type(error).__name__
    return raised, seen.sessions, seen.ended


def in_a_signal_handler(target, closes):
    """A handler runs the session, or closes it, while the main thread waits in a step. Returns what the handler saw, and what came after it."""
    with tf.Graph().as_default():
        with on_server(), one().variable_scope(f"signal{closes}", use_resource=True):
            begun = tf.queue.FIFOQueue(100, [tf.int32], [()], shared_name=f"signal_begun{closes}")
            go = tf.queue.FIFOQueue(100, [tf.int32], [()], shared_name=f"signal_go{closes}")
            count = one().get_variable("count", initializer=tf.constant(0))
            with tf.control_dependencies([begun.enqueue(1)]):
                taken = go.dequeue()
            with tf.control_dependencies([taken]):
                step = tf.group(count.assign_add(1))
            allow, size, value = go.enqueue(1), begun.size(), count.read_value()
        seen, handles, before = [], threading.Event(), threading.enumerate()
        sess, other = session(target, 1), one().Session(target)

        def handle(number, frame):
            handles.set()
            if closes:
                return seen.append(sess.close())
            seen.append(int(sess.run(value)))
            other.run(allow)
            sess.run(step)

        def interrupt():
            deadline = time.monotonic() + 60
            while other.run(size) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGUSR1)
            handles.wait(60)
            for _ in range(2):
                other.run(allow)

        other.run([count.initializer, allow])
        old = signal.signal(signal.SIGUSR1, handle)
        interrupts = threading.Thread(target=interrupt)
        interrupts.start()
        for _ in range(3):
            sess.run(step)
        interrupts.join(60)
        signal.signal(signal.SIGUSR1, old)
        if not closes:
            return seen, int(sess.run(value))
        assert threads_end(before)
        return seen, int(other.run(value))


def other_runs():
    """What each of them sees of a step that is under way."""
    from tensorflow.core.protobuf.config_pb2 import CallableOptions

    with tf.Graph().as_default():
        feed, count = one().placeholder(tf.int32, []), one().get_variable("count", initializer=tf.constant(0), use_resource=True)
        with tf.control_dependencies([one().py_func(lambda: time.sleep(0.3), [], [])]):
            step = tf.group(count.assign_add(1))
        early = count.read_value()  # read when a partial run is set up
        fed = early + feed
        with tf.control_dependencies([feed]):
            late = count.read_value()
        seen = []
        with session("", 1) as sess:
            sess.run(count.initializer)

            def after_steps(run):
                for _ in range(2):
                    sess.run(step)  # the second is under way
                seen.append(int(run()))

            call, handle = sess._make_callable_from_options(CallableOptions(fetch=[early.name])), sess.partial_run_setup([late], [feed])
            after_steps(lambda: call()[0])
            after_steps(lambda: sess.partial_run(handle, late, {feed: 0}))
            after_steps(lambda: sess.partial_run(sess.partial_run_setup([fed], [feed]), fed, {feed: 0}))
            return seen


def losing_the_server(target, depth, started):
    """Steps until something fails. Returns the error's type."""
    with tf.Graph().as_default():
        number, fetches, _, _ = counting("losing")
        sess = session(target, depth)
        sess.run(one().global_variables_initializer())
        deadline = time.monotonic() + 60
        try:
            for step in itertools.count():
                assert time.monotonic() < deadline
                sess.run(fetches, {number: [1]})
                if step == 20:
                    open(started, "w").close()
        except tf.errors.OpError as error:
            return type(error).__name__


def leave_steps(target, fails):
    """Steps that take long, of which two are under way when this returns. The last one may fail."""
    with tf.Graph().as_default():
        with on_server():
            count = one().get_variable("left", initializer=tf.constant(0), use_resource=True)
        with one().device("/job:worker/task:0"):
            number = one().placeholder(tf.int32, [])
            slow = one().py_func(lambda: time.sleep(1), [], [])
            with tf.control_dependencies([slow, one().debugging.assert_less(number, 5 if fails else 6)]):
                added = tf.identity(1)
        step = count.assign_add(added).op
        sess = state["left"] = session(target, 2)
        sess.run(count.initializer)
        for run in range(1, 6):
            sess.run(step, {number: run})


def count_left(target):
    with tf.Graph().as_default():
        with on_server():
            count = one().get_variable("left", initializer=tf.constant(0), use_resource=True)
        with one().Session(target, config=one().ConfigProto(device_filters=["/job:ps"])) as sess:
            return int(sess.run(count))


def refused(depth):
    import starwire

    starwire.config(pipeline=depth)


# Tests. ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_each_run_returns_a_result_of_its_own(cluster, depth):
    assert worker_call(cluster, changed_in_place, depth) == [([2.0, 4.0], [b"a", b"b"])] * (depth + 3)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_results_are_those_of_an_earlier_step(cluster, depth):
    seen, (total, count) = worker_call(cluster, results, depth, 12, f"results{depth}")
    assert seen == [max(1, run - depth) for run in range(1, 13)]
    assert (total, count) == (1000 * sum(range(1, 13)), 12), "nothing is lost, and a later run sees all of it"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_steps_overlap_by_the_depth(cluster, depth):
    (after_depth, with_another, (at_most, waits)), stuck = worker_call(cluster, overlap, depth)
    assert (after_depth, with_another, at_most, waits, stuck) == (1 + depth, 2 + depth, 2 + depth, True, False)


def test_threads_have_sequences_of_their_own(cluster):
    seen, (total, count) = worker_call(cluster, two_threads)
    assert seen == {first: [max(0, step - 2) for step in range(20)] for first in (1000, 2000)}
    assert (total, count) == (3000 * 20 + 2 * sum(range(20)), 40)


def test_close_ends_the_steps_of_a_thread_that_waits(cluster):
    stuck, seen, ended = worker_call(cluster, blocked, timeout=120)
    assert not stuck and seen == ["CancelledError"] and ended


def test_an_error_is_raised_by_a_later_run(cluster):
    raised, count = worker_call(cluster, failing, "run")
    # Step 4 failed beside step 5, which counts; run 6 was the first of a new sequence.
    assert raised == [(5, True)] and count >= 5


def test_an_error_of_the_last_step_is_raised_by_close(cluster):
    raised, count = worker_call(cluster, failing, "close")
    assert raised == [("close", True)] and count >= 3


@pytest.mark.parametrize("depth", [1, 4])
def test_a_dataset_is_used_once(cluster, depth):
    total, runs = worker_call(cluster, a_dataset, depth)
    assert total == sum(range(50)) and 50 <= runs <= 50 + depth


def test_only_steps_return_earlier_results(cluster):
    seen, alternating = worker_call(cluster, is_a_step)
    steps = ("with an operation", "by name", "in a tuple in a dictionary", "fed data", "fed lists", "called", "with empty options")
    assert seen == {name: [1, 1] if name in steps else [1, 2] for name in seen}
    assert alternating == list(range(6))


def test_depth_zero_trains_with_the_same_bits(cluster, stock):
    assert worker_call(cluster, train, 0) == worker_call(cluster, train, None) == worker_call(stock, train, 0)


def test_overlapping_steps_learn(cluster):
    losses, _ = worker_call(cluster, train, 2, 400)
    sequential, _ = worker_call(cluster, train, 0, 400)
    # Which updates a step sees depends on the machine: from 0.5 to 0.9 of 23 were seen, and 0.5 without overlap.
    assert losses[-1] < 0.1 * losses[0] and sequential[-1] < 0.05 * losses[0]


@pytest.mark.parametrize("depth", [0, 2])
def test_monitored_session(cluster, tmp_path, depth):
    runs, steps, name, saved = worker_call(cluster, monitored, str(tmp_path / "model"), depth, 45, timeout=120)
    # The hook that stops counts on from an earlier step, but then asks once more, after all steps so far.
    assert 45 <= runs <= 45 + depth
    assert len(steps) == runs and all(run - 2 * depth - 1 <= step <= run for run, step in enumerate(steps, 1)), steps
    # Every run is a step, and the last checkpoint has them all.
    assert name == saved == runs


def test_steps_of_a_monitored_session_overlap(cluster, tmp_path):
    assert worker_call(cluster, monitored_overlap, str(tmp_path / "model"), 2, timeout=120) == (2, 4)


@pytest.mark.parametrize("how", ["close", "exit"])
def test_an_error_of_the_last_step_is_raised_at_the_end_of_a_monitored_session(cluster, how):
    assert worker_call(cluster, monitored_failing, how, "too large") == ("InvalidArgumentError", 1, False)


def test_the_last_step_of_a_monitored_session_may_end_the_input_or_lose_a_server(cluster):
    assert worker_call(cluster, monitored_failing, "exit", "the input ends") == (None, 1, True)
    assert worker_call(cluster, monitored_failing, "close", "the input ends") == ("OutOfRangeError", 1, True)
    assert worker_call(cluster, monitored_failing, "exit", "the server is lost") == (None, 2, True)


@pytest.mark.parametrize("closes, expected", [(False, ([3], 4)), (True, ([None], 3))])
def test_a_signal_handler_may_use_the_session(cluster, closes, expected):
    assert worker_call(cluster, in_a_signal_handler, closes) == expected


def test_other_runs_wait_for_the_steps_under_way(cluster):
    assert cluster["worker", 0].call(other_runs) == [2, 4, 6]


def test_a_lost_server_is_an_error(make_cluster, tmp_path):
    cluster = make_cluster(environment={"MINE": "1"})
    cluster["worker", 0].begin(losing_the_server, cluster.target("worker", 0), 2, str(tmp_path / "started"))
    wait_for(tmp_path / "started")
    cluster["ps", 0].kill()
    assert cluster["worker", 0].result(60) in ("UnavailableError", "AbortedError")


@pytest.mark.parametrize("fails", [False, True])
def test_a_program_that_does_not_close_its_session_makes_its_steps(make_cluster, fails):
    cluster = make_cluster(environment={"MINE": "2"})
    cluster["worker", 0].call(leave_steps, cluster.target("worker", 0), fails)
    assert cluster["worker", 0].exit() == 0
    assert cluster["ps", 0].call(count_left, cluster.target("ps", 0)) == (4 if fails else 5)
    assert ("InvalidArgumentError" in cluster["worker", 0].full_log()) == fails


@pytest.mark.parametrize("depth", [-1, 17, 1.5, True, "2"])
def test_a_depth_that_makes_no_sense_is_refused(cluster, depth):
    with pytest.raises(RemoteError, match="must be a number of steps from 0 to 16"):
        cluster["worker", 0].call(refused, depth)
