"""TensorFlow 2 over the protocol: ParameterServerStrategy, remote eager execution, collectives, the coordination service."""

import json
import os
import signal
import time

import pytest

from cluster import RemoteError, free_port, is_stock, load, state, tf
from tf2_job import connect, coordination, goes_on, replace_worker, schedule_until, start, train_keras_like, train_scheduled
from waiting import wait_for


# ParameterServerStrategy. ---------------------------------------------------------------------------------------------


def failing_function():
    coordinator = state["coordinator"]

    @tf.function
    def bad():
        tf.debugging.assert_equal(tf.constant(1) + tf.random.uniform((), 0, 1, tf.int32), 2, "told so")
        return 0

    coordinator.schedule(bad)
    try:
        coordinator.join()
    except tf.errors.InvalidArgumentError as error:
        return error.message
    return None


@pytest.fixture
def chief(fresh_cluster):
    return start(fresh_cluster)


def test_parameter_server_strategy(chief):
    cluster, task = chief
    count, total, texts, devices = task.call(train_scheduled, 40, timeout=120)
    assert count == sum(range(40))
    assert total == sum(range(40)) * 7000
    assert texts == [str(i) for i in range(40)]
    assert {device.split("/device")[0] for device in devices} == {"/job:ps/replica:0/task:0", "/job:ps/replica:0/task:1"}
    losses = task.call(train_keras_like, 60, timeout=120)
    assert losses[-1] < losses[0] / 2, losses
    message = task.call(failing_function)
    assert "told so" in message


def test_parameter_server_strategy_survives_a_dead_worker(chief, tmp_path):
    """A worker is killed and restarted while functions are scheduled: the coordinator reassigns its work, and none is lost."""
    cluster, task = chief
    assert task.call(train_scheduled, 5, timeout=120)[0] == 10
    replace_worker(cluster, task, str(tmp_path / "stop"))


def test_parameter_server_strategy_reports_a_dead_ps(chief, tmp_path):
    cluster, task = chief
    assert task.call(train_scheduled, 5, timeout=120)[0] == 10
    task.begin(schedule_until, str(tmp_path / "stop"))
    goes_on(task, tmp_path / "stop")
    cluster["ps", 1].kill()
    with pytest.raises(RemoteError) as caught:
        task.result(120)
    assert caught.value.type in ("UnavailableError", "AbortedError", "FailedPreconditionError"), caught.value


# Remote eager execution. ----------------------------------------------------------------------------------------------


def connect_host(address, protocol):
    """Like tf.config.experimental_connect_to_host, which has no protocol argument."""
    from tensorflow.python.eager import remote

    load(protocol)
    spec = tf.train.ClusterSpec({"worker": [address]})
    remote.connect_to_cluster(spec, job_name="localhost", protocol=protocol)
    with tf.device("/job:worker/task:0"):
        return float(tf.reduce_sum(tf.ones((100, 100))) * 2.0)


