"""A small click-through model: 26 categorical features with an embedding table each, and a multi-layer perceptron on top.

All randomness is seeded, so two runs see the same data, start from the same variables and, with one worker, produce bit-identical results.
"""

import collections

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1

FEATURES = 26
VOCABULARY = 1000
DIMENSION = 16
HIDDEN = (64, 32)
SEED = 20260

Model = collections.namedtuple("Model", "step loss train global_step init uninitialized")


def build(cluster, task, batch):
    """Builds one worker's graph: variables spread over the parameter servers, everything else on the worker."""
    worker = f"/job:worker/task:{task}"
    with v1.device(v1.train.replica_device_setter(worker_device=worker, cluster=cluster)):
        global_step = v1.train.get_or_create_global_step()
        step = v1.placeholder(tf.int32, [], name="step")
        ids, labels = examples(step, task, batch)
        embedded = []
        wide = []
        for feature in range(FEATURES):
            table = _variable(f"embedding_{feature}", [VOCABULARY, DIMENSION], 0.05, feature)
            embedded.append(tf.nn.embedding_lookup(table, ids[:, feature]))
            weights = _variable(f"wide_{feature}", [VOCABULARY, 1], 0.01, 100 + feature)
            wide.append(tf.nn.embedding_lookup(weights, ids[:, feature]))
        layer = tf.concat(embedded, axis=1)
        for number, units in enumerate(HIDDEN):
            layer = tf.nn.relu(_dense(layer, units, f"hidden_{number}", 200 + number))
        logits = _dense(layer, 1, "logits", 300) + tf.add_n(wide)
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
        train = v1.train.AdagradOptimizer(0.1).minimize(loss, global_step=global_step)
        init = v1.global_variables_initializer()
        uninitialized = v1.report_uninitialized_variables()
    return Model(step, loss, train, global_step, init, uninitialized)


def examples(step, task, batch):
    """Returns random features, and labels that follow a learnable rule."""
    ids = tf.random.stateless_uniform([batch, FEATURES], seed=tf.stack([step, SEED + task]), maxval=VOCABULARY, dtype=tf.int32)
    rule = np.random.RandomState(SEED).normal(size=[FEATURES * VOCABULARY]).astype(np.float32)
    score = tf.reduce_sum(tf.gather(tf.constant(rule), ids + tf.range(FEATURES) * VOCABULARY), axis=1, keepdims=True)
    return ids, tf.cast(score > 0, tf.float32)


def _variable(name, shape, scale, seed):
    values = tf.random.stateless_normal(shape, seed=[SEED, seed], stddev=scale)
    return v1.get_variable(name, initializer=values, use_resource=True)


def _dense(inputs, units, name, seed):
    width = int(inputs.shape[1])
    kernel = _variable(f"{name}_kernel", [width, units], (2.0 / width) ** 0.5, seed)
    bias = _variable(f"{name}_bias", [units], 0.0, 1000 + seed)
    return tf.matmul(inputs, kernel) + bias
