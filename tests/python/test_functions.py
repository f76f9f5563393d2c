"""Functions of TensorFlow 2 on several tasks, over every protocol: the same bits as over stock gRPC.

One worker, so that the steps have an order. The servers' metrics show that star calls were made over the star protocols, and that tensors were fused with
tensor_fuse, which is also on over the star protocols but has little left to do there.
"""

import pytest

from cluster import state, tf
from compared import outcome
from fuse_graphs import OFF, ON
from metrics import fused_counters, star_calls
from tensors import digest
from tf2_job import OPT_OUT, PS, chief_call, contents, run, variable

SHAPE = (("ps", 2), ("worker", 1))


# In the chief's process. ----------------------------------------------------------------------------------------------


def many_variables():
    import numpy as np

    rng = np.random.default_rng(3)
    variables = [variable(rng.normal(size=shape).astype(np.float32)) for shape in [(), (1,), (7, 3), (0, 4), (64,), (40, 30)] * 8]
    frozen = [variable(np.arange(i, dtype=np.int64)) for i in range(10)]

    def step(number):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(tf.square(v - 0.1 * tf.cast(number, tf.float32))) for v in variables])
        for v, gradient in zip(variables, tape.gradient(loss, variables)):
            v.assign_sub(0.05 * gradient)
        return loss, tf.add_n([tf.reduce_sum(v) for v in frozen])

    return run(step, 6), contents(variables)


def optimizers():
    """Adagrad and momentum on the servers, gradients clipped by their norm, a learning rate that decays."""
    import numpy as np

    rng = np.random.default_rng(4)
    weights = [variable(rng.normal(size=(5, i + 1)).astype(np.float32)) for i in range(12)]
    slots = [variable(np.full((5, i + 1), 0.1, np.float32)) for i in range(12)]
    counter = variable(0, dtype=tf.int64)

    def step(number):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(tf.square(w)) for w in weights])
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, weights), 2.0)
        rate = 0.5 / (1.0 + tf.cast(counter.read_value(), tf.float32))
        for i, (w, slot, gradient) in enumerate(zip(weights, slots, gradients)):
            with tf.device(w.device):
                if i % 2:
                    tf.raw_ops.ResourceApplyAdagradV2(var=w.handle, accum=slot.handle, lr=rate, epsilon=1e-7, grad=gradient)
                else:
                    tf.raw_ops.ResourceApplyMomentum(var=w.handle, accum=slot.handle, lr=rate, grad=gradient, momentum=0.9)
        counter.assign_add(1)
        return loss, norm

    return run(step, 6), contents([*weights, *slots, counter])


def embeddings():
    """Partitioned tables, looked up and updated by rows."""
    tables = [variable(tf.random.stateless_uniform((50 + i, 70), seed=[i, 1])) for i in range(6)]
    assert all(len(table.variables) == 2 for table in tables)

    def step(number):
        ids = (tf.range(20, dtype=tf.int64) * 7 + number) % 50
        looked_up = []
        for table in tables:
            looked_up.append(tf.reduce_sum(tf.nn.embedding_lookup(table, ids)))
            half = table.variables[0]
            half.scatter_sub(tf.IndexedSlices(tf.ones((2, 70)), tf.stack([number, number + 1])))
        return looked_up

    return run(step, 5), contents(tables)


def control_flow():
    """Branches and loops over the servers; functions that call functions."""
    a, b = variable(1.0, where=0), variable(2.0, where=1)
    trace = variable(tf.zeros((16,)), where=1)

    @tf.function
    def inner(x):
        if x > 3.0:
            return a * x
        return b - x

    def step(number):
        x = tf.cast(number, tf.float32)
        if number % 2 == 0:
            a.assign_add(x)
        else:
            b.assign_sub(a)
        total = tf.constant(0.0)
        for i in tf.range(3):
            total += inner(tf.cast(i, tf.float32) + x)
            trace.scatter_nd_add([[i]], [total])
        case = tf.switch_case(tf.cast(number % 3, tf.int32), [lambda: a + 1.0, lambda: b + 2.0, lambda: a * b])
        items = tf.TensorArray(tf.float32, size=4)
        for i in tf.range(4):
            items = items.write(i, a + tf.cast(i, tf.float32))
        return total, case, items.stack()

    return run(step, 7), contents([a, b, trace])


def order():
    """Reads and writes of a variable take place in the order of the program."""
    v, w = variable(0, dtype=tf.int64, where=0), variable([0, 0], dtype=tf.int64, where=1)

    def step(number):
        seen = [v.read_value()]
        v.assign_add(number + 1)
        seen.append(v.read_value())
        w.assign(tf.stack([v.read_value(), number]))
        v.assign(tf.reduce_sum(w.read_value()))
        seen += [v.read_value(), w.read_value()]
        w.assign_add(w)
        return seen + [w.read_value()]

    return run(step, 6), contents([v, w])


def types():
    import numpy as np

    values = [np.array(["a", "ü" * 300, ""]), np.array([True, False]), np.arange(5, dtype=np.complex64), np.array(7, np.int8), np.array([1.5], np.float16), np.zeros((0, 3))]
    variables = [variable(value, where=i % 2) for i, value in enumerate(values * 3)]

    def step(number):
        read = [v.read_value() for v in variables]
        for i, v in enumerate(variables):
            v.assign(read[i])
        return [tf.identity(value) for value in read], tf.strings.join([read[0], tf.strings.as_string([number] * 3)])

    return run(step, 3), contents(variables)


