"""Variables in shards (`ShardedVariable`), for functions of TensorFlow 2 (functions.py).

A program has a list "sharded" of {"server": that of the first shard, "dtype", "rows", "by": [partitioner, arguments]}. The ops "sharded read" and
"sharded write" `do` something with one of them. A graph of a session gets the same shards on the same servers.
"""

import numpy as np
from cluster import state, tf

READS = ("look_up", "look_up", "look_up_sparse", "rows", "slice", "whole")
WRITES = ("assign", "assign_add", "assign_sub", "scatter_add", "scatter_sub", "scatter_update", "scatter_max", "train", "train")
READ, WRITE = "sharded read", "sharded write"
PARTITIONERS = (
    ("FixedShardsPartitioner", {"num_shards": 2}),
    ("FixedShardsPartitioner", {"num_shards": 5}),
    ("MinSizePartitioner", {"min_shard_bytes": 32, "max_shards": 4}),
    ("MaxSizePartitioner", {"max_shard_bytes": 64}),
)


def generate(rng):
    return {"server": rng.randrange(2), "dtype": rng.choice(("float32", "float32", "int64")), "rows": rng.choice((2, 3, 7, 12)), "by": rng.choice(PARTITIONERS)}


def fill(rng, op, kind, shards, inputs):
    """Completes a record that uses one of `shards`."""
    op["op"], op["shards"], op["in"] = kind, rng.randrange(len(shards)), [rng.choice(inputs)]
    one = shards[op["shards"]]
    op["do"] = rng.choice(READS if kind == READ else WRITES)
    if one["dtype"] == "int64":
        op["do"] = {"look_up_sparse": "rows", "train": "scatter_add"}.get(op["do"], op["do"])
    op["slice"] = [rng.randrange(-3, one["rows"]), rng.randrange(1, one["rows"] + 3), rng.choice((1, 1, 2, -1))]
    op["ids"], op["combiner"] = rng.choice(("int32", "int64")), rng.choice(("sum", "mean", "sqrtn"))


# Building. ------------------------------------------------------------------------------------------------------------


def first_value(one, width):
    return (np.arange(one["rows"] * width).reshape(one["rows"], width) % 7 - 2).astype(one["dtype"])


def partition(shape, dtype, **_):
    """The strategy's partitioner: that of the variable that is being made. Others have one part."""
    chosen = state.get("partitioner")
    return chosen(shape=shape, dtype=dtype) if chosen else [1] * max(1, shape.rank)


def partitioner(one):
    name, arguments = one["by"]
    return getattr(tf.distribute.experimental.partitioners, name)(**arguments)


def make(one, width):
    """The coordinator's variable."""
    state["partitioner"] = partitioner(one)
    try:
        return tf.Variable(first_value(one, width))
    finally:
        state["partitioner"] = None


def make_in_graph(one, width, name, devices):
    from tensorflow.python.distribute.sharded_variable import ShardedVariable

    value = first_value(one, width)
    count = min(one["rows"], partitioner(one)(shape=tf.TensorShape(value.shape), dtype=tf.as_dtype(value.dtype))[0])
    shards = []
    for number, part in enumerate(np.array_split(value, count)):
        with tf.device(devices[(one["server"] + number) % len(devices)]):
            shards.append(tf.Variable(part, name=f"{name}-{number}"))
    return ShardedVariable(shards) if count > 1 else shards[0]


def shards_of(variable):
    return getattr(variable, "variables", None) or [variable]


def ids_of(op, value, rows):
    return tf.cast(tf.abs(tf.clip_by_value(value, -1e6, 1e6)), op["ids"]) % tf.constant(rows, op["ids"])


def read(op, variable, rows, value):
    if op["do"] == "look_up":
        made = tf.nn.embedding_lookup(variable, ids_of(op, value, rows))
    elif op["do"] == "look_up_sparse":
        ids = tf.SparseTensor([[0, 0], [0, 1], [1, 2], [2, 0]], tf.cast(ids_of(op, value, rows), tf.int64), [3, 3])
        made = tf.nn.safe_embedding_lookup_sparse(variable, ids, combiner=op["combiner"])
    elif op["do"] == "rows":
        made = variable.sparse_read(ids_of(op, value, rows))
    elif op["do"] == "slice":
        made = variable[slice(*op["slice"])]
    else:
        made = tf.convert_to_tensor(variable)
    return tf.cast(tf.reduce_sum(made, 0), tf.float32)


def write(op, variable, rows, value):
    """Returns an operation that runs after all that the methods have made: most of them return none."""
    graph = tf.compat.v1.get_default_graph()
    before = set(graph.get_operations())
    many = tf.cast(tf.tile(tf.clip_by_value(value, -1e6, 1e6)[tf.newaxis], [rows if "assign" in op["do"] else value.shape[0], 1]), variable.dtype)
    if op["do"] == "train":
        shards = shards_of(variable)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(variable, ids_of(op, value, rows)) * many)
        for shard, gradient in zip(shards, tape.gradient(loss, shards)):
            shard.scatter_sub(tf.IndexedSlices(gradient.values * 0.25, gradient.indices))
    elif "assign" in op["do"]:
        getattr(variable, op["do"])(many)
    else:
        # Equal rows with equal values: whichever is last.
        getattr(variable, op["do"])(tf.IndexedSlices(many, ids_of(op, value, rows)))
    return tf.group(*[made for made in graph.get_operations() if made not in before and made.type != "Placeholder"])
