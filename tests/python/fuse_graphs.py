"""Graphs of which some tensors can be fused. CASES: functions that build a graph and return (fetches, feed_dict of step).

Values come from variables and constants: feeds of different fetches are never fused (the client of a partial run may hold one back), so the graphs of
graphs.py, which feed everything, would show little.
"""

from cluster import one, tf
from graphs import HOPS, PS0, PS1, WORKER0, WORKER1
from tensors import DTYPES, inputs_for
from training_job import setter

ON, OFF = b"\xc8\x0c\x01", b"\xc8\x0c\x00"  # ConfigProto's field 201, as starwire.config() sets it


def traffic(partitions):
    """Returns (messages between tasks, number of tensors in each fused one)."""
    task = lambda device: device.rsplit("/device:", 1)[0]  # noqa: E731
    nodes = [node for graph in partitions for node in graph.node]
    between = lambda node: task(node.attr["send_device"].s.decode()) != task(node.attr["recv_device"].s.decode())  # noqa: E731
    messages = sum(node.op in ("_Recv", "_HostRecv") and not node.attr["client_terminated"].b and between(node) for node in nodes)
    fused = sorted(len(node.attr["T"].list.type) for node in nodes if node.op == "StarwireUnfuse")
    assert fused == sorted(len(node.attr["members"].list.s) for node in nodes if node.op == "StarwireUnfuse")
    # A group of constants may itself have become a constant.
    assert set(fused) >= {len(node.attr["T"].list.type) for node in nodes if node.op == "StarwireFuse"}
    return messages, fused


def relay(dtypes):
    """Values of every dtype, shape and size travel through all tasks."""

    def build():
        feeds = {}
        with tf.device(PS0):
            for name in dtypes:
                try:
                    dtype = tf.as_dtype(name)
                except TypeError:
                    continue
                feeds.update({one().placeholder(dtype, array.shape): array for array in inputs_for(dtype, 5) if array.nbytes < 300_000})
            # Needed by every fetch, so a client cannot hold a feed back.
            all_there = tf.group(list(feeds))
            values = list(feeds)
        for device in HOPS[1:]:
            with tf.device(device):
                values = [tf.identity(value) for value in values]
        with tf.device(WORKER0), tf.control_dependencies([all_there]):
            return [tf.identity(value) for value in values], lambda step: feeds

    return build


def dense_model():
    """Many small variables on two ps, pulled, pushed and applied by SGD."""
    import numpy as np

    rng = np.random.default_rng(4)
    out, losses = [], []
    for i in range(60):
        with tf.device((PS0, PS1)[i % 2]):
            v = one().get_variable(f"v{i}", initializer=rng.normal(size=(i % 7 + 1, 33)).astype(np.float32), use_resource=bool(i % 3))
        with tf.device(WORKER0):
            losses.append(tf.reduce_sum(tf.square(v - float(i))))
    with tf.device(WORKER0):
        loss = tf.add_n(losses)
    train_op = one().train.GradientDescentOptimizer(0.01).minimize(loss)
    with tf.control_dependencies([train_op]):
        for v in one().global_variables()[::6]:
            with tf.device(v.device):
                out.append(tf.reduce_sum(v.read_value() if hasattr(v, "read_value") else v))
    with tf.device(WORKER0):
        return [tf.identity(loss), *[tf.identity(o) for o in out]], None