def half_precision():
    weights = [variable(tf.random.stateless_normal((6, 6), seed=[i, 2])) for i in range(10)]

    def step(number):
        with tf.GradientTape() as tape:
            x = tf.ones((4, 6), tf.float16)
            for w in weights:
                x = tf.tanh(tf.matmul(x, tf.cast(w, tf.float16)))
            loss = tf.reduce_mean(tf.cast(x, tf.float32)) * 128.0
        for w, gradient in zip(weights, tape.gradient(loss, weights)):
            w.assign_sub(gradient / 128.0)
        return loss

    return run(step, 4), contents(weights)


def tables():
    with state["strategy"].scope(), tf.device(PS[0]):
        growing = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -7)
    hits = variable(0, dtype=tf.int64, where=0)

    def step(number):
        name = tf.strings.as_string(tf.range(4, dtype=tf.int64) + number)
        found = growing.lookup(name)
        growing.insert(name, tf.range(4, dtype=tf.int64) * number)
        hits.assign_add(tf.reduce_sum(tf.cast(found >= 0, tf.int64)))
        return found, growing.size(), growing.lookup(name)

    return run(step, 4), contents([hits])


def datasets():
    """A dataset per worker, and a metric."""
    coordinator = state["coordinator"]
    total, count = variable(0.0), variable(0, dtype=tf.int64)
    weights = [variable(tf.fill((8,), float(i))) for i in range(9)]

    def dataset():
        return tf.data.Dataset.range(64).map(lambda i: tf.cast(i, tf.float32)).batch(8).repeat()

    iterator = iter(coordinator.create_per_worker_dataset(dataset))

    def step(number, iterator):
        def replica(batch):
            return tf.add_n([tf.reduce_sum(w * batch) for w in weights])

        value = state["strategy"].run(replica, args=(next(iterator),))
        value = state["strategy"].reduce(tf.distribute.ReduceOp.SUM, value, axis=None)
        total.assign_add(value)
        count.assign_add(1)
        return value, total / tf.cast(count, tf.float32)

    return run(step, 5, iterator), contents([total, count])


def failures():
    """A step fails on a server. The next ones find the variables as stock TensorFlow leaves them."""
    words = variable(["1", "x"], where=1)
    done = variable(0, dtype=tf.int64, where=0)

    def step(number):
        with tf.device(PS[1]):
            parsed = tf.strings.to_number(tf.gather(words, number % 2))
        with tf.control_dependencies([parsed]):
            done.assign_add(1)
        return parsed

    out = []
    for number in range(4):
        result = state["coordinator"].schedule(tf.function(step), args=(tf.constant(number, tf.int64),))
        out.append(outcome(state["coordinator"].join))
        if out[-1][0] == "value":
            out.append(digest(result.fetch()))
    return out, contents([done])


SCENARIOS = (many_variables, optimizers, embeddings, control_flow, order, types, half_precision, tables, datasets, failures)
FUSED = (many_variables, optimizers, embeddings, half_precision, datasets)
# Many variables, the slowest: where they are grouped.
QUICK = {"grpc++": SCENARIOS[1:], "fused": FUSED, "star_server": SCENARIOS}


def fused_messages(cluster):
    return sum(fused_counters(cluster[job, index])["fused_messages_sent"] for job, count in SHAPE for index in range(count))


@pytest.mark.ours
@pytest.mark.quick(
    lambda of: of["scenario"] in QUICK.get(of["way"], ()),
    reason="the others have nothing to fuse, and test_star_functions.py compares both kinds of star calls in functions",
)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_functions(chiefs, way, scenario):
    cluster = chiefs.cluster(way, SHAPE)
    fused, calls = fused_messages(cluster), star_calls(cluster)
    chiefs.check(way, chief_call, scenario, shape=SHAPE)
    fused, calls = fused_messages(cluster) - fused, star_calls(cluster) - calls
    assert (calls > 0) == way.startswith("star_server")
    if way == "grpc++":
        assert fused == 0
    elif way == "fused" and scenario in FUSED:
        assert fused > 0


# The switch of tensor_fuse. -------------------------------------------------------------------------------------------


# The protocol, the environment, the server and the chief: where each of them decides.
DECIDED = [("star_server", None, None, b""), ("star_server", "0", None, b""), ("grpc++", None, ON, b""), ("grpc++", "1", ON, OFF)]


@pytest.mark.ours
@pytest.mark.quick(
    lambda of: (of["protocol"], of["environment"], of["server"], of["chief"]) in DECIDED,
    reason="each level of the precedence decides once; the switch is read by the same code for all protocols",
)
@pytest.mark.parametrize(
    "protocol, environment, server, chief, fuses",
    [
        ("grpc++", "1", None, b"", True),
        ("grpc++", None, ON, b"", True),
        ("grpc++", None, None, ON, True),
        ("grpc++", "1", ON, OFF, False),
        ("star_server", None, None, b"", True),
        ("star_server", "0", None, b"", False),
        ("star_server", None, OFF, b"", False),
        ("star_server", None, None, OFF, False),
        ("star_server_lite", "0", None, ON, True),
    ],
)
def test_switch(chiefs, protocol, environment, server, chief, fuses):
    """In order of precedence: the function's configuration, which is the chief's; the worker's server; its environment; the protocol. Without star calls, which
    leave nothing to fuse."""
    config = (server or b"") + OPT_OUT
    with chiefs.fresh(protocol, SHAPE, chief, environment={"STARWIRE_TENSOR_FUSE": environment} if environment else {}, config=config) as cluster:
        chief_call(cluster, many_variables)
        assert (fused_messages(cluster) > 0) == fuses
