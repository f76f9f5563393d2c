"""Parameter servers that are killed and come back with their variables (STARWIRE_STATE): no session notices, and no update is there twice."""

import resource
import subprocess
import time
from pathlib import Path

import pytest

import sparse_training
from cluster import one, state, tf
from counting import STARCTL, Counting, begin_counting, count, counted, environment, flush, stop
from metrics import counters
from tensors import digest
from waiting import wait_until

pytestmark = pytest.mark.ours

SHAPE = (("ps", 2), ("worker", 1))


# In the task processes. ------------------------------------------------------------------------------------------------


def begin(target, optimizer, use_resource):
    """Opens a session that trains embeddings, and initialises it."""
    graph = tf.Graph()
    with graph.as_default():
        feeds, loss, train = sparse_training.build(optimizer, use_resource)
        sess = one().Session(target, graph=graph)
        sess.run(one().global_variables_initializer())
        state["job"] = sess, feeds, loss, train, one().global_variables()


def train(first, steps):
    """Returns the losses."""
    import numpy as np

    sess, feeds, loss, update, _ = state["job"]
    losses = []
    for number in range(first, first + steps):
        rng = np.random.default_rng(number)
        batch = {feed: rng.integers(0, sparse_training.ROWS, (9,) if len(feed.shape) == 1 else (9, 3)) for feed in feeds}
        losses.append(digest(sess.run([loss, update], batch)[0]))
    return losses


def variables():
    sess, *_, all_variables = state["job"]
    return {variable.name: digest(value) for variable, value in zip(all_variables, sess.run(all_variables))}


def limit_files(size):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def begin_wide(target):
    graph = tf.Graph()
    with graph.as_default():
        rows = one().placeholder(tf.int64, [2])
        with tf.device("/job:ps/task:0"):
            table = one().get_variable("wide", (100_000, 16), tf.float32, one().ones_initializer())
        with tf.device("/job:worker/task:0"):
            update = tf.ones((2, 16))
        with tf.device("/job:ps/task:0"):
            add = one().scatter_add(table, rows, update).op
        sess = one().Session(target, graph=graph)
        sess.run(one().global_variables_initializer())
        state["wide"] = sess, rows, add


def add_wide(first, second):
    sess, rows, add = state["wide"]
    sess.run(add, {rows: [first, second]})


def find(target, optimizer, use_resource):
    graph = tf.Graph()
    with graph.as_default():
        feeds, loss, update = sparse_training.build(optimizer, use_resource)
        sess = one().Session(target, graph=graph)
        assert sess.run(one().report_uninitialized_variables()).size == 0
        state["job"] = sess, feeds, loss, update, one().global_variables()


def reset_and_restore(prefix):
    """Initialises the variables again, then restores a checkpoint."""
    sess, *_, all_variables = state["job"]
    with sess.graph.as_default():
        initialise, saver = one().global_variables_initializer(), one().train.Saver(all_variables)
        before = variables()
        sess.run(initialise)
        assert variables() != before
        saver.restore(sess, prefix)
    return variables()


def apply_changes(full, changes):
    """Returns the variables of an export and what another one says has changed since, and the session's."""
    sess, *_, all_variables = state["job"]
    full, changes = tf.train.load_checkpoint(full), tf.train.load_checkpoint(changes)
    made, parts = {variable.op.name: full.get_tensor(variable.op.name) for variable in all_variables}, 0
    for name in changes.get_variable_to_shape_map():
        if name.endswith("/changed_values"):
            name, parts = name.removesuffix("/changed_values"), parts + 1
            made[name][changes.get_tensor(f"{name}/changed_rows")] = changes.get_tensor(f"{name}/changed_values")
        elif not name.endswith("/changed_rows"):
            made[name] = changes.get_tensor(name)
    assert parts > 5
    real = dict(zip(made, sess.run(all_variables)))
    return [{name: digest(value) for name, value in values.items()} for values in (made, real)]


def read_checkpoint(prefix):
    """Reads all tensors, whose checksums TensorFlow checks. Returns the global step."""
    reader = tf.train.load_checkpoint(prefix)
    names = reader.get_variable_to_shape_map()
    assert len(names) > 12
    return int({name: reader.get_tensor(name) for name in names}["global_step"])


