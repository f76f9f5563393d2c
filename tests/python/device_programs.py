"""Programs of tasks that own a device. Each takes the name of the devices that it uses: TESTDEV:0, GPU:0 or CPU:0."""

import contextlib
import json
import os

import graphs
from cluster import load, one, state, tf
from compared import outcome
from graphs import PS0
from tensors import digest, random_array
from tf2_job import results
from training_job import batch, regression

SHAPES = ((), (0, 3), (1,), (7,), (8191,), (8193,), (3, 33_335), (1 << 20,))  # no whole blocks; no elements
NAMES = ("PS0", "WORKER0", "PS1", "WORKER1")


def plain(value):
    """A tensor's bits, in a form that can be compared: type, shape and bytes, or the strings."""
    import numpy as np

    value = np.asarray(value, dtype=object if isinstance(value, bytes) else None)
    return str(value.dtype), value.shape, value.ravel().tolist() if value.dtype == object else value.tobytes()


# Sessions of worker 0. ------------------------------------------------------------------------------------------------


def session(target, wire_dtype=None):
    config = graphs.session_config()
    if wire_dtype:
        import starwire

        config.MergeFrom(starwire.config(wire_dtype=wire_dtype))
    # Operations without a kernel for the device run on the CPU of its task.
    config.allow_soft_placement = True
    return one().Session(target, config=config)


@contextlib.contextmanager
def graphs_on(device):
    """In the block, the places of graphs.py are these devices. Yields them."""
    before = {name: getattr(graphs, name) for name in ("HOPS", *NAMES)}
    for name in NAMES:
        setattr(graphs, name, before[name].replace("CPU:0", device))
    graphs.HOPS = tuple(getattr(graphs, name) for name in NAMES)
    try:
        yield graphs.HOPS
    finally:
        for name, value in before.items():
            setattr(graphs, name, value)


def freeze_case(target, name):
    return graphs.freeze(graphs.CASES, name)


def run_case(target, device, owners, frozen):
    """The fetches of a frozen case in each step. `owners`: the device is used in all tasks, or in the workers only."""
    device_of = lambda name: name.replace("CPU:0", device) if owners == "all" or "/job:worker/" in name else name  # noqa: E731
    with graphs.thaw(frozen, device_of) as (initializers, fetches, feeds), session(target) as sess:
        sess.run(initializers)
        return [[plain(v) for v in sess.run(tf.nest.flatten(fetches), feed)] for feed in feeds]


def relay(target, device, dtype_name):
    """Digests of the values fed and of those after each hop: from device to device, and to the CPUs between them."""
    import numpy as np

    dtype, rng = tf.as_dtype(dtype_name), np.random.default_rng(3)
    hops = (graphs.PS0.replace("CPU:0", device), graphs.WORKER0.replace("CPU:0", device), graphs.PS1, graphs.WORKER1.replace("CPU:0", device), graphs.WORKER0, graphs.PS0.replace("CPU:0", device))
    with tf.Graph().as_default(), session(target) as sess:
        feeds, values = {}, []
        for shape in SHAPES:
            value = one().placeholder(dtype, shape)
            feeds[value] = random_array(dtype, shape, rng)
            stops = []
            for where in hops:
                with tf.device(where):
                    value = tf.identity(value)
                stops.append(value)
            values.append(stops)
        return [[digest(array)] * len(hops) for array in feeds.values()], [[[digest(stop) for stop in stops] for stops in sess.run(values, feeds)] for _ in range(3)]