def remote_eager():
    import numpy as np

    out = {}
    a, b = "/job:ps/task:0/device:CPU:0", "/job:ps/task:1/device:CPU:0"
    with tf.device(a):
        x = tf.random.stateless_uniform((300, 300), seed=[1, 2])
        v = tf.Variable(tf.zeros((2000,)))
        words = tf.constant(["a", "b" * 10000, ""])
    with tf.device(b):
        y = tf.matmul(x, x)  # x is sent from ps 0 to ps 1
        shouted = tf.strings.join([words, words])
    out["matmul"] = np.allclose(y.numpy(), x.numpy() @ x.numpy(), rtol=1e-5)
    out["strings"] = [len(w) for w in shouted.numpy()]
    out["devices"] = [y.backing_device if hasattr(y, "backing_device") else y.device, v.device]
    for i in range(5):
        v.assign_add(tf.fill((2000,), float(i)))
    out["variable"] = v.numpy().tolist() == [10.0] * 2000

    @tf.function
    def across(z):
        with tf.device(a):
            z = z * 2.0 + v[:3]
        with tf.device(b):
            z = z + 1.0
            if tf.reduce_sum(z) > 0:
                z = z * 10.0
        with tf.device(a):
            return tf.reduce_sum(z), tf.strings.as_string(z)

    total, texts = across(tf.constant([1.0, 2.0, 3.0]))
    out["function"] = float(total), [t.decode() for t in texts.numpy()]

    @tf.function
    def loop(n):
        total = tf.zeros((2500,))
        for i in tf.range(n):
            with tf.device(a):
                part = tf.fill((2500,), tf.cast(i, tf.float32))
            with tf.device(b):
                total += part
        return total

    out["loop"] = loop(tf.constant(10)).numpy().tolist() == [45.0] * 2500

    @tf.function
    def numbers():
        with tf.device(a):
            dataset = tf.data.Dataset.range(10)
        total = tf.constant(0, tf.int64)
        for value in dataset:
            with tf.device(b):
                total += value
        return total

    try:
        numbers()
    except tf.errors.OpError as error:
        # A dataset's variant cannot be decoded on another task. Stock gRPC reports "could not parse rpc response".
        state["dataset error"] = error.message
    try:
        with tf.device(b):
            tf.reshape(x, [7]).numpy()  # its own value: over stock gRPC, others may be there before the error
    except tf.errors.InvalidArgumentError as error:
        out["error"] = "Input to reshape is a tensor with 90000 values" in error.message
    return out


def recall(name):
    return state.get(name)


def copy_after_an_error():
    """An operation fails, and so does the copy of its output. The next copy waits for a second behind a function, and does not fail."""
    with tf.device("/job:ps/task:0/device:CPU:0"):
        far = tf.ones((300, 300))
    with tf.device("/job:ps/task:1/device:CPU:0"):
        x = tf.identity(far)
        x.numpy()
        try:
            tf.reshape(far, [7]).numpy()
        except tf.errors.InvalidArgumentError:
            begin = time.monotonic()

        @tf.function
        def slow():
            data = x
            while tf.timestamp() < start + 1.0:
                data = tf.matmul(data, x) / 300.0
            return tf.reduce_sum(data)

        start = tf.timestamp()
        value, copy = slow(), x.numpy()
    return copy.sum().item(), time.monotonic() - begin, float(value.numpy())


def test_copies_after_an_error(fresh_cluster, protocol, runner):
    cluster = fresh_cluster(shape=(("ps", 2),))
    client = runner.task("eager-client")
    client.call(connect, protocol, cluster.spec)
    copied, took, computed = client.call(copy_after_an_error)
    assert copied == computed == 90000.0 and took >= 1.0
    client.kill()


def test_remote_eager(fresh_cluster, protocol, runner):
    results = []
    for kind in dict.fromkeys(("grpc", protocol)):
        cluster = fresh_cluster(shape=(("ps", 2),), protocol=kind)
        client = runner.task("eager-client")
        names = client.call(connect, kind, cluster.spec)
        assert sum("/job:ps/" in name for name in names) == 2
        results.append(client.call(remote_eager, timeout=120))
        dataset_error = client.call(recall, "dataset error")
        client.kill()
    assert results[-1]["matmul"] and results[-1]["variable"] and results[-1]["loop"] and results[-1]["error"]
    assert results[0] == results[-1]
    if not is_stock(protocol):
        assert "not accepted from other tasks" in dataset_error and "/job:ps/replica:0/task:0" in dataset_error


def test_connect_to_one_host(fresh_cluster, protocol, runner):
    cluster = fresh_cluster(shape=(("worker", 1),))
    client = runner.task("eager-client")
    assert client.call(connect_host, cluster.spec["worker"][0], protocol) == 20000.0
    client.kill()


# Collectives. ---------------------------------------------------------------------------------------------------------