def train_monitored(target, folder, marks):
    """MonitoredTrainingSession with a checkpoint every two steps; waits after the fifth step for `marks/killed`. Returns the sessions that began, and the variable
    after each step."""
    began, seen = [], []

    class Watch(one().train.SessionRunHook):
        def after_create_session(self, session, coord):
            began.append(len(seen))

    with tf.Graph().as_default():
        with one().device(one().train.replica_device_setter(ps_tasks=2, worker_device="/job:worker/task:0")):
            step = one().train.get_or_create_global_step()
            weights = [one().get_variable(f"w{at}", (4,), initializer=one().zeros_initializer()) for at in range(3)]
            loss = tf.add_n([tf.reduce_sum(tf.square(weight - 1.0)) for weight in weights])
            update = one().train.GradientDescentOptimizer(0.1).minimize(loss, global_step=step)
        options = dict(save_checkpoint_steps=2, save_summaries_steps=None, save_summaries_secs=None, log_step_count_steps=None)
        hooks = [Watch(), one().train.StopAtStepHook(last_step=12)]
        with one().train.MonitoredTrainingSession(target, checkpoint_dir=folder, hooks=hooks, **options) as sess:
            while not sess.should_stop():
                seen.append(digest(sess.run([update, loss])[1]))
                if len(seen) == 5:
                    Path(marks, "trained").touch()
                    deadline = time.monotonic() + 120
                    while not Path(marks, "killed").exists():
                        assert time.monotonic() < deadline
                        time.sleep(0.01)
    return began, seen


def take(target):
    """Takes from an empty queue of the first server. Returns the error's name."""
    graph = tf.Graph()
    if "take" not in state:
        with graph.as_default():
            with tf.device("/job:ps/task:0"):
                queue = tf.queue.FIFOQueue(3, [tf.float32], [()], shared_name="shared")
            with tf.device("/job:worker/task:0"):
                doubled = queue.dequeue() * 2.0
            state["take"] = one().Session(target, graph=graph), doubled
    sess, doubled = state["take"]
    try:
        return float(sess.run(doubled))
    except tf.errors.OpError as error:
        return type(error).__name__


def begin_whole(target):
    """Steps that are on the server as a whole, which TensorFlow runs, in two sessions. A third one is closed."""
    state["whole"] = []
    for session in range(3):
        with tf.Graph().as_default() as graph, tf.device("/job:ps/task:0"):
            counts = [one().get_variable(f"whole{session}{at}", (), tf.int64, one().zeros_initializer()) for at in range(3)]
            adds = [one().assign_add(count, 1).op for count in counts]
            sess = one().Session(target, graph=graph)
            sess.run(one().global_variables_initializer())
        state["whole"].append((sess, counts, adds))
    add_whole([(session, at) for session in range(3) for at in range(3)])
    state["whole"].pop()[0].close()


def outcome(session, at):
    """Runs a step, or the initialiser if `at` is negative. Returns the error's name."""
    sess, _, adds = state["whole"][session]
    try:
        sess.run(adds[at] if at >= 0 else sess.graph.get_operation_by_name("init"))
        return "OK"
    except tf.errors.OpError as error:
        return type(error).__name__


def begin_mixed(target):
    """A session whose steps count on a server, and take from a queue there."""
    with tf.Graph().as_default() as graph:
        with tf.device("/job:ps/task:0"):
            count = one().get_variable("mixed", (), tf.int64, one().zeros_initializer())
            queue = tf.queue.FIFOQueue(3, [tf.float32], [()], shared_name="mixed")
            steps = {"add": one().assign_add(count, 1), "put": queue.enqueue(1.0), "size": queue.size()}
        with tf.device("/job:worker/task:0"):
            steps["take"] = queue.dequeue() * 2.0
            steps["count"] = count * 1
        sess = one().Session(target, graph=graph)
        sess.run(one().global_variables_initializer())
        state["mixed"] = sess, steps
    return [mixed(step) for step in ("put", "put", "take", "add")]


def mixed(step):
    """Returns what a step returns, or the error's name."""
    sess, steps = state["mixed"]
    try:
        result = sess.run(steps[step])
        return None if result is None else float(result)
    except tf.errors.OpError as error:
        return type(error).__name__


def add_whole(which):
    for session, at in which:
        sess, _, adds = state["whole"][session]
        sess.run(adds[at])


def whole():
    return [[int(value) for value in sess.run(counts)] for sess, counts, _ in state["whole"]]


# Tests. ----------------------------------------------------------------------------------------------------------------


def train_with(cluster, optimizer, use_resource, between):
    worker = cluster["worker", 0]
    worker.call(begin, cluster.target("worker", 0), optimizer, use_resource)
    losses = []
    for part in range(3):
        losses += worker.call(train, 4 * part, 4)
        between(part)
    return losses, worker.call(variables)


