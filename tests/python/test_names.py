"""A client may give servers any names: remote eager execution with names that the servers do not know, compared with stock grpc."""

import functools

import pytest

from cluster import free_port, is_stock, load, state, tf

# In the client process. -----------------------------------------------------------------------------------------------


def server_def(protocol, job, addresses, own_port):
    """This process is task 0 of the job, the servers are tasks 1, 2 …, as in several of TensorFlow's own tests."""
    from tensorflow.core.protobuf import cluster_pb2, tensorflow_server_pb2

    cluster = cluster_pb2.ClusterDef()
    tasks = cluster.job.add(name=job).tasks
    tasks[0] = f"localhost:{own_port}"
    for number, address in enumerate(addresses, start=1):
        tasks[number] = address
    return tensorflow_server_pb2.ServerDef(cluster=cluster, job_name=job, task_index=0, protocol=protocol)


def compute(first, second):
    """Ops, a variable, strings, and a function across both devices: tensors travel between every pair of tasks, in both directions."""
    out = {}
    with tf.device(first):
        x = tf.reshape(tf.range(9000, dtype=tf.float32), (90, 100))
        v = tf.Variable(tf.ones((3,)))
        words = tf.constant(["a", "b" * 9000])
    with tf.device(second):
        y = tf.matmul(x, x, transpose_b=True)
        joined = tf.strings.join([words, words])
    out["eager"] = float(tf.reduce_sum(y)), [len(word) for word in joined.numpy()], y.backing_device

    @tf.function
    def across(z):
        with tf.device(first):
            z = z * 2.0 + v
        with tf.device(second):
            z = tf.concat([z, z + 1.0], 0)
            if tf.reduce_sum(z) > 0:
                z = z * 10.0
        with tf.device(first):
            v.assign_add(tf.ones((3,)))
            return tf.reduce_sum(z), tf.strings.as_string(z)

    totals = []
    for number in range(3):
        total, texts = across(tf.fill((3,), float(number)))
        totals.append((float(total), texts.numpy().tolist()))
    out["function"] = totals
    with tf.device(second), tf.GradientTape() as tape:
        loss = tf.reduce_sum(v * v)
    out["gradient"] = tape.gradient(loss, v).numpy().tolist(), v.device

    # In a function: after the failure of a single operation, stock TensorFlow now and then fails others or waits for ever.
    @tf.function
    def bad(shape):
        with tf.device(second):
            return tf.reshape(x, shape)

    try:
        bad(tf.constant([7]))
    except tf.errors.InvalidArgumentError as error:
        out["error"] = "Input to reshape is a tensor with 9000 values" in error.message
    return out


def on(job, task):
    return f"/job:{job}/replica:0/task:{task}/device:CPU:0"


def by_server_def(protocol, addresses):
    """Calls context.set_server_def with one name, then another, then the first again."""
    from tensorflow.python.eager import context

    load(protocol)
    out = []
    for job in ("remote_device", "alt_remote_device", "remote_device"):
        context.set_server_def(server_def(protocol, job, addresses, free_port()))
        out.append(compute(on(job, 1), on(job, 2)))
    return out


def by_cluster(protocol, addresses):
    """Calls connect_to_cluster with job names chosen by the client."""
    load(protocol)
    spec = tf.train.ClusterSpec({"my_ps": addresses[:1], "trainer": {3: addresses[1]}})
    tf.config.experimental_connect_to_cluster(spec, job_name="client", protocol=protocol)
    return compute(on("my_ps", 0), on("trainer", 3))


def by_host(protocol, addresses):
    """Like tf.config.experimental_connect_to_host, which has no protocol argument: the servers become tasks of job worker, the client is "localhost"."""
    from tensorflow.python.eager import remote

    load(protocol)
    remote.connect_to_cluster(tf.train.ClusterSpec({"worker": addresses}), job_name="localhost", protocol=protocol)
    return compute(on("worker", 0), on("worker", 1)), compute(on("localhost", 0), on("worker", 1))


def by_update(protocol, addresses):
    """Calls context.update_server_def: a server is added, removed and added again, and reads another server's values."""
    from tensorflow.python.eager import context

    load(protocol)
    job = "remote_device"
    one, two = addresses
    own = free_port()
    context.set_server_def(server_def(protocol, job, [one], own))
    with tf.device(on(job, 1)):
        x = tf.ones((50, 50))
    out = []
    for cluster in ([one, two], [one], [one, two]):
        context.update_server_def(server_def(protocol, job, cluster, own))
        with tf.device(on(job, len(cluster))):
            out.append(float(tf.reduce_sum(tf.matmul(x, x))))
    return out


def by_replication(protocol, addresses):
    """A dataset distributed over renamed tasks, and functions that save and restore on them."""
    import tempfile

    load(protocol)
    tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec({"backup": addresses}), job_name="client", protocol=protocol)
    from tensorflow.python.data.experimental.ops import distribute

    with tf.device(on("backup", 0)):
        dataset = tf.data.Dataset.range(20).map(lambda x: x * 3)
        made = distribute.replicate(dataset, [on("backup", 0), on("backup", 1)])
    sums = []
    for device, copy in made.items():
        with tf.device(device):
            sums.append(sum(int(x) for x in iter(copy)))
    variables = []
    for number in range(2):
        with tf.device(on("backup", number)):
            variables.append(tf.Variable(tf.fill((100,), float(number))))
    checkpoint = tf.train.Checkpoint(a=variables[0], b=variables[1])
    path = checkpoint.write(tempfile.mkdtemp(prefix="starwire-names-") + "/saved")
    for variable in variables:
        variable.assign(tf.zeros((100,)))
    checkpoint.read(path).assert_consumed()
    return sums, [float(tf.reduce_sum(v)) for v in variables], [v.device for v in variables]


# The tests. -----------------------------------------------------------------------------------------------------------


def start_alone(protocol):
    """Starts a server that is alone in its cluster, as /job:localhost/task:0; returns its address."""
    load(protocol)
    cluster = tf.train.ClusterSpec({"localhost": [f"127.0.0.1:{free_port()}"]})
    state["server"] = tf.distribute.Server(cluster, job_name="localhost", task_index=0, protocol=protocol)
    return state["server"].target[len("grpc://") :]


@pytest.fixture(scope="module")
def result_of(runner):
    """Returns what a client of two servers sees; each is asked once."""

    @functools.lru_cache(maxsize=None)
    def result_of(way, protocol):
        servers = [runner.task("alone") for _ in range(2)]
        client = runner.task("client")
        try:
            addresses = [server.call(start_alone, protocol) for server in servers]
            return client.call(way, protocol, addresses, timeout=120)
        finally:
            for task in (client, *servers):
                task.kill()

    return result_of


@pytest.mark.tensorflow2
@pytest.mark.quick(
    lambda of: of["kind"] == ("star_server" if of["way"] in (by_server_def, by_host, by_replication) else ""),
    reason="each way runs once: a protocol's name selects the kind of calls, after the client's names are known",
)
@pytest.mark.parametrize("way", [by_server_def, by_cluster, by_host, by_update, by_replication])
@pytest.mark.parametrize("kind", ["", "star_server", "star_server_lite"])
def test_names_chosen_by_the_client(result_of, protocol, way, kind):
    kind = kind or protocol
    if is_stock(protocol) and kind != protocol:
        pytest.skip("not a feature of stock gRPC")
    assert result_of(way, kind) == result_of(way, "grpc")
