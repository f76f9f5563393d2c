"""The same graph over stock gRPC and over the protocol under test: bit-identical results and equal errors.

A value is fed on ps 0, copied to worker 0 (a pull), to ps 1 (a push) and to worker 1 (between workers), and fetched at every stop. Grappler is off, so that
every copy remains a transfer (`test_every_hop_is_a_transfer` checks that).
"""

import functools
import re

import pytest

from cluster import RemoteError, tf, worker_call
from graphs import CASES, ERRORS, HOPS, PS0, freeze_case, run_case, run_error, session
from tensors import DTYPES, digest, inputs_for


# In the worker process. -----------------------------------------------------------------------------------------------


def relay(target, dtype_name, steps=2):
    """Digests of the value fed and of the values after each hop, per step."""
    try:
        dtype = tf.as_dtype(dtype_name)
    except TypeError:
        return None
    with tf.Graph().as_default(), session(target) as sess:
        feeds, hops = [], []
        inputs = [inputs_for(dtype, step) for step in range(steps)]
        for array in inputs[0]:
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
        for arrays in inputs:
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


# In the test process. -------------------------------------------------------------------------------------------------


def on_worker(cluster, function, *args):
    return worker_call(cluster, function, *args, timeout=120)


@pytest.fixture
def pair(stock, cluster):
    """Returns (run on stock gRPC, run on ours): functions that run their argument in worker 0 of either cluster."""
    return [functools.partial(on_worker, one) for one in (stock, cluster)]


def test_every_hop_is_a_transfer(pair):
    for run in pair:
        transfers = run(count_transfers)
        for source, destination in zip(HOPS, HOPS[1:]):
            full = [d.replace("/task:", "/replica:0/task:") for d in (destination, source)]
            assert f"{full[0]} <- {full[1]}" in transfers, transfers


@pytest.mark.star
@pytest.mark.quick(
    lambda of: of["protocol"] != "star_server_lite" and (of["protocol"] != "star_server" or of["dtype"] in ("bool", "bfloat16", "int4", "string")),
    reason="test_star.py carries values of every type in star calls, both kinds of which have the same code for it (cc/star)",
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype(compared, cluster, dtype):
    stock = compared.stock(on_worker, relay, dtype)
    if stock is None:
        pytest.skip(f"this TensorFlow has no {dtype}")
    ours = on_worker(cluster, relay, dtype)
    for step in ours:
        for fed, arrived in step:
            assert arrived == [fed] * len(HOPS)
    assert ours == stock


@pytest.mark.star
@pytest.mark.parametrize("name", CASES)
def test_graph(compared, cluster, name):
    frozen = compared.stock(on_worker, freeze_case, name)
    stock = compared.stock(on_worker, run_case, frozen)
    assert on_worker(cluster, run_case, frozen) == stock
    assert stock[0]


@pytest.mark.star
@pytest.mark.parametrize("name", ERRORS)
def test_error(compared, cluster, name):
    """The error's type, code and the kernel's message arrive. (The rest varies in TensorFlow itself: which tasks' reports it joins, which node comes first.)"""
    _, kind, sentence = ERRORS[name]
    for raised, code, message in compared.stock(on_worker, run_error, name) + on_worker(cluster, run_error, name):
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