def test_a_server_that_came_back_takes_no_graph_for_another(fresh_cluster, tmp_path):
    """Each session numbers its graphs from one. The steps come in another order than before the kill."""
    cluster = fresh_cluster((("ps", 1), ("worker", 1)), protocol="star_server", environment=environment(tmp_path))
    worker = cluster["worker", 0]
    worker.call(begin_whole, cluster.target("worker", 0))
    for expected in (3, 5):
        flush(cluster["ps", 0])
        cluster["ps", 0].kill()
        cluster.start("ps", 0)
        order = [(0, 2), (1, 1), (0, 1), (1, 2), (1, 0), (0, 0)]
        worker.call(add_whole, order + order[::-1])
        assert worker.call(whole) == [[expected] * 3] * 2


@pytest.mark.parametrize("protocol", ["grpc++", "star_server"])
def test_a_server_without_a_state_that_comes_back_is_an_error(fresh_cluster, protocol):
    """Sessions recover from it, but not from variables without a value; and no graph is taken for another."""
    cluster = fresh_cluster((("ps", 1), ("worker", 1)), protocol=protocol, environment={"STARWIRE_RECOVER_S": 60})
    worker = cluster["worker", 0]
    worker.call(begin_whole, cluster.target("worker", 0))
    cluster["ps", 0].kill()
    cluster.start("ps", 0)
    order = [(0, -1), (0, 2), (1, 1), (1, -1), (0, 1)]
    assert [worker.call(outcome, session, at) for session, at in order] == ["AbortedError"] * len(order)


ADAM = pytest.mark.deep(reason="its slots are kept like those of Adagrad, and its powers of beta like other variables")
OTHER_KIND = pytest.mark.deep(reason="test_training_goes_on_with_the_same_values has both kinds of variables; here the kind makes no difference")


@pytest.mark.parametrize("use_resource", [False, True])
@pytest.mark.parametrize("optimizer", ["Adagrad", pytest.param("Adam", marks=ADAM)])
def test_training_goes_on_with_the_same_values(compared, tmp_path, optimizer, use_resource):
    """Both servers are killed in turn. Losses, variables and slots are those of training without kills, bit by bit."""
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path)) as cluster:

        def kill(server):
            if server < 2:
                flush(cluster["ps", server])
                cluster["ps", server].kill()
                cluster.start("ps", server)
                cluster["ps", server].wait_for_log("has its state back from")

        killed = train_with(cluster, optimizer, use_resource, kill)
    with compared.fresh("star_server", SHAPE) as cluster:
        assert killed == train_with(cluster, optimizer, use_resource, lambda part: None)


@pytest.mark.parametrize("use_resource", [False, True])
def test_no_update_is_there_twice_and_at_most_the_last_second_is_missing(compared, tmp_path, use_resource):
    """A server is killed three times while a session trains: no step fails, calls are there as a whole or not at all, the other server has all of them."""
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path)) as cluster:
        counting, begun = Counting(cluster, tmp_path, use_resource), time.monotonic()
        restarts = 0.0
        for _ in range(3):
            time.sleep(1.7)  # the fault: a kill at no particular moment between two flushes, which are a second apart
            killed = time.monotonic()
            cluster["ps", 0].kill()
            cluster.start("ps", 0)
            restarts += time.monotonic() - killed
            counting.goes_on()
        steps = counting.stop()
        rate = steps / max(time.monotonic() - begun - restarts, 1)
        (first, first_sum), (second, second_sum) = counting.worker.call(counted)
        assert (second, second_sum) == (steps, 12 * steps)
        assert first_sum == 12 * first, "the counter and the table are from one moment"
        assert steps - 3 * 2.5 * rate <= first < steps, f"{first} of {steps} steps"


@pytest.mark.parametrize("use_resource", [False, pytest.param(True, marks=OTHER_KIND)])
def test_a_synchronous_state_lacks_nothing(compared, tmp_path, use_resource):
    """Both servers are killed in turn while a session trains: every update is there exactly once."""
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path, "sync")) as cluster:
        counting = Counting(cluster, tmp_path, use_resource)
        for number in range(4):
            cluster["ps", number % 2].kill()
            cluster.start("ps", number % 2)
            counting.goes_on()
        steps = counting.stop()
        assert counting.worker.call(counted) == [(steps, 12 * steps)] * 2


