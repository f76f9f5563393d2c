"""Parameter servers that are restarted between two steps and in the middle of one, and sessions and steps that rest for a while: training goes on."""

import os
import time

import pytest

import steps
from cluster import one, state, tf
from compared import OURS
from metrics import counters
from waiting import wait_until

SHAPE = (("ps", 3), ("worker", 1))
RESTS = {"STARWIRE_STAR_LIMITS": "session_idle_s=1"}


# In the task processes. ------------------------------------------------------------------------------------------------


def train(target, servers, folder):
    """Trains on the first servers under MonitoredTrainingSession, and pauses twice: between two steps, and within one. Returns the step at which each session
    began, and the last one."""
    began, paused = [], []

    def pause(name):
        if name in paused:
            return
        paused.append(name)
        open(f"{folder}/{name}.paused", "w").close()
        deadline = time.monotonic() + 120
        while not os.path.exists(f"{folder}/{name}.resumed"):
            assert time.monotonic() < deadline, name
            time.sleep(0.01)

    def compute(number, value):
        if number == 8:
            pause("within")
        return value

    class Watch(one().train.SessionRunHook):
        def after_create_session(self, session, coord):
            began.append(int(session.run(self.step)))

        def begin(self):
            self.step = one().train.get_global_step()

    with tf.Graph().as_default():
        with tf.device("/job:ps/task:0"):
            step = one().train.get_or_create_global_step()
        weights = []
        for server in range(servers):
            with tf.device(f"/job:ps/task:{server}"):
                weights.append(one().get_variable(f"w{server}", (4,), initializer=one().zeros_initializer()))
        with tf.device("/job:worker/task:0"):
            total = tf.add_n([w + 1.0 for w in weights])
            update = one().py_func(compute, [step.read_value(), total], tf.float32)
            update.set_shape(total.shape)
        updates = []
        for server, weight in enumerate(weights):
            with tf.device(f"/job:ps/task:{server}"):
                updates.append(one().assign_add(weight, update))
        with tf.device("/job:ps/task:0"), tf.control_dependencies(updates):
            train_op = one().assign_add(step, 1)
        hooks = [Watch(), one().train.StopAtStepHook(last_step=12)]
        options = dict(save_checkpoint_steps=2, save_summaries_steps=None, save_summaries_secs=None, log_step_count_steps=None)
        last = 0
        with one().train.MonitoredTrainingSession(target, checkpoint_dir=folder, hooks=hooks, **options) as sess:
            while not sess.should_stop():
                if last == 4:
                    pause("between")
                last = int(sess.run(train_op))
    return began, last


def fill(target):
    """Opens a session that only makes calls, and fills a queue, a table and the state of a generator of random numbers on the server."""
    graph = tf.Graph()
    with graph.as_default():
        with tf.device("/job:worker/task:0"):
            value = one().placeholder_with_default([1.0, 2.0, 3.0], (3,)) + 0.0
        with tf.device("/job:ps/task:0"):
            queue = tf.queue.FIFOQueue(10, [tf.float32], [()])
            table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, -1.0)
            fills = tf.group(queue.enqueue_many([value]), table.insert(tf.cast(value, tf.int64), value))
            sizes = [queue.size(), table.size(), one().random_uniform((), seed=3)]
        with tf.device("/job:worker/task:0"):
            sizes = [tf.identity(size) for size in sizes]
        sess = one().Session(target, graph=graph)
        sess.run(fills)
    state["filled"] = sess, sizes
    return look()


def look():
    sess, sizes = state["filled"]
    return [float(size) for size in sess.run(sizes)]


def slow_step(target, seconds):
    """A step whose second call to the server comes long after the first, and needs what that has kept. Returns the variable."""

    def compute(value):
        time.sleep(seconds)
        return value

    with tf.Graph().as_default():
        with tf.device("/job:ps/task:0"):
            v = one().get_variable("slow", initializer=[1.0, 2.0], use_resource=True)
            tripled = v.read_value() * 3.0
        with tf.device("/job:worker/task:1"):
            update = one().py_func(compute, [tripled], tf.float32)
            update.set_shape((2,))
        with tf.device("/job:ps/task:0"):
            pushed = v.assign_add(update + tripled)
        with one().Session(target) as sess:
            sess.run(v.initializer)
            return sess.run(pushed).tolist()


