"""Python generators as data, for functions of TensorFlow 2 (functions.py).

The op "generated" makes a dataset of a generator that is given a value, and adds its numbers up. The generator runs in the process that has made the
function or the graph.
"""

import numpy as np
from cluster import tf

DTYPES = ("float32", "int64", "string")


def fill(rng, op, inputs):
    """Completes a record."""
    op["op"], op["in"], op["dtype"] = "generated", [rng.choice(inputs)], rng.choice(DTYPES)
    op["count"], op["batch"], op["ahead"], op["grows"] = rng.choice((0, 1, 3, 5)), rng.choice((0, 2)), rng.choice((0, 1)), rng.random() < 0.4


def numbers(op, start):
    """Yields vectors, or parts of them of different lengths."""
    for number in range(op["count"]):
        made = np.clip(start * np.float32(number) + np.float32(1), -1e6, 1e6)
        made = made[: 1 + number % len(made)] if op["grows"] else made
        whole = np.nan_to_num(made).astype(np.int64)
        yield {"float32": made, "int64": whole, "string": [b"%d" % one for one in whole]}[op["dtype"]]


def value(op, given):
    width = given.shape[0]
    shape = (None,) if op["grows"] else (width,)
    data = tf.data.Dataset.from_generator(lambda start: numbers(op, start), output_signature=tf.TensorSpec(shape, op["dtype"]), args=(given,))
    if op["batch"] and not op["grows"]:
        data = data.batch(op["batch"])
    if op["ahead"]:
        data = data.prefetch(op["ahead"])
    if op["dtype"] == "string":
        data = data.map(lambda texts: tf.strings.to_hash_bucket_fast(texts, 97))
    total = data.reduce(0.0, lambda total, some: total * 0.5 + tf.reduce_sum(tf.cast(some, tf.float32)))
    return tf.fill((width,), tf.clip_by_value(total, -1e3, 1e3))
