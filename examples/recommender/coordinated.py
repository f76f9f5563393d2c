"""The same kind of model in TensorFlow 2: functions that a ClusterCoordinator schedules on the workers of a ParameterServerStrategy."""

import time

import model
import numpy as np
import tensorflow as tf


class Chief:
    """Creates the variables on the parameter servers and schedules the steps. It has no server of its own."""

    def __init__(self, cluster, protocol, batch):
        if protocol != "grpc":
            import starwire  # noqa: F401  registers the protocols
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, task_type="chief", task_id=0, rpc_layer=protocol)
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            self._step = _build(batch)
        self._made = 0

    def train(self, steps, one_by_one=False):
        """Returns (seconds, losses, global step afterwards)."""
        results = []
        started = time.perf_counter()
        for _ in range(steps):
            results.append(self._coordinator.schedule(self._step.function, args=(tf.constant(self._made),)))
            self._made += 1
            if one_by_one:
                self._coordinator.join()
        self._coordinator.join()
        seconds = time.perf_counter() - started
        losses = [np.float32(result.fetch()) for result in (results if one_by_one else results[-10:])]
        return seconds, losses, int(self._step.counter.numpy())


class _Step:
    def __init__(self, function, counter):
        self.function, self.counter = function, counter


def _build(batch):
    variables = []

    def variable(shape, scale, seed):
        variables.append(tf.Variable(tf.random.stateless_normal(shape, seed=[model.SEED, seed], stddev=scale)))
        return variables[-1]

    tables = [variable([model.VOCABULARY, model.DIMENSION], 0.05, feature) for feature in range(model.FEATURES)]
    wide = [variable([model.VOCABULARY, 1], 0.01, 100 + feature) for feature in range(model.FEATURES)]
    layers = []
    for number, (width, units) in enumerate(zip((model.FEATURES * model.DIMENSION, *model.HIDDEN), (*model.HIDDEN, 1))):
        layers.append((variable([width, units], (2.0 / width) ** 0.5, 200 + number), variable([units], 0.0, 300 + number)))
    accumulators = [tf.Variable(tf.fill(one.shape, 0.1)) for one in variables]
    counter = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def step(number):
        ids, labels = model.examples(number, 0, batch)
        with tf.GradientTape() as tape:
            layer = tf.concat([tf.gather(table, ids[:, feature]) for feature, table in enumerate(tables)], axis=1)
            for index, (kernel, bias) in enumerate(layers):
                layer = tf.matmul(layer, kernel) + bias
                if index < len(layers) - 1:
                    layer = tf.nn.relu(layer)
            logits = layer + tf.add_n([tf.gather(weights, ids[:, feature]) for feature, weights in enumerate(wide)])
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
        for one, accumulator, gradient in zip(variables, accumulators, tape.gradient(loss, variables)):
            _adagrad(one, accumulator, gradient)
        counter.assign_add(1)
        return loss

    return _Step(step, counter)


def _adagrad(variable, accumulator, gradient):
    common = {"var": variable.handle, "accum": accumulator.handle, "lr": 0.1, "epsilon": 1e-7}
    if isinstance(gradient, tf.IndexedSlices):
        ids, places = tf.unique(gradient.indices)
        rows = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(ids))
        tf.raw_ops.ResourceSparseApplyAdagradV2(grad=rows, indices=ids, **common)
    else:
        tf.raw_ops.ResourceApplyAdagradV2(grad=gradient, **common)
