"""Tensors of more than 2 GiB, which stock gRPC cannot carry (the limit of its messages): pulled, pushed, kept on a server between two calls, and as strings.

One path at a time, as two processes each hold such a tensor, and the transport may hold another copy.
"""

import pytest

from cluster import one, tf
from compared import OURS
from graphs import PS0, WORKER0

pytestmark = [pytest.mark.ours, pytest.mark.deep(reason="takes 12 GiB of memory")]

NEEDS = 12  # GiB
COUNT = (2200 << 20) // 256 * 256
PROBES = (0, 1, (1 << 31) - 1, 1 << 31, (1 << 31) + 77, COUNT - 1)


def made():
    """COUNT bytes that cycle from 0 to 255, generated when the step runs."""
    part = tf.cast(one().placeholder_with_default(tf.range(256), (256,)), tf.uint8)
    return tf.tile(part, [COUNT // 256])


def checked(big):
    """Returns its size, elements on both sides of 2 GiB, and maximum and minimum of its last mebibyte."""
    ends = tf.stack([tf.reduce_max(big[-(1 << 20) :]), tf.reduce_min(big[-(1 << 20) :])])
    return [tf.size(big, out_type=tf.int64), tf.gather(big, tf.constant(PROBES, tf.int64)), ends]


def pulled():
    with tf.device(PS0):
        big = made()
    with tf.device(WORKER0):
        return checked(tf.identity(big))


def pushed():
    with tf.device(WORKER0):
        big = made()
    with tf.device(PS0):
        there = checked(tf.identity(big))
    with tf.device(WORKER0):
        return [tf.identity(value) for value in there]


def kept():
    """A tensor made on the server waits there for a result that the worker computes from a part of it."""
    with tf.device(PS0):
        big = made()
        few = big[77:80]
    with tf.device(WORKER0):
        nothing = few[0] - 77
    with tf.device(PS0):
        there = checked(tf.bitwise.bitwise_or(big, nothing))
    with tf.device(WORKER0):
        return [tf.identity(value) for value in there]


def variable():
    """A variable that the worker reads."""
    with tf.device(PS0):
        handle = tf.raw_ops.VarHandleOp(dtype=tf.uint8, shape=[COUNT], shared_name="large")
        with tf.control_dependencies([tf.raw_ops.AssignVariableOp(resource=handle, value=made())]):
            big = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.uint8)
    with tf.device(WORKER0):
        return checked(big)


def strings():
    """As many bytes, in strings of one mebibyte."""
    with tf.device(PS0):
        word = tf.strings.reduce_join(tf.tile(one().placeholder_with_default(["0123456789abcdef"], (1,)), [1 << 16]))
        big = tf.tile(tf.reshape(word, (1,)), [2200])
    with tf.device(WORKER0):
        here = tf.identity(big)
        return [tf.reduce_sum(tf.cast(tf.strings.length(here), tf.int64)), tf.strings.substr(here[2199], (1 << 20) - 4, 4)]


CASES = {"pulled": pulled, "pushed": pushed, "kept": kept, "variable": variable, "strings": strings}


def run(target, case):
    with tf.Graph().as_default():
        fetches = CASES[case]()
        config = one().ConfigProto(operation_timeout_in_ms=540000)
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        with one().Session(target, config=config) as sess:
            return [value if isinstance(value, bytes) else value.tolist() for value in sess.run(fetches)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", [*OURS, "tcp"])
def test_over_two_gib(compared, way, case):
    available = next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("MemAvailable")) >> 20
    if available < NEEDS:
        pytest.skip(f"needs {NEEDS} GiB of free memory, there are {available}")
    environment = {"STARWIRE_UNIX": "off"} if way == "tcp" else {}
    with compared.fresh("grpc++" if way == "tcp" else way, (("ps", 1), ("worker", 1)), environment=environment) as cluster:
        values = cluster["worker", 0].call(run, cluster.target("worker", 0), case, timeout=600)
    if case == "strings":
        assert values == [2200 << 20, b"cdef"]
    else:
        assert values == [COUNT, [probe % 256 for probe in PROBES], [255, 0]]