def test_graphs_that_tensorflow_runs_are_in_a_synchronous_state(fresh_cluster, tmp_path):
    """A step that is on the server as a whole has ended only when it is written."""
    cluster = fresh_cluster((("ps", 1), ("worker", 1)), protocol="star_server", environment=environment(tmp_path, "sync"))
    worker = cluster["worker", 0]
    worker.call(begin_whole, cluster.target("worker", 0))
    for expected in (2, 3, 4):
        worker.call(add_whole, [(session, at) for session in range(2) for at in range(3)])
        cluster["ps", 0].kill()
        cluster.start("ps", 0)
        assert worker.call(whole) == [[expected] * 3] * 2


def test_a_synchronous_state_waits_for_the_disk(compared, tmp_path):
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path, "sync")) as cluster:
        worker, server = cluster["worker", 0], cluster["ps", 0]
        worker.call(begin_counting, cluster.target("worker", 0), True)
        first, _ = worker.call(count, 0.5)
        server.call(limit_files, 1 << 10)
        worker.begin(count, 0.1)
        server.wait_for_log("the state of /job:ps/replica:0/task:0 was not written, and stays as old as it is: ")
        assert not worker.ready(2)
        server.call(limit_files, None)
        second, _ = worker.result(30)
        server.kill()
        cluster.start("ps", 0)
        assert worker.call(counted) == [(first + second, 12 * (first + second))] * 2


def test_what_the_state_does_not_keep_is_an_error_and_no_hang(compared, tmp_path):
    """A queue of a server that came back is empty: whoever takes from it would wait forever. Sessions recover from the error."""
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path)) as cluster:
        worker = cluster["worker", 0]
        worker.begin(take, cluster.target("worker", 0))
        server = cluster["ps", 0]
        wait_until(lambda: counters(server)["star_registrations"] and counters(server)["requests_unanswered"], 60, "it waits at the server")
        assert not worker.ready()
        cluster["ps", 0].kill()
        cluster.start("ps", 0)
        assert worker.result(30) in ("AbortedError", "UnavailableError")
        assert worker.call(take, cluster.target("worker", 0)) == "AbortedError"


def test_a_session_that_goes_on_uses_no_object_that_is_gone(compared, tmp_path):
    """Its steps with variables go on. A queue is empty, and whoever takes from it would wait forever, also in steps that were not under way."""
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path)) as cluster:
        worker = cluster["worker", 0]
        assert worker.call(begin_mixed, cluster.target("worker", 0)) == [None, None, 2, 1]
        flush(cluster["ps", 0])
        cluster["ps", 0].kill()
        cluster.start("ps", 0)
        assert [worker.call(mixed, step) for step in ("add", "take", "size", "put", "add", "count")] == [2, *["AbortedError"] * 3, 3, 3]


def test_what_was_flushed_when_a_server_is_stopped_is_everything(compared, tmp_path):
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path)) as cluster:
        worker = cluster["worker", 0]
        worker.call(begin_counting, cluster.target("worker", 0), True)
        steps, _ = worker.call(count, 1.5)
        cluster["ps", 0].call(stop)
        cluster["ps", 0].kill()
        cluster.start("ps", 0)
        assert worker.call(counted) == [(steps, 12 * steps)] * 2


def test_only_the_rows_that_changed_are_written(compared, tmp_path):
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path)) as cluster:
        worker, server = cluster["worker", 0], cluster["ps", 0]
        worker.call(begin_wide, cluster.target("worker", 0))
        worker.call(add_wide, 3, 99_999)
        flush(server)
        before = counters(server)
        assert before["state_bytes"] > 6_400_000
        worker.call(add_wide, 3, 70_000)
        worker.call(add_wide, 3, 4)
        flush(server)
        after = counters(server)
        assert after["state_flushes"] > before["state_flushes"]
        assert 3 * 64 < after["state_bytes"] - before["state_bytes"] < 4000


def test_a_session_that_begins_anew_finds_the_variables(compared, tmp_path):
    """The whole cluster ends, and another one has the variables without a checkpoint."""
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path)) as cluster:
        worker = cluster["worker", 0]
        worker.call(begin, cluster.target("worker", 0), "Adagrad", True)
        worker.call(train, 0, 3)
        expected = worker.call(variables)
        flush(cluster["ps", 0], cluster["ps", 1])
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path)) as cluster:
        worker = cluster["worker", 0]
        worker.call(find, cluster.target("worker", 0), "Adagrad", True)
        assert worker.call(variables) == expected


def export(folder, prefix, *options):
    subprocess.run([STARCTL, "state", "export", "--to", prefix, *options, *sorted(folder.glob("ps-*"))], check=True, timeout=60)


