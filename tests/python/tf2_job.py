"""Jobs of TensorFlow 2: a chief with a coordinator, the functions that it schedules, eager clients and the coordination service."""

import json
import os

from cluster import free_port, load, state, tf
from compared import Compared
from tensors import digest
from waiting import wait_until

OPT_OUT = b"\x0a\x11\x0a\x0dSTARWIRE_STAR\x10\x00"  # ConfigProto.device_count, as starwire.config(star=False) sets it
PS = ("/job:ps/replica:0/task:0/device:CPU:0", "/job:ps/replica:0/task:1/device:CPU:0")


# In the test process. -------------------------------------------------------------------------------------------------


def start_servers(cluster):
    """Starts all tasks of a cluster but the chief, which it adds to the ClusterSpec: it has no server, as in TensorFlow's guide. Returns the cluster."""
    tasks = [(job, index) for job, addresses in cluster.spec.items() for index in range(len(addresses))]
    cluster.spec["chief"] = [f"127.0.0.1:{free_port()}"]
    for job, index in tasks:
        cluster.start(job, index)
    return cluster


def start_chief(cluster, config=b""):
    """Returns the chief's task."""
    chief = cluster.process("chief", 0)
    chief.call(coordinate, cluster.protocol, cluster.spec, config, timeout=60)
    return chief


def start(fresh_cluster, workers=2, **options):
    """Returns (cluster, chief's task)."""
    cluster = start_servers(fresh_cluster(shape=(("ps", 2), ("worker", workers)), start=False, **options))
    return cluster, start_chief(cluster)


class Chiefs(Compared):
    """Compares clusters with a chief."""

    def fresh(self, way, shape, chief_config=b"", **options):
        cluster = start_servers(super().fresh(way, shape, start=False, **options))
        start_chief(cluster, chief_config)
        return cluster


def chief_call(cluster, function, *args):
    """A scenario for Chiefs: what a function returns in the chief's process."""
    return cluster["chief", 0].call(function, *args, timeout=240)


def goes_on(chief, stop):
    """Waits until functions that were scheduled before have ended."""
    size = lambda: os.path.exists(f"{stop}.rounds") and os.path.getsize(f"{stop}.rounds")  # noqa: E731
    end = size() + 2
    wait_until(lambda: chief.ready() or size() >= end, 120, "functions that end")


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


# In the chief's process. ----------------------------------------------------------------------------------------------


def coordinate(protocol, spec, config=b""):
    """Connects this process to the cluster as the chief; keeps strategy and coordinator for later calls."""
    load(protocol)
    if config:
        from tensorflow.python.eager import context

        # TensorFlow 2 has no public way to set it.
        context.context()._config = tf.compat.v1.ConfigProto.FromString(config)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer=protocol)
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(min_shard_bytes=10000, max_shards=2)
    state["strategy"] = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    state["coordinator"] = tf.distribute.coordinator.ClusterCoordinator(state["strategy"])


def variable(value, where=None, **options):
    with state["strategy"].scope():
        if where is None:
            return tf.Variable(value, **options)
        with tf.device(PS[where]):
            return tf.Variable(value, **options)


def results(step, count, *args):
    """The results of `count` steps, each with its number."""
    function = tf.function(step)
    remote = [state["coordinator"].schedule(function, args=(tf.constant(number, tf.int64), *args)) for number in range(count)]
    state["coordinator"].join()
    return [result.fetch() for result in remote]


def run(step, count, *args):
    """Digests of these results."""
    return [[digest(value) for value in tf.nest.flatten(result)] for result in results(step, count, *args)]


def contents(variables):
    out = []
    for one in variables:
        parts = one.variables if hasattr(one, "variables") else [one]
        out += [digest(part.numpy()) for part in parts]
    return out


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


def long_step():
    """A function that takes a while, and the variable that counts its calls."""
    with state["strategy"].scope():
        counter = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def step():
        data = tf.random.uniform((200, 200))
        for _ in tf.range(30):
            data = tf.matmul(data, data) / 200.0
        with tf.control_dependencies([data]):
            return counter.assign_add(1)

    return step, counter


def schedule_until(stop):
    """Schedules functions until the file `stop` exists; another file has a byte for each round of them. Returns how many it scheduled, and how many counted."""
    return schedule_rounds(stop, *long_step())


def schedule_rounds(stop, step, counter, args=()):
    """As schedule_until, with this function and this variable that counts its calls."""
    scheduled = 0
    with open(stop + ".rounds", "ab", buffering=0) as rounds:
        while not os.path.exists(stop):
            for _ in range(10):
                state["coordinator"].schedule(step, args=args)
            state["coordinator"].join()
            scheduled += 10
            rounds.write(b".")
    return scheduled, int(counter.numpy())


# In other processes. --------------------------------------------------------------------------------------------------


def connect(protocol, spec):
    load(protocol)
    tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(spec), job_name="client", protocol=protocol)
    return sorted(device.name for device in tf.config.list_logical_devices("CPU"))


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