def ctr_model():
    """Partitioned embeddings with IndexedSlices gradients and string input; bfloat16 and bool cross as well."""
    import numpy as np

    with one().device(setter()):
        with tf.device(WORKER0):
            step = one().placeholder(tf.int64, ())
            base = tf.range(64, dtype=tf.int64) * 7919
        logits = []
        for field in range(8):
            table = one().get_variable(
                f"table{field}", (40, 4), initializer=one().random_uniform_initializer(-1, 1, seed=field + 1), partitioner=one().fixed_size_partitioner(2), use_resource=bool(field % 2)
            )
            with tf.device(WORKER0):
                ids = (base * (field + 1) + step) % 40
            logits.append(tf.reduce_sum(one().nn.embedding_lookup(table, ids, partition_strategy="div"), 1))
        weights = one().get_variable("weights", initializer=np.linspace(-1, 1, 8).astype(np.float32), use_resource=True)
        half = one().get_variable("half", initializer=tf.cast(tf.linspace(0.0, 1.0, 8), tf.bfloat16), trainable=False)
        keep = one().get_variable("keep", initializer=np.arange(8) % 3 != 0, trainable=False)
        words = one().get_variable("words", initializer=np.array([b"a", b"", b"ccc"] * 4), trainable=False)
        with tf.device(WORKER0):
            scale = tf.where(keep, tf.cast(half, tf.float32), tf.ones([8])) * weights
            loss = tf.reduce_mean(tf.square(tf.stack(logits, 1) * scale - 0.5))
            length = tf.strings.length(words)
        train_op = one().train.AdagradOptimizer(0.1).minimize(loss, global_step=one().train.get_or_create_global_step())
    with tf.device(WORKER0):
        with tf.control_dependencies([train_op]):
            return [tf.identity(loss), tf.identity(length)], lambda number: {step: number}


def conditional():
    """tf.cond whose branches each pull several variables: only those of the taken branch are alive."""
    import numpy as np

    with tf.device(PS0):
        count = one().get_variable("count", initializer=np.int32(0))
        turn = one().assign_add(count, 1)
        here = [one().get_variable(f"here{i}", initializer=np.arange(10 * i + 1, dtype=np.float32)) for i in range(5)]
    with tf.device(PS1):
        there = [one().get_variable(f"there{i}", initializer=np.arange(10 * i + 1, dtype=np.float32) * 3) for i in range(5)]

    def sums(variables, task, factor):
        def branch():
            with tf.device(task):
                return tf.add_n([tf.reduce_sum(tf.identity(v) * factor) for v in variables])

        return branch

    with tf.device(WORKER0):
        flag = tf.equal(turn % 2, 0)
        chosen = tf.cond(flag, sums(here, WORKER0, 2.0), sums(there, WORKER0, 5.0))
        nested = tf.cond(flag, lambda: tf.cond(chosen > 1e9, sums(here, WORKER0, 1.0), sums(there, WORKER0, 7.0)), sums(here, WORKER0, 9.0))
    return [tf.identity(chosen), tf.identity(nested)], None


def loop():
    """Several values cross in each iteration of a loop."""
    import numpy as np

    with tf.device(PS0):
        weights = [one().get_variable(f"weight{i}", initializer=np.linspace(0, 1, 50 + i).astype(np.float32)) for i in range(4)]

    def body(i, total):
        with tf.device(PS0):
            steps = [weight * tf.cast(i, tf.float32) for weight in weights]
        with tf.device(WORKER0):
            return i + 1, total + tf.add_n([tf.reduce_sum(step) for step in steps])

    with tf.device(WORKER0):
        _, total = tf.while_loop(lambda i, _: i < 7, body, [tf.constant(0), tf.constant(0.0)], parallel_iterations=3)
        return [tf.identity(total)], None


def dead_tensors():
    """One tensor of each pair is dead; pairs of different predicates must not be fused, or live values would be lost."""
    import numpy as np

    with tf.device(PS0):
        turn = one().assign_add(one().get_variable("turn", initializer=np.int32(0)), 1)
        flags = [tf.equal(turn % 2, 0), tf.equal(turn % 3, 0)]
        sides = [tf.raw_ops.Switch(data=tf.range(float(i + 5)) + tf.cast(turn, tf.float32), pred=flags[i % 2]) for i in range(8)]
    with tf.device(WORKER0):
        merged = []
        for off, on in sides:
            merged.append(tf.raw_ops.Merge(inputs=[tf.reduce_sum(off) * 10.0, tf.reduce_sum(on)]))
        return [m.output + 0.0 for m in merged] + [m.value_index + 0 for m in merged], None