def lists(target, device, nested):
    """TensorLists (DT_VARIANT) cross between devices, which copy their elements one by one. `nested`: elements are lists."""
    import numpy as np

    with graphs_on(device) as hops, tf.Graph().as_default(), session(target) as sess:
        with tf.device(hops[0]):
            feed = one().placeholder(tf.float32, (4, 3001))
            value = tf.raw_ops.TensorListFromTensor(tensor=feed, element_shape=[3001])
            if nested:
                empty = tf.raw_ops.EmptyTensorList(element_shape=tf.constant([], tf.int32), max_num_elements=-1, element_dtype=tf.variant)
                value = tf.raw_ops.TensorListPushBack(input_handle=empty, tensor=value)
        for where in hops[1:]:
            with tf.device(where):
                value = tf.identity(value)
        with tf.device(graphs.WORKER0):
            if nested:
                _, value = tf.raw_ops.TensorListPopBack(input_handle=value, element_shape=tf.constant([], tf.int32), element_dtype=tf.variant)
            stacked = tf.raw_ops.TensorListStack(input_handle=value, element_shape=[3001], element_dtype=tf.float32)
        return [outcome(lambda: digest(sess.run(stacked, {feed: np.arange(12004, dtype=np.float32).reshape(4, 3001) + step}))) for step in range(2)]


def build_training(device, ps_device):
    """A model on worker 0's device, with variables on that device of the parameter servers."""
    setter = one().train.replica_device_setter(ps_tasks=2, worker_device=f"/job:worker/task:0/device:{device}", ps_device=f"/job:ps/device:{ps_device}")
    with one().device(setter):
        ids, x, loss = regression(True)
        push = one().train.GradientDescentOptimizer(0.05).minimize(loss)
    return ids, x, loss, push


def types_on(device, metadata):
    """The types of the operations that ran on this device, with their jobs."""
    parts = [part for part in metadata.step_stats.dev_stats if part.device.endswith(f"/device:{device}")]
    return {(part.device.split("/")[1], node.timeline_label.split(" = ")[-1].split("(")[0]) for part in parts for node in part.node_stats}


def train(target, device, ps_device, wire_dtype=None, steps=10):
    """Returns losses and variables."""
    with tf.Graph().as_default():
        ids, x, loss, push = build_training(device, ps_device)
        with session(target, wire_dtype) as sess:
            sess.run(one().global_variables_initializer())
            losses = [plain(sess.run([loss, push], dict(zip((ids, x), batch(step))))[0]) for step in range(steps)]
            variables = [plain(value) for value in sess.run(one().global_variables())]
            metadata = one().RunMetadata()
            sess.run([loss, push], dict(zip((ids, x), batch(steps))), options=one().RunOptions(trace_level=one().RunOptions.FULL_TRACE), run_metadata=metadata)
    expected = {("job:worker", "MatMul"), ("job:worker", "TanhGrad"), *([("job:ps", "ResourceApplyGradientDescent")] if ps_device == device else [])}
    ran = types_on(device, metadata)
    assert device == "CPU:0" or expected <= ran, ran
    return losses, variables


def begin_training(target, device, ps_device):
    """Keeps a session that trains, for continue_training."""
    with tf.Graph().as_default():
        ids, x, loss, push = build_training(device, ps_device)
        state["training"] = sess, *_ = session(target), ids, x, [loss, push]
        sess.run(one().global_variables_initializer())
    return continue_training(3)


def continue_training(steps):
    sess, ids, x, fetches = state["training"]
    return [sess.run(fetches, dict(zip((ids, x), batch(step))))[0] for step in range(steps)]


def fail_in_mid_copy(target, device, queue_name):
    """A step whose copies a test holds while another fetch of it fails (close_queue). Returns its outcome, and that of the next step."""
    import numpy as np

    with graphs_on(device) as hops, tf.Graph().as_default(), session(target) as sess:
        with tf.device(hops[0]):
            value = tf.tile([1.5], [50_001])
        for where in (*hops[1:], PS0):
            with tf.device(where):
                value = value + 1.0
        with tf.device(PS0):
            item = tf.queue.FIFOQueue(1, [tf.float32], [()], shared_name=queue_name).dequeue()
        step = lambda fetch: outcome(lambda: digest(np.asarray(sess.run(fetch)[0])))  # noqa: E731
        return step([value, item]), step([value])


def receive_too_much(target, device):
    """More than the memory of a device, for it. Returns the outcome, and that of a step that fits."""
    with tf.Graph().as_default(), session(target) as sess:
        size = one().placeholder(tf.int32, ())
        with tf.device(PS0):
            value = tf.fill([size], 1.0)
        with tf.device(graphs.WORKER0.replace("CPU:0", device)):
            value = tf.reduce_sum(value)
        return [outcome(lambda: float(sess.run(value, {size: count}))) for count in (20_000_000, 1000)]


