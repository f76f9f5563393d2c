"""TensorFlow 2 while tasks are killed: peers of a collective; chief, workers and parameter servers of ParameterServerStrategy. Also over star protocols and
with tensor_fuse: the same errors as over stock gRPC, in bounded time."""

import json
import os
import re

import pytest

from cluster import RemoteError, TaskDied, free_port, load, state, tf
from compared import OURS, WAYS, outcome
from tensors import digest
from tf2_job import goes_on, replace_worker, schedule_until, start_chief, start_servers, train_scheduled
from waiting import wait_for, wait_until

pytestmark = pytest.mark.ours

HEARS = 60  # seconds within which a survivor notices a death


# Collectives. ---------------------------------------------------------------------------------------------------------


def reduce_without_end(protocol, spec, index, started):
    """Runs all-reduces over both workers until one fails."""
    load(protocol)
    os.environ["TF_CONFIG"] = json.dumps({"cluster": spec, "task": {"type": "worker", "index": index}, "rpc_layer": protocol})
    options = tf.distribute.experimental.CommunicationOptions(implementation=tf.distribute.experimental.CommunicationImplementation.RING)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer=protocol)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver, communication_options=options)
    with strategy.scope():
        w = tf.Variable(tf.ones((3000,)))

    @tf.function
    def step():
        def replica():
            total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, w + 1.0, options)
            w.assign(total - 1.0)
            return tf.reduce_max(w)

        return strategy.run(replica)

    for number in range(1_000_000):
        value = float(strategy.experimental_local_results(step())[0])
        assert value == 1.0, value
        if number == 5:
            open(started, "w").close()


def survivor_of(runner, way, victim, folder):
    """Returns the fate of the other worker: the type of its exception, or how its process ends."""
    protocol, environment = WAYS[way]
    spec = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(2)]}
    tasks = [runner.task(f"reduce{i}", environment) for i in range(2)]
    try:
        for i, task in enumerate(tasks):
            task.begin(reduce_without_end, protocol, spec, i, f"{folder}/{way}-{i}")
        for i in range(2):
            wait_for(f"{folder}/{way}-{i}")
        survivor = tasks[1 - victim]
        tasks[victim].kill()
        try:
            survivor.result(HEARS)
        except RemoteError as error:
            return error.type, error.code
        except TaskDied:
            survivor.expected_exit = survivor.poll()
            survivor.allow_scary = ("Check failed", "SIGABRT", "Fatal Python error")
            return "ended", survivor.poll()
        return "nothing", None
    finally:
        for task in tasks:
            if task.poll() is None:
                task.kill()


@pytest.fixture(scope="module")
def stock_survivor():
    return {}


OTHER_WAY = pytest.mark.deep(reason="collectives receive by the same code over all of them: one of grpc and one of star calls")


@pytest.mark.parametrize("victim", [0, 1], ids=["leader", "follower"])
@pytest.mark.parametrize("way", ["grpc++", "star_server", *(pytest.param(way, marks=OTHER_WAY) for way in OURS if way not in ("grpc++", "star_server"))])
def test_peer_of_a_collective_is_killed(runner, stock_survivor, tmp_path, way, victim):
    if victim not in stock_survivor:
        stock_survivor[victim] = survivor_of(runner, "grpc", victim, str(tmp_path))
    assert survivor_of(runner, way, victim, str(tmp_path)) == stock_survivor[victim]


# ParameterServerStrategy. ---------------------------------------------------------------------------------------------


SHAPE = (("ps", 2), ("worker", 2))


def trained_chief(cluster):
    chief = start_chief(cluster)
    assert chief.call(train_scheduled, 5, timeout=120)[0] == 10
    return chief


ONE_WAY = pytest.mark.deep(reason="the coordinator sees errors of sessions and functions, which have the same codes over all of them")
SECOND = [pytest.param(way, marks=() if way == "star_server" else ONE_WAY) for way in ("grpc", *OURS)]


@pytest.mark.parametrize("way", SECOND)
def test_each_task_is_killed(compared, tmp_path, way):
    """Kills a worker, which the coordinator replaces; the chief, whose successor restarts with the same servers; and a ps, which cannot be replaced."""
    with start_servers(compared.fresh(way, SHAPE, start=False)) as cluster:
        chief = trained_chief(cluster)
        replace_worker(cluster, chief, str(tmp_path / "stop"))

        chief.begin(schedule_until, str(tmp_path / "killed"))
        goes_on(chief, tmp_path / "killed")
        chief.kill()
        chief = trained_chief(cluster)

        chief.begin(schedule_until, str(tmp_path / "lost"))
        goes_on(chief, tmp_path / "lost")
        cluster["ps", 1].kill()
        with pytest.raises(RemoteError) as caught:
            chief.result(HEARS)
        assert caught.value.type == "UnavailableError", caught.value