def ping_pong():
    """A naive fusion of everything between two tasks hangs: the second tensor in each direction needs the first."""
    import numpy as np

    with tf.device(PS0):
        values = [one().get_variable(f"v{i}", initializer=np.full(9, float(i + 1), np.float32)) for i in range(4)]
    out = []
    for _ in range(3):
        with tf.device(WORKER0):
            values = [value * 1.5 for value in values]
        with tf.device(PS0):
            values = [value + total for value, total in zip(values, [tf.add_n(values)] * 4)]
    with tf.device(WORKER0):
        out = [value + 1.0 for value in values]
    return out, None


def late_company():
    """The other hang: of two tensors that could be fused, one depends on the other through a third task."""
    import numpy as np

    with tf.device(PS0):
        early = tf.identity(one().get_variable("early", initializer=np.ones(5, np.float32)))
        other = tf.identity(one().get_variable("other", initializer=np.ones(5, np.float32) * 3))
    with tf.device(WORKER0):
        first = early + other
    with tf.device(WORKER1):
        way = first * 2.0
    with tf.device(PS1):
        way = way - 1.0
    with tf.device(PS0):
        late = way + early
        later = way * early
    with tf.device(WORKER0):
        return [first + late, later + first], None


def control_edges():
    """Control edges cross, beside tensors."""
    import numpy as np

    with tf.device(PS0):
        counters = [one().get_variable(f"c{i}", initializer=np.float32(i)) for i in range(6)]
        bumps = [one().assign_add(c, 1.0) for c in counters]
    with tf.device(WORKER0):
        with tf.control_dependencies([b.op for b in bumps]):
            gate = tf.random.uniform((), seed=3) * 0.0
    with tf.device(PS0):
        with tf.control_dependencies([gate]):
            after = [c.read_value() * 1.0 for c in counters]
    with tf.device(WORKER0):
        return [tf.add_n(after), *[a + 1.0 for a in after]], None


def read_after_update():
    """A variable read after its update has the new value, although the parameter server could send the old one at once."""
    import numpy as np

    with tf.device(PS0):
        variables = [one().get_variable(f"w{i}", initializer=np.full(3, float(i), np.float32), use_resource=False) for i in range(5)]
    with tf.device(WORKER0):
        pulled = [v * 2.0 for v in variables]
        with tf.control_dependencies(pulled):
            gate = tf.random.uniform((), seed=1) * 0.0 + 1.0
    with tf.device(PS0):
        updates = [one().assign_add(v, p + gate) for v, p in zip(variables, pulled)]
    with tf.device(WORKER0), tf.control_dependencies(updates):
        return [v.read_value() for v in variables], None


def optimised_constants():
    """Each task folds its constants: a group of constants becomes a constant, and stays correct."""
    with tf.device(PS0):
        values = [tf.constant([float(i)] * (3 + i)) for i in range(6)] + [tf.constant(["a", "bc"])]
    with tf.device(WORKER0):
        return [tf.add_n([tf.reduce_sum(tf.cumsum(v)) for v in values[:-1]]), tf.strings.join([values[-1], "x"])], None


PLAIN = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "half", "bfloat16", "float32", "float64", "complex64", "complex128", "string")
EXOTIC = tuple(name for name in DTYPES if name not in PLAIN)

CASES = {
    "types": relay(PLAIN),
    "exotic_types": relay(EXOTIC),
    "dense_model": dense_model,
    "ctr_model": ctr_model,
    "conditional_v1": conditional,
    "conditional_v2": conditional,
    "loop_v1": loop,
    "loop_v2": loop,
    "dead_tensors": dead_tensors,
    "ping_pong": ping_pong,
    "late_company": late_company,
    "control_edges": control_edges,
    "read_after_update": read_after_update,
    "dense_model_optimised": dense_model,
    "optimised_constants": optimised_constants,
}
