"""starwire.WorkQueue: every item once per epoch, whatever workers do, over every protocol."""

import os
import time

import pytest

from cluster import one, tf
from compared import OURS

SHAPE = (("ps", 1), ("worker", 2))
ITEMS = [f"part-{n}" for n in range(12)]


# In the task processes. ------------------------------------------------------------------------------------------------


def build(task, **options):
    import starwire

    with tf.device(f"/job:worker/task:{task}"):
        queue = starwire.WorkQueue(ITEMS, **options)
        return queue, queue.take(), queue.size()


def take_all(target, task, name, at_most=10**6, hold=None):
    """Takes items, of which `at_most`; with `hold` waits with the last one until that file exists."""
    with tf.Graph().as_default():
        queue, item, _ = build(task, name=name, num_epochs=2, seed=5, prefix="data/")
        with one().Session(target, config=one().ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{task}"])) as sess:
            sess.run(queue.initializer)
            taken = []
            try:
                while len(taken) < at_most:
                    taken.append(sess.run(item).decode())
            except tf.errors.OutOfRangeError:
                return taken
            if hold:
                open(f"{hold}.held", "w").close()
                while not os.path.exists(hold):
                    time.sleep(0.01)
    return taken


def take_in_two_sessions(target):
    """Each session ends while it works on an item."""
    with tf.Graph().as_default():
        queue, item, size = build(0, name="sessions", seed=5)
        found = []
        for _ in range(2):
            with one().Session(target) as sess:
                sess.run(queue.initializer)
                found += [sess.run(item), sess.run(item), int(sess.run(size))]
    return found


def wait_in_vain(target, task, name, others):
    """Takes all items but those that others have, then waits for these until the step's time is over; twice."""
    found = []
    with tf.Graph().as_default():
        queue, item, size = build(task, name=name, num_epochs=2, seed=5)
        with one().Session(target, config=one().ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{task}"])) as sess:
            for _ in range(2 * len(ITEMS) - others):
                found.append(sess.run(item).decode())
            for _ in range(2):
                try:
                    found.append(sess.run(item, options=one().RunOptions(timeout_in_ms=4000)).decode())
                except tf.errors.DeadlineExceededError as error:
                    found.append(type(error).__name__)
            return found, int(sess.run(size))


def train_on_queue(target, folder, at_most):
    """A job that is stopped after some items and goes on from its checkpoint. Returns the items of which it has made a step."""
    with tf.Graph().as_default():
        queue, item, size = build(0, name="trained", num_epochs=1)
        queue.add_summary()
        with tf.device("/job:ps/task:0"):
            step = one().train.get_or_create_global_step()
        with tf.control_dependencies([item]):
            update = one().assign_add(step, 1)
        seen = []
        options = dict(save_checkpoint_steps=1, save_summaries_steps=None, save_summaries_secs=None, log_step_count_steps=None)
        try:
            with one().train.MonitoredTrainingSession(target, checkpoint_dir=folder, **options) as sess:
                while len(seen) < at_most:
                    seen.append(sess.run([item, update])[0].decode())
        except tf.errors.OutOfRangeError:
            pass
    return seen


def produced(target):
    """The items of a queue runner's queue and of a dataset."""
    with tf.Graph().as_default():
        import starwire

        with tf.device("/job:worker/task:0"):
            first = starwire.WorkQueue(ITEMS, name="producer", num_clients=2)
            second = starwire.WorkQueue(ITEMS, name="dataset", shuffle=False, prefix="a/")
            item = first.input_producer().dequeue()
            after = one().data.make_initializable_iterator(second.input_dataset())
            from_dataset = after.get_next()
        found = [], []
        with one().Session(target) as sess:
            sess.run([first.initializer, second.initializer, after.initializer])
            coord = one().train.Coordinator()
            threads = one().train.start_queue_runners(sess, coord)
            for fetch, items in zip((item, from_dataset), found):
                try:
                    while True:
                        items.append(sess.run(fetch).decode())
                except tf.errors.OutOfRangeError:
                    pass
            coord.request_stop()
            coord.join(threads)
    return found


def refusals():
    import starwire

    found = []

    def attempt(*args, **kwargs):
        try:
            starwire.WorkQueue(*args, **kwargs)
        except (ValueError, RuntimeError) as error:
            found.append(str(error))

    attempt(["x"])
    with tf.Graph().as_default():
        attempt(["x"])
        for works, options in (([], {}), ("x", {}), ([1], {}), (["x", ""], {}), (["x"], {"num_epochs": 0}), (["x"], {"lease": -1})):
            attempt(works, worker="w", **options)
        queue = starwire.WorkQueue(["x"], worker="w", device="")
        with one().Session() as sess:
            try:
                sess.run(queue.take())
            except tf.errors.FailedPreconditionError as error:
                found.append(error.message)
    return found


# Tests. ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", OURS)
def test_workers_share_the_items(compared, way):
    cluster = compared.cluster(way, SHAPE)
    for task in range(2):
        cluster["worker", task].begin(take_all, cluster.target("worker", task), task, "shared")
    taken = [cluster["worker", task].result() for task in range(2)]
    assert sorted(taken[0] + taken[1]) == sorted(2 * [f"data/{item}" for item in ITEMS])


@pytest.mark.parametrize("way", ["grpc++", "star_server"])
def test_what_a_killed_worker_had_is_handed_out_again(compared, way, tmp_path):
    with compared.fresh(way, SHAPE) as cluster:
        hold = str(tmp_path / "go")
        cluster["worker", 1].begin(take_all, cluster.target("worker", 1), 1, "killed", 3, hold)
        while not os.path.exists(f"{hold}.held"):
            assert not cluster["worker", 1].ready(0.01)
        cluster["worker", 0].begin(take_all, cluster.target("worker", 0), 0, "killed")
        cluster["worker", 1].kill()
        cluster.start("worker", 1)
        again = cluster["worker", 1].call(take_all, cluster.target("worker", 1), 1, "killed")
        others = cluster["worker", 0].result()
        # The killed process was done with two, and the third is in one of the lists.
        assert len(again) + len(others) == 2 * len(ITEMS) - 2


@pytest.mark.parametrize("way", ["grpc++", "star_server"])
def test_a_wait_ends_with_its_step(compared, way, tmp_path):
    with compared.fresh(way, SHAPE) as cluster:
        hold = str(tmp_path / "go")
        cluster["worker", 0].begin(take_all, cluster.target("worker", 0), 0, "held", 1, hold)
        while not os.path.exists(f"{hold}.held"):
            assert not cluster["worker", 0].ready(0.01)
        found, left = cluster["worker", 1].call(wait_in_vain, cluster.target("worker", 1), 1, "held", 1)
        # The first wait was for the last item, and the take that followed was not its answer.
        assert found[-2:] == 2 * ["DeadlineExceededError"] and len(found) == 2 * len(ITEMS) + 1 and left == 1
        open(hold, "w").close()
        first = cluster["worker", 0].result()
        # Another session has the item that the last one was not done with.
        assert cluster["worker", 0].call(take_all, cluster.target("worker", 0), 0, "held") == first and len(first) == 1


@pytest.mark.parametrize("way", OURS)
def test_another_session_of_a_worker_gets_the_item_in_progress_again(compared, way):
    cluster = compared.cluster(way, SHAPE)
    one, two, left, three, four, left_then = cluster["worker", 0].call(take_in_two_sessions, cluster.target("worker", 0))
    assert three == two and len({one, two, four}) == 3 and (left, left_then) == (len(ITEMS) - 1, len(ITEMS) - 2)


@pytest.mark.ours
def test_a_checkpoint_has_the_queue(compared, tmp_path):
    with compared.fresh("star_server", SHAPE) as cluster:
        worker = cluster["worker", 0]
        first = worker.call(train_on_queue, cluster.target("worker", 0), str(tmp_path), 5)
        cluster["ps", 0].kill()
        cluster.start("ps", 0)
        second = worker.call(train_on_queue, cluster.target("worker", 0), str(tmp_path), 100)
        # The step of the fifth item was made, but it was in progress in the checkpoint.
        assert first[:4] + second == first[:4] + [first[4]] + [item for item in second if item not in first]
        assert sorted(first[:4] + second) == sorted(ITEMS)


@pytest.mark.ours
def test_producers(compared):
    cluster = compared.cluster("star_server", SHAPE)
    first, second = cluster["worker", 0].call(produced, cluster.target("worker", 0))
    assert sorted(first) == sorted(ITEMS) and second == [f"a/{item}" for item in ITEMS]


@pytest.mark.ours
def test_wrong_queues_are_refused(compared):
    cluster = compared.cluster("star_server", SHAPE)
    eager, worker, empty, text, numbers, blank, epochs, lease, created = cluster["worker", 0].call(refusals)
    assert "belongs to a graph" in eager and "pass worker=" in worker and "num_epochs" in epochs and "lease" in lease
    assert all("a list of strings" in error for error in (empty, text, numbers, blank)) and "run its initializer" in created