def train_saved(folder, until):
    """Trains to step `until` from the last checkpoint in the folder, with a new one every fifth step. Returns the first step and the variables."""
    strategy, coordinator = state["strategy"], state["coordinator"]
    with strategy.scope():
        at = tf.Variable(0, dtype=tf.int64)
        table = tf.Variable(tf.ones([10, 700]))  # two shards, one per ps
        sums = tf.Variable(tf.zeros([700]))
    checkpoint = tf.train.Checkpoint(at=at, table=table, sums=sums)
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
    checkpoint.restore(manager.latest_checkpoint)
    first = int(at.numpy())

    @tf.function
    def step():
        ids = tf.stack([at % 10, at % 7])
        rows = tf.nn.embedding_lookup(table, ids)
        with tf.GradientTape() as tape:
            tape.watch(rows)
            loss = tf.reduce_sum(tf.square(rows - 0.25 * tf.cast(at % 3, tf.float32)))
        sums.assign_add(tf.reduce_sum(tape.gradient(loss, rows), 0))
        for shard in table.variables:
            shard.assign_sub(0.01 * shard)
        at.assign_add(1)

    for number in range(first, until):
        coordinator.schedule(step)
        coordinator.join()
        if number % 5 == 4:
            manager.save()
    return first, int(at.numpy()), digest(tf.convert_to_tensor(table)), digest(sums.numpy())


def last_step(folder):
    try:
        found = re.search(r'model_checkpoint_path: "ckpt-(\d+)"', open(f"{folder}/checkpoint").read())
    except FileNotFoundError:
        return 0
    return 5 * int(found[1])


@pytest.mark.parametrize("way", SECOND[1:])
def test_training_goes_on_from_a_checkpoint(compared, tmp_path, way):
    """A parameter server is killed and replaced: a new chief restores its variables, and reaches the same bits as a run without interruption. (Over stock
    gRPC, the new chief sometimes fails at first: a worker's channel still waits before it connects again.)"""
    folder = str(tmp_path / "interrupted")
    with start_servers(compared.fresh(way, SHAPE, start=False)) as cluster:
        chief = trained_chief(cluster)
        chief.begin(train_saved, folder, 100000)
        wait_until(lambda: last_step(folder) >= 10, 60, "two checkpoints")
        cluster["ps", 1].kill()
        with pytest.raises(RemoteError) as caught:
            chief.result(HEARS)
        assert caught.value.type == "UnavailableError", caught.value
        chief.kill()

        cluster.start("ps", 1)
        chief = trained_chief(cluster)
        until = last_step(folder) + 7
        first, *reached = chief.call(train_saved, folder, until, timeout=120)
        assert first >= 10 and reached[0] == until
        assert chief.call(train_saved, str(tmp_path / "whole"), until, timeout=240) == (0, *reached)


def fail_amidst_others():
    """Returns what becomes of a failing function, of those scheduled after it, and of the next."""
    coordinator = state["coordinator"]
    with state["strategy"].scope(), tf.device("/job:ps/replica:0/task:0"):
        gate = tf.queue.FIFOQueue(8, tf.int64, (), shared_name="gate")

    @tf.function
    def held():
        return gate.dequeue()

    @tf.function
    def busy(rounds):
        data = tf.random.uniform((400, 400))
        for _ in tf.range(rounds):
            data = tf.matmul(data, data) / 400.0
        return tf.reduce_sum(data)

    @tf.function
    def fine(number):
        return number + 1

    @tf.function
    def bad(word):
        return tf.strings.to_number(word)

    # Both workers wait while the rest is scheduled.
    for _ in range(4):
        coordinator.schedule(held)
    coordinator.schedule(bad, args=(tf.constant("x"),))
    others = [coordinator.schedule(fine, args=(tf.constant(number),)) for number in range(50)]
    # The worker that does not run `bad` can get to this function, but not past it, however late the failure is heard of.
    coordinator.schedule(busy, args=(tf.constant(1000000),))
    others.append(coordinator.schedule(fine, args=(tf.constant(50),)))
    for _ in range(4):
        gate.enqueue(tf.constant(0, tf.int64))
    joined = outcome(coordinator.join)
    last = outcome(others[-1].fetch)
    again = coordinator.schedule(fine, args=(tf.constant(41),))
    coordinator.join()
    return joined[0], last[0], coordinator.done(), int(again.fetch())


@pytest.mark.parametrize("way", SECOND)
def test_others_are_cancelled_when_one_fails(compared, way):
    with start_servers(compared.fresh(way, SHAPE, start=False)) as cluster:
        chief = trained_chief(cluster)
        assert chief.call(fail_amidst_others, timeout=60) == ("InvalidArgumentError", "CancelledError", True, 42)


@pytest.mark.deep(reason="takes minutes: each failure that the coordinator forgives takes the keep-alive or the handshake 20 s")
@pytest.mark.parametrize("way", ["grpc++", "star_server"])
def test_a_server_that_freezes_is_noticed(compared, tmp_path, way):
    """As if it had been killed, but later: the coordinator forgives a few failures, and each takes the keep-alive or the handshake 20 s."""
    with start_servers(compared.fresh(way, SHAPE, start=False)) as cluster:
        chief = trained_chief(cluster)
        chief.begin(schedule_until, str(tmp_path / "stop"))
        goes_on(chief, tmp_path / "stop")
        cluster["ps", 1].stop()
        try:
            with pytest.raises(RemoteError) as caught:
                chief.result(180)
            assert caught.value.type == "UnavailableError", caught.value
        finally:
            cluster["ps", 1].resume()