@pytest.mark.parametrize("use_resource", [False, pytest.param(True, marks=OTHER_KIND)])
def test_the_state_is_exported_as_a_checkpoint(compared, tmp_path, use_resource):
    """Also variables in parts, which a Saver knows as one, with their slots; while the servers run, and while they train."""
    folder, prefix = tmp_path / "state", tmp_path / "export"
    with compared.fresh("star_server", SHAPE, environment=environment(folder)) as cluster:
        worker = cluster["worker", 0]
        worker.call(begin, cluster.target("worker", 0), "Adagrad", use_resource)
        worker.call(train, 0, 4)
        expected = worker.call(variables)
        flush(cluster["ps", 0], cluster["ps", 1])
        export(folder, prefix)
        worker.call(train, 4, 2)
        flush(cluster["ps", 0], cluster["ps", 1])
        export(folder, tmp_path / "changes", "--since", prefix)
        made, real = worker.call(apply_changes, str(prefix), str(tmp_path / "changes"))
        assert made == real
        assert worker.call(reset_and_restore, str(prefix)) == expected
        exports = steps = 0
        while exports < 3:
            worker.begin(train, 6 + steps, 50)
            while not worker.ready():
                export(folder, prefix)
                exports += 1
            worker.result(60)
            steps += 50
        flush(cluster["ps", 0], cluster["ps", 1])
        export(folder, prefix)
        assert worker.call(read_checkpoint, str(prefix)) == 4 + steps


def test_a_disk_that_is_full_stops_nothing_and_is_reported(compared, tmp_path):
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path)) as cluster:
        worker, server = cluster["worker", 0], cluster["ps", 0]
        worker.call(begin_counting, cluster.target("worker", 0), True)
        flush(server)
        server.call(limit_files, 1 << 10)
        steps, _ = worker.call(count, 2.5)
        server.wait_for_log("the state of /job:ps/replica:0/task:0 was not written, and stays as old as it is: ")
        assert counters(server)["state_failures"] > 0
        server.call(limit_files, None)
        flush(server)
        server.kill()
        cluster.start("ps", 0)
        assert worker.call(counted) == [(steps, 12 * steps)] * 2


def test_wrong_folders_are_refused_and_not_touched(compared, tmp_path):
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path)) as cluster:
        worker = cluster["worker", 0]
        worker.call(begin_counting, cluster.target("worker", 0), True)
        worker.call(count, 0.5)
        flush(cluster["ps", 0], cluster["ps", 1])
    first, second = tmp_path / "ps-0", tmp_path / "ps-1"
    journal = next(first.glob("journal-*"))
    whole = journal.read_bytes()
    damaged = bytearray(whole)
    # The last byte before the last commit.
    damaged[-30] ^= 1
    for content, expected in [
        (bytes(damaged), f"starwire: STARWIRE_STATE: {journal} is damaged at byte "),
        (next(second.glob("journal-*")).read_bytes(), f"{journal} is the state of /job:ps/replica:0/task:1, not of /job:ps/replica:0/task:0"),
    ]:
        journal.write_bytes(content)
        with compared.fresh("star_server", SHAPE, environment=environment(tmp_path), start=False) as cluster:
            assert expected in cluster.start_error("ps").message
        assert journal.read_bytes() == content
    journal.write_bytes(whole)
    (first / "notes").write_text("mine")
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path), start=False) as cluster:
        assert f"{first / 'notes'} is no file of starwire's" in cluster.start_error("ps").message


def test_other_tasks_and_protocols_keep_no_state(compared, tmp_path):
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path)):
        assert {path.name for path in Path(tmp_path).iterdir()} == {"ps-0", "ps-1"}
    other = tmp_path / "other"
    with compared.fresh("grpc++", SHAPE, environment=environment(other)):
        assert not other.exists()


def test_checkpoints_are_saved_after_a_server_came_back(compared, tmp_path):
    """The graph that saves is none of star calls: the server that came back gets it again."""
    outcomes = []
    for kills in (True, False):
        folder = tmp_path / str(kills)
        (folder / "marks").mkdir(parents=True)
        with compared.fresh("star_server", SHAPE, environment=environment(folder / "state")) as cluster:
            worker = cluster["worker", 0]
            worker.begin(train_monitored, cluster.target("worker", 0), str(folder / "checkpoints"), str(folder / "marks"))
            while not (folder / "marks" / "trained").exists():
                assert not worker.ready(0.01), worker.result()
            for server in range(2 if kills else 0):
                flush(cluster["ps", server])
                cluster["ps", server].kill()
                cluster.start("ps", server)
            (folder / "marks" / "killed").touch()
            outcomes.append(worker.result(120))
        assert (folder / "checkpoints" / "model.ckpt-12.index").exists()
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == [0], "one session"
