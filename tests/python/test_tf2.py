"""TensorFlow 2 over the protocol: ParameterServerStrategy, remote eager execution, collectives, the coordination service."""

import json
import os
import signal
import time

import pytest

from cluster import RemoteError, free_port, is_stock, load, state, tf
from test_failure import wait_for, wait_until

# ParameterServerStrategy. ---------------------------------------------------------------------------------------------


def coordinate(protocol, spec):
    """Connects this process to the cluster as the chief; keeps strategy and coordinator for later calls."""
    load(protocol)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer=protocol)
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(min_shard_bytes=10000, max_shards=2)
    state["strategy"] = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    state["coordinator"] = tf.distribute.coordinator.ClusterCoordinator(state["strategy"])
    return sorted(device.name for device in tf.config.list_logical_devices())


def train_scheduled(steps):
    """Schedules `steps` functions that add to variables on the ps tasks; the sums do not depend on the schedule."""
    import numpy as np

    strategy, coordinator = state["strategy"], state["coordinator"]
    with strategy.scope():
        counter = tf.Variable(0, dtype=tf.int64)
        table = tf.Variable(tf.zeros([10, 700]))  # two shards, one per ps

    @tf.function
    def step(amount):
        rows = tf.nn.embedding_lookup(table, [1, 8])
        counter.assign_add(amount)
        for shard in table.variables:
            shard.assign_add(tf.ones_like(shard) * tf.cast(amount, tf.float32))
        return tf.reduce_sum(rows), tf.strings.as_string(amount)

    results = [coordinator.schedule(step, args=(tf.constant(i, tf.int64),)) for i in range(steps)]
    coordinator.join()
    texts = [r.fetch()[1] for r in results]
    return int(counter.numpy()), np.asarray(tf.convert_to_tensor(table)).sum().item(), [t.decode() for t in texts], [v.device for v in table.variables]


def train_keras_like(steps):
    """A model with an optimizer and a dataset per worker, as in TensorFlow's tutorial."""
    strategy, coordinator = state["strategy"], state["coordinator"]
    with strategy.scope():
        w = tf.Variable(tf.zeros([4, 1]))
        slots = tf.Variable(tf.zeros([4, 1]))

    def dataset():
        x = tf.reshape(tf.range(64, dtype=tf.float32), (16, 4)) / 64.0
        return tf.data.Dataset.from_tensor_slices((x, tf.reduce_sum(x, 1, keepdims=True))).repeat().batch(8)

    per_worker = iter(coordinator.create_per_worker_dataset(dataset))

    @tf.function
    def step(iterator):
        x, y = next(iterator)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.matmul(x, w) - y))
        (gradient,) = tape.gradient(loss, [w])
        slots.assign_add(tf.square(gradient))
        w.assign_sub(0.05 * gradient)
        return loss

    losses = [coordinator.schedule(step, args=(per_worker,)) for _ in range(steps)]
    coordinator.join()
    return [float(r.fetch()) for r in losses]


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


def schedule_until(stop):
    """Schedules functions until the file `stop` exists; another file has a byte for each round of them. Returns how many it scheduled, and how many counted."""
    scheduled = 0
    step, counter = long_step()
    with open(stop + ".rounds", "ab", buffering=0) as rounds:
        while not os.path.exists(stop):
            for _ in range(10):
                state["coordinator"].schedule(step)
            state["coordinator"].join()
            scheduled += 10
            rounds.write(b".")
    return scheduled, int(counter.numpy())


def long_step():
    """A function that takes a while, and the variable that counts its calls."""
    strategy, coordinator = state["strategy"], state["coordinator"]
    with strategy.scope():
        counter = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def step():
        data = tf.random.uniform((200, 200))
        for _ in tf.range(30):
            data = tf.matmul(data, data) / 200.0
        with tf.control_dependencies([data]):
            return counter.assign_add(1)

    return step, counter


PS_SHAPE = (("ps", 2), ("worker", 2))


def start_chief(fresh_cluster, protocol, **options):
    """Returns (cluster, chief task): the chief has no server, as in TensorFlow's guide."""
    cluster = fresh_cluster(shape=PS_SHAPE, start=False, **options)
    cluster.spec["chief"] = [f"127.0.0.1:{free_port()}"]
    for job, index in (("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1)):
        cluster.start(job, index)
    task = cluster.process("chief", 0)
    task.call(coordinate, protocol, cluster.spec, timeout=60)
    return cluster, task


@pytest.fixture
def chief(fresh_cluster, protocol):
    return start_chief(fresh_cluster, protocol)


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


def replace_worker(cluster, chief, stop):
    """Kills worker 1 while functions are under way, and starts it again while others are."""
    chief.begin(schedule_until, stop)
    goes_on(chief, stop)
    cluster["worker", 1].kill()
    goes_on(chief, stop)
    cluster.start("worker", 1)
    goes_on(chief, stop)
    open(stop, "w").close()
    scheduled, counted = chief.result(60)
    assert counted >= scheduled > 0


def goes_on(chief, stop):
    """Waits until functions that were scheduled before have ended."""
    size = lambda: os.path.exists(f"{stop}.rounds") and os.path.getsize(f"{stop}.rounds")  # noqa: E731
    end = size() + 2
    wait_until(lambda: chief.ready() or size() >= end, 120, "functions that end")


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


def connect(protocol, spec):
    load(protocol)
    tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(spec), job_name="client", protocol=protocol)
    return sorted(device.name for device in tf.config.list_logical_devices("CPU"))


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
            tf.reshape(x, [7])
            y.numpy()
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


def coordination(protocol, spec, index):
    """Keys and values, barriers and error reports of the coordination service, which TensorFlow runs on the leader's gRPC port."""
    from tensorflow.python.eager import context

    load(protocol)
    os.environ["TF_CONFIG"] = json.dumps({"cluster": spec, "task": {"type": "worker", "index": index}, "rpc_layer": protocol})
    context.context().configure_coordination_service(service_type="standalone", service_leader="/job:worker/replica:0/task:0")
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer=protocol)
    state["strategy"] = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    context.context().set_config_key_value(f"from{index}", f"value{index}")
    return str(context.context().get_config_key_value(f"from{1 - index}"))


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