def mirrored(protocol, spec, index, steps):
    """Synchronous training; both workers must end with the same bits. Ring collectives use CompleteGroup, CompleteInstance, GetStepSequence, RecvBuf."""
    import numpy as np

    load(protocol)
    os.environ["TF_CONFIG"] = json.dumps({"cluster": spec, "task": {"type": "worker", "index": index}, "rpc_layer": protocol})
    options = tf.distribute.experimental.CommunicationOptions(implementation=tf.distribute.experimental.CommunicationImplementation.RING)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer=protocol)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver, communication_options=options)
    with strategy.scope():
        w = tf.Variable(tf.random.stateless_normal((300, 20), seed=[index, 7]))
        tiny = tf.Variable(0.0)

    @tf.function
    def step(number):
        def replica():
            context = tf.distribute.get_replica_context()
            gradient = w * 0.1 + tf.cast(context.replica_id_in_sync_group + 1, tf.float32) * tf.cast(number, tf.float32)
            total = context.all_reduce(tf.distribute.ReduceOp.SUM, gradient, options)
            one = context.all_reduce(tf.distribute.ReduceOp.MEAN, tf.cast(number, tf.float32))
            w.assign_sub(0.01 * total)
            tiny.assign_add(one)
            gathered = context.all_gather(tf.reshape(tiny, (1,)), axis=0)
            return tf.reduce_sum(gathered)

        return strategy.run(replica)

    sums = [float(strategy.experimental_local_results(step(tf.constant(i)))[0]) for i in range(steps)]
    return strategy.num_replicas_in_sync, w.numpy().tobytes(), float(tiny.numpy()), sums, np.isfinite(w.numpy()).all().item()


def run_mirrored(runner, kind, steps=6):
    spec = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(2)]}
    tasks = [runner.task(f"mirrored{i}") for i in range(2)]
    try:
        for i, task in enumerate(tasks):
            task.begin(mirrored, kind, spec, i, steps)
        return [task.result(120) for task in tasks]
    finally:
        for task in tasks:
            task.kill()


def test_multi_worker_mirrored_strategy(runner, protocol):
    results = [run_mirrored(runner, kind) for kind in dict.fromkeys(("grpc", protocol))]
    for workers in results:
        assert workers[0] == workers[1], "both workers hold the same variables"
        assert workers[0][0] == 2 and workers[0][4]
        assert workers[0][2] == 15.0
    assert results[0] == results[-1], "the same bits as over stock gRPC"


# The coordination service. --------------------------------------------------------------------------------------------


def watch_preemption(directory):
    """PreemptionCheckpointHandler: after SIGTERM on one worker, both save at the same step and exit."""
    strategy = state["strategy"]
    with strategy.scope():
        w = tf.Variable(tf.zeros((10,)))
        step = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    saved = []
    handler = tf.distribute.experimental.PreemptionCheckpointHandler(
        strategy.cluster_resolver, tf.train.Checkpoint(w=w, step=step), directory,
        tf.distribute.experimental.TerminationConfig(exit_fn=lambda: saved.append((int(step.numpy()), float(w.numpy()[0])))),
    )  # fmt: skip

    @tf.function
    def train():
        def replica():
            context = tf.distribute.get_replica_context()
            w.assign_add(context.all_reduce(tf.distribute.ReduceOp.SUM, tf.ones((10,))))
            step.assign_add(1)

        strategy.run(replica)

    deadline = time.monotonic() + 60
    while not saved and time.monotonic() < deadline:
        handler.run(train)
        open(f"{directory}-{strategy.cluster_resolver.task_id}", "w").close()
        time.sleep(0.02)
    return saved[0]


def test_coordination_service_and_preemption(runner, protocol, tmp_path):
    spec = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(2)]}
    tasks = [runner.task(f"coordinated{i}") for i in range(2)]
    try:
        for i, task in enumerate(tasks):
            task.begin(coordination, protocol, spec, i)
        for i, task in enumerate(tasks):
            assert task.result(90) == f"value{1 - i}"
        for i, task in enumerate(tasks):
            task.begin(watch_preemption, str(tmp_path / "checkpoints"))
        for i in range(2):
            wait_for(tmp_path / f"checkpoints-{i}")
        tasks[1].signal(signal.SIGTERM)
        (step0, w0), (step1, w1) = [task.result(90) for task in tasks]
        assert step0 == step1 > 0, "both leave at the same step"
        assert w0 == w1 == 2.0 * step0
        assert list(tmp_path.glob("checkpoints/*.index"))
    finally:
        for task in tasks:
            task.kill()
