"""The same graph over stock gRPC and over the protocol under test: bit-identical results and equal errors.

A value is fed on ps 0, copied to worker 0 (a pull), to ps 1 (a push) and to worker 1 (between workers), and fetched at every stop. Grappler is off, so that
every copy remains a transfer (`test_every_hop_is_a_transfer` checks that).
"""

import hashlib
import re

import pytest

from cluster import RemoteError, tf
from graphs import CASES, ERRORS, HOPS, PS0, WORKER0

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "half", "bfloat16", "float32", "float64", "complex64", "complex128", "qint8", "quint8",
    "qint16", "quint16", "qint32", "string", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz", "int4", "uint4", "int2", "uint2",
)  # fmt: skip


# In the worker process. -----------------------------------------------------------------------------------------------


def session_config():
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = tf.compat.v1.OptimizerOptions.L0
    config.operation_timeout_in_ms = 60000
    return config


def session(target):
    return tf.compat.v1.Session(target, config=session_config())


def shapes_for(itemsize):
    edge = 8192 // itemsize
    return [
        (), (0,), (0, 3), (3, 0, 2), (1,), (7,), (1000,), (2, 3, 2, 1, 4), (edge - 1,), (edge,), (edge + 1,), (2, edge // 2 + 1), (5 * edge + 3,), ((1 << 20) // itemsize,),
    ]  # fmt: skip


def random_array(dtype, shape, rng):
    """Any bit pattern the type allows (NaNs with payloads, denormals, -0.0)."""
    import numpy as np

    np_dtype = np.dtype(dtype.as_numpy_dtype)
    count = int(np.prod(shape, dtype=np.int64))
    if dtype == tf.bool:
        return (rng.integers(0, 2, count) > 0).reshape(shape)
    if dtype.name in ("int4", "uint4", "int2", "uint2"):
        bits = int(dtype.name[-1])
        low = 0 if dtype.name[0] == "u" else -(1 << (bits - 1))
        return rng.integers(low, low + (1 << bits), count).astype(np_dtype).reshape(shape)
    raw = rng.integers(0, 256, count * np_dtype.itemsize, dtype=np.uint8)
    return np.frombuffer(raw.tobytes(), dtype=np_dtype).reshape(shape)


def random_strings(shape, rng, longest):
    import numpy as np

    count = int(np.prod(shape, dtype=np.int64))
    out = np.empty(count, dtype=object)
    for i in range(count):
        out[i] = rng.bytes(int(rng.integers(0, longest + 1)))
    return out.reshape(shape)


def inputs_for(dtype, seed):
    import numpy as np

    rng = np.random.default_rng(seed)
    if dtype == tf.string:
        long = np.empty((2,), dtype=object)
        long[:] = [rng.bytes(8192), rng.bytes(3_000_000)]
        small = [random_strings(shape, rng, longest) for shape, longest in (((), 10), ((0,), 1), ((3, 0), 1), ((4,), 0), ((7,), 24), ((2, 3, 2), 300), ((20000,), 20), ((50,), 9000))]
        return [*small, long]
    np_dtype = np.dtype(dtype.as_numpy_dtype)
    shapes = shapes_for(np_dtype.itemsize)
    if dtype in (tf.float32, tf.uint8):
        shapes.append(((10 << 20) // np_dtype.itemsize,))
    return [random_array(dtype, shape, rng) for shape in shapes]


def digest(value):
    """Represents a value in a small form that two processes can compare bit by bit."""
    import numpy as np

    value = np.asarray(value, dtype=object if isinstance(value, bytes) else None)
    if value.dtype.fields:  # quantised types are fed as records of one number and fetched as plain numbers
        value = value.view(value.dtype[0])
    data = b"".join(len(x).to_bytes(8, "little") + x for x in value.ravel().tolist()) if value.dtype == object else np.ascontiguousarray(value).tobytes()
    return (str(value.dtype), value.shape, len(data), hashlib.sha256(data).hexdigest())


def relay(target, dtype_name, steps=2):
    """Digests of the value fed and of the values after each hop, per step."""
    try:
        dtype = tf.as_dtype(dtype_name)
    except TypeError:
        return None
    with tf.Graph().as_default(), session(target) as sess:
        feeds, hops = [], []
        for array in inputs_for(dtype, 0):
            with tf.device(PS0):
                value = tf.compat.v1.placeholder(dtype, array.shape)
            feeds.append(value)
            stops = []
            for device in HOPS:
                with tf.device(device):
                    value = tf.identity(value)
                stops.append(value)
            hops.append(stops)
        result = []
        for step in range(steps):
            arrays = inputs_for(dtype, step)
            arrived = sess.run(hops, dict(zip(feeds, arrays)))
            result.append([(digest(array), [digest(stop) for stop in stops]) for array, stops in zip(arrays, arrived)])
        return result


def count_transfers(target):
    """The number of _Recv ops in each task's partition for one value that makes all hops."""
    with tf.Graph().as_default(), session(target) as sess:
        with tf.device(PS0):
            feed = value = tf.compat.v1.placeholder(tf.float32, ())
        for device in HOPS:
            with tf.device(device):
                value = tf.identity(value)
        metadata = tf.compat.v1.RunMetadata()
        sess.run(value, {feed: 1.0}, options=tf.compat.v1.RunOptions(output_partition_graphs=True), run_metadata=metadata)
        return sorted(node.device + " <- " + node.attr["send_device"].s.decode() for graph in metadata.partition_graphs for node in graph.node if node.op == "_Recv")


def run_case(target, name, steps=1):
    """The fetches of one of CASES in each step."""
    control_flow_v2 = tf.compat.v1.control_flow_v2_enabled()
    builder = CASES[name]
    try:
        if name.endswith("_v2"):
            tf.compat.v1.enable_control_flow_v2()
        else:
            tf.compat.v1.disable_control_flow_v2()
        with tf.Graph().as_default(), session(target) as sess:
            tf.compat.v1.set_random_seed(7)
            fetches, feed_of_step = builder()
            sess.run(tf.compat.v1.global_variables_initializer())
            return [[digest(v) for v in sess.run(tf.nest.flatten(fetches), feed_of_step(step) if feed_of_step else None)] for step in range(steps)]
    finally:
        (tf.compat.v1.enable_control_flow_v2 if control_flow_v2 else tf.compat.v1.disable_control_flow_v2)()


def run_error(target, name):
    """Returns the error; the session must still work afterwards."""
    with tf.Graph().as_default(), session(target) as sess:
        with tf.device(PS0):
            fine = tf.compat.v1.placeholder_with_default(1.0, ())
        with tf.device(WORKER0):
            fine = fine + 1.0
        fetch = ERRORS[name][0]()
        raised = []
        for _ in range(2):
            try:
                sess.run(fetch)
            except tf.errors.OpError as error:
                raised.append((type(error).__name__, error.error_code, error.message))
            else:
                raised.append(("nothing", 0, ""))
            assert sess.run(fine) == 2.0
        return raised


# In the test process. -------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(make_cluster, protocol):
    """Returns (run on stock gRPC, run on ours): functions that run their argument in worker 0 of either cluster."""

    def on(cluster):
        return lambda function, *args, **kwargs: cluster["worker", 0].call(function, cluster.target("worker", 0), *args, timeout=120, **kwargs)

    return on(make_cluster(protocol="grpc", environment={"REFERENCE": "1"})), on(make_cluster(protocol=protocol))


def test_every_hop_is_a_transfer(pair):
    for run in pair:
        transfers = run(count_transfers)
        for source, destination in zip(HOPS, HOPS[1:]):
            full = [d.replace("/task:", "/replica:0/task:") for d in (destination, source)]
            assert f"{full[0]} <- {full[1]}" in transfers, transfers


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype(pair, dtype):
    stock, ours = (run(relay, dtype) for run in pair)
    if stock is None:
        pytest.skip(f"this TensorFlow has no {dtype}")
    for step in ours:
        for fed, arrived in step:
            assert arrived == [fed] * len(HOPS)
    assert ours == stock


@pytest.mark.parametrize("name", CASES)
def test_graph(pair, name):
    stock, ours = (run(run_case, name, steps=3) for run in pair)
    assert ours == stock
    assert stock[0]


@pytest.mark.parametrize("name", ERRORS)
def test_error(pair, name):
    """The error's type, code and the kernel's message arrive. (The rest varies in TensorFlow itself: which tasks' reports it joins, which node comes first.)"""
    _, kind, sentence = ERRORS[name]
    for run in pair:
        for raised, code, message in run(run_error, name):
            assert raised == kind, message
            assert code == getattr(codes, kind)
            assert sentence in message


class codes:
    InvalidArgumentError, FailedPreconditionError, OutOfRangeError, NotFoundError = 3, 9, 11, 5


def test_other_errors_keep_their_type(pair):
    """A user error (an unknown device) has the same message."""
    messages = []
    for run in pair:
        with pytest.raises(RemoteError) as caught:
            run(use_unknown_device)
        messages.append((caught.value.type, re.sub(r"\d+ms", "", caught.value.message)))
    assert messages[0] == messages[1]
    assert "/job:ps/task:77" in messages[0][1]


def use_unknown_device(target):
    with tf.Graph().as_default(), session(target) as sess:
        with tf.device("/job:ps/task:77"):
            value = tf.compat.v1.placeholder_with_default(1.0, ())
        return sess.run(value + 1.0)