def close_queue(target, name):
    with tf.Graph().as_default(), session(target) as sess:
        with tf.device(PS0):
            sess.run(tf.queue.FIFOQueue(1, [tf.float32], [()], shared_name=name).close(cancel_pending_enqueues=True))


# Chiefs of TensorFlow 2. ----------------------------------------------------------------------------------------------


def remote_functions(device):
    """Operations and a function over devices of several tasks, with branches, a loop and a variable there. Returns digests."""
    import numpy as np

    ps0, worker0, ps1 = (f"/job:{task}/device:{device}" for task in ("ps/replica:0/task:0", "worker/replica:0/task:0", "ps/replica:0/task:1"))
    with tf.device(ps0):
        variable = tf.Variable(np.linspace(-1, 1, 7, dtype=np.float32))

    # Traced once for all shapes.
    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32), tf.TensorSpec((), tf.bool)])
    def across(x, flag):
        with tf.device(ps0):
            y = x * 2.0
        with tf.device(worker0):
            z = tf.cond(flag, lambda: tf.tanh(y) + 1.0, lambda: y - 1.0)
            for _ in tf.range(3):
                z = z * y
        with tf.device(ps1):
            total = tf.reduce_sum(z - y)
        with tf.device(ps0):
            variable.assign_add(tf.fill((7,), 1.0) * total)
        return z, total

    out = []
    for shape in SHAPES[:-1]:
        with tf.device(worker0):
            x = tf.constant(np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)) + 0.5
        with tf.device(ps1):
            there = x * 3.0
        out += [x, there, *across(there, tf.constant(True)), *across(x, tf.constant(False)), variable.read_value()]
    return [digest(value.numpy()) for value in out]


def scheduled(device, steps=5):
    """Functions of a coordinator that compute on the worker's device, with variables on a server's CPU and device. Returns losses and variables."""
    import numpy as np

    with state["strategy"].scope():
        weights = tf.Variable(np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3))
    with tf.device(f"/job:ps/replica:0/task:0/device:{device}"):
        bias = tf.Variable(np.linspace(1, 2, 3, dtype=np.float32))

    def step(number):
        x = tf.reshape(tf.range(20.0), (4, 5)) + tf.cast(number, tf.float32)
        with tf.GradientTape() as tape, tf.device(f"/device:{device}"):
            loss = tf.reduce_sum(tf.square(tf.tanh(tf.matmul(x * 0.1, weights) + bias)))
        for variable, gradient in zip((weights, bias), tape.gradient(loss, [weights, bias])):
            variable.assign_sub(0.01 * gradient)
        return loss

    return [plain(value) for value in (*results(step, steps), weights.numpy(), bias.numpy())]


# Workers of a collective. ---------------------------------------------------------------------------------------------


def collect(protocol, spec, index, device):
    """Digests of what collectives of two workers give this one, by rings and trees over their devices."""
    import numpy as np
    from tensorflow.python.ops import collective_ops

    load(protocol)
    os.environ["TF_CONFIG"] = json.dumps({"cluster": spec, "task": {"type": "worker", "index": index}, "rpc_layer": protocol})
    # It joins the cluster.
    state["strategy"] = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer=protocol))
    out = []
    for number, size in enumerate((1, 7, 8193)):
        key = 10 * number
        with tf.device(f"/job:worker/replica:0/task:{index}/device:{device}"):
            value = tf.constant(np.linspace(index, 1, size, dtype=np.float32)) + 1.0
            out.append(collective_ops.all_reduce_v2(value, 2, 100, key, communication_hint="ring"))
            out.append(collective_ops.all_gather_v2(value, 2, 100, key + 1, communication_hint="ring"))
            send = collective_ops.broadcast_send_v2, (value, 2, 100, key + 2)
            receive = collective_ops.broadcast_recv_v2, (tf.constant(value.shape), tf.float32, 2, 100, key + 2)
            function, args = (receive, send)[index == 0]
            out.append(function(*args))
    return [digest(value.numpy()) for value in out]