def error_of_slow_step(target):
    """A step whose cause of failure its task reports late, and whose consequence another task reports at once. Returns its error's name and text."""
    with tf.Graph().as_default():
        with tf.device("/job:worker/task:1"):
            queue = tf.queue.FIFOQueue(1, [tf.float32], [()])
            closed = queue.close()
            with tf.control_dependencies([queue.enqueue([1.0])]):
                failed = tf.constant(1.0) + 1.0
            slow = one().py_func(lambda: time.sleep(2), [], [], stateful=True)
        with tf.device("/job:ps/task:0"):
            consequence = failed * 2.0
        with tf.device("/job:worker/task:0"):
            fetched = consequence + 1.0
        with one().Session(target) as sess:
            sess.run(closed)
            try:
                sess.run([fetched, slow])
            except tf.errors.OpError as error:
                return type(error).__name__, str(error)
    return "no error", ""


# Tests. ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way, servers", [("grpc++", 1), ("grpc++", 2), *((way, 3) for way in OURS)])
def test_monitored_session_recovers_from_restarts(compared, way, servers, tmp_path):
    """Some calls of the step that meets the restarted server are cancelled. What counts is why: sessions recover from Aborted, and not from Cancelled."""
    cluster = compared.cluster(way, SHAPE)
    worker = cluster["worker", 0]
    worker.begin(train, cluster.target("worker", 0), servers, str(tmp_path))
    for name in ("between", "within"):
        while not (tmp_path / f"{name}.paused").exists():
            assert not worker.ready(0.01), worker.result()
        cluster["ps", servers - 1].kill()
        cluster.start("ps", servers - 1)
        (tmp_path / f"{name}.resumed").touch()
    began, last = worker.result(120)
    assert last == 12
    assert len(began) == 3 and 0 < began[1] <= 4 < began[2] <= 8, f"two sessions begin at a checkpoint: {began}"


@pytest.mark.parametrize("way", OURS)
def test_a_consequence_of_an_error_is_no_second_cause(compared, way):
    """What a task's failure does to another task arrives first: it stays marked as derived on its way through that task to the master."""
    cluster = compared.cluster(way, (("ps", 1), ("worker", 2)))
    name, text = cluster["worker", 1].call(error_of_slow_step, cluster.target("worker", 1))
    assert name == "CancelledError" and "is closed" in text, text
    assert "CANCELLED: From" not in text, f"a list of causes: {text}"


@pytest.mark.ours
def test_sessions_and_steps_may_rest(compared):
    """While a session rests and another one's step waits for its worker, the server looks for what nobody needs any more."""
    with compared.fresh("star_server", (("ps", 1), ("worker", 2)), environment=RESTS) as cluster:
        resting, slow = cluster["worker", 0], cluster["worker", 1]
        queued, keys, first = resting.call(fill, cluster.target("worker", 0))
        assert (queued, keys) == (3, 3)
        assert slow.call(slow_step, cluster.target("worker", 1), 6) == [7.0, 14.0]
        queued, keys, second = resting.call(look)
        assert (queued, keys) == (3, 3)
        assert second != first, "the generator goes on, and does not begin again"


@pytest.mark.ours
def test_sessions_of_a_lost_worker_are_released(compared):
    """A worker that dies and does not come back leaves nothing once it has been gone for long; another one that connects makes the server look."""
    with compared.fresh("star_server", (("ps", 1), ("worker", 2)), environment=RESTS) as cluster:
        cluster["worker", 0].call(fill, cluster.target("worker", 0))
        cluster["worker", 0].kill()
        wait_until(lambda: not counters(cluster["ps", 0])["connections_in"], 60, "the end of its connections")
        time.sleep(1.1)  # for longer than a session may rest: the server looks when somebody connects, and not before
        assert cluster["worker", 1].call(steps.run_steps, cluster.target("worker", 1), 1, task=1, filters=True) == 1
        cluster["ps", 0].wait_for_log("/job:worker/replica:0/task:0 has had no connection for too long: releasing its")
