"""Training steps of TensorFlow 2: functions that a ClusterCoordinator schedules on the workers of a ParameterServerStrategy.

The chief, which has no server, drives them. Values are checked as in cases.py.
"""

import pathlib
import sys

import numpy as np
import tensorflow as tf

from cases import KB, MB, Case, Ctr, _digest

# Steps that the chief schedules for each worker before it waits for them.
AHEAD = 16

# TensorFlow 1.15 has the strategy for Estimators only, and no coordinator.
SUPPORTED = tf.__version__.split(".")[0] != "1"


class Functions(Case):
    """Subclasses build `step`, a tf.function that takes the number of the step."""

    driver = "chief"
    ps, workers = 2, 1
    # Variables of at least so many bytes are cut into a part for each server.
    part_bytes = None
    # Steps of a function, in a loop, as with Keras' steps_per_execution.
    at_once = 1

    # Functions that a worker runs beside the one that it began before them; None: with TensorFlow's coordinator.
    pipeline = None

    def connect(self, resolver, pipeline=None):
        """Makes this process the chief; without a resolver, everything stays in it."""
        self.strategy = self.coordinator = None
        self.pipeline = pipeline
        if resolver is not None:
            partitioner = self.part_bytes and tf.distribute.experimental.partitioners.MinSizePartitioner(min_shard_bytes=self.part_bytes, max_shards=self.ps)
            self.strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner or None)
            self.coordinator = self._coordinator()
            with self.strategy.scope():
                self.build()
        else:
            self.build()

        @tf.function
        def several(number):
            for _ in tf.range(self.at_once - 1):
                self.step(number)
                number += 1
            return self.step(number)

        self.several = several

    def _coordinator(self):
        if self.pipeline is None:
            return tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
        import starwire

        return starwire.coordinator(self.strategy, pipeline=self.pipeline)

    def run(self, steps=1):
        """Returns the last step's result."""
        result = None
        end = self.steps + steps
        while self.steps < end:
            together = self.at_once if end - self.steps >= self.at_once else 1
            function = self.step if together == 1 else self.several
            number = tf.constant(self.steps, tf.int64)
            result = self.coordinator.schedule(function, args=(number,)) if self.coordinator else function(number)
            self.steps += together
        if self.coordinator:
            self.coordinator.join()
            result = result.fetch()
        return result

    def burst(self):
        """The steps that are scheduled together."""
        return self.workers * AHEAD


class FunctionVariables(Functions):
    """`count` float variables of `size` bytes: each is pulled and turned into a gradient, which is pushed and applied."""

    def __init__(self, name, title, count, size):
        super().__init__(name, title)
        self.count, self.elements = count, size // 4

    def _start(self):
        base = (np.arange(self.elements, dtype=np.float32) % 64 + 1) / np.float32(64)
        return base[None, :] + np.arange(self.count, dtype=np.float32)[:, None] % 13

    def _rates(self):
        return (1 + np.arange(self.count) % 7).astype(np.float32) / np.float32(16384)

    def build(self):
        rates = self._rates()
        self.variables = [tf.Variable(value) for value in self._start()]
        # Steps that overlap take the same values: their number says whether one is missing.
        self.counter = tf.Variable(0, dtype=tf.int64) if self.pipeline else None

        @tf.function
        def step(number):
            for variable, rate in zip(self.variables, rates):
                variable.assign_sub(variable * rate)
            if self.counter is not None:
                self.counter.assign_add(1, read_value=False)

        self.step = step

    def init(self):
        if self.counter is not None:
            self.counter.assign(0)
        for variable, value in zip(self.variables, self._start()):
            variable.assign(value)

    def state(self):
        return [variable.numpy() for variable in self.variables]

    def check(self, total_steps):
        want, rates = self._start(), self._rates()[:, None]
        if self.counter is not None:
            assert int(self.counter.numpy()) == total_steps, f"the counter is {int(self.counter.numpy())} after {total_steps} steps"
            got = np.array(self.state())
            assert np.all((0 < got) & (got < want)), "the variables did not fall"
            return float(got.sum())
        for _ in range(total_steps):
            want -= want * rates
        for index, got in enumerate(self.state()):
            assert np.array_equal(got, want[index]), f"variable {index} differs from numpy after {total_steps} steps: {got[:4]} is not {want[index, :4]}"
        return float(want.sum())


class Tiny(Functions):
    """A function that does next to nothing: what a coordinator and its workers take for a step. All workers are in one process."""

    ps = 1
    together = True

    def __init__(self, name, title, workers):
        super().__init__(name, title)
        self.workers = workers

    def build(self):
        self.counter = tf.Variable(0, dtype=tf.int64)

        @tf.function
        def step(number):
            self.counter.assign_add(1, read_value=False)

        self.step = step

    def init(self):
        self.counter.assign(0)

    def state(self):
        return [self.counter.numpy()]

    def check(self, total_steps):
        assert self.state()[0] == total_steps, f"the counter is {self.state()[0]} after {total_steps} steps"
        return float(total_steps)


class KerasCtr(Functions):
    """The click-through-rate model of cases.py in Keras: 26 embeddings in parts and a perceptron, Adagrad."""

    part_bytes = 1 * KB

    def __init__(self, name, title, batch, workers):
        super().__init__(name, title)
        self.batch = self.examples = batch
        self.workers = workers

    def build(self):
        try:
            import tf_keras as keras
        except ImportError:  # before TensorFlow 2.16, this is TensorFlow's Keras
            keras = tf.keras
        random = np.random.RandomState(Ctr.data_seed)
        ids = (random.zipf(1.3, (Ctr.BATCHES, self.batch, Ctr.FIELDS)) * 7919 % Ctr.VOCABULARY).astype(np.int64)
        dense = random.rand(Ctr.BATCHES, self.batch, Ctr.DENSE).astype(np.float32)
        clicks = ((ids[:, :, :3].sum(axis=2) % 5 < 2) ^ (dense[:, :, 0] > 0.9)).astype(np.float32)[:, :, None]

        inputs = [keras.Input([Ctr.DENSE])] + [keras.Input([], dtype=tf.int64) for _ in range(Ctr.FIELDS)]
        layer = keras.layers.Concatenate()(inputs[:1] + [keras.layers.Embedding(Ctr.VOCABULARY, Ctr.DIM)(field) for field in inputs[1:]])
        for width in Ctr.LAYERS:
            layer = keras.layers.Dense(width, "relu")(layer)
        self.model = keras.Model(inputs, keras.layers.Dense(1)(layer))
        self.optimizer = keras.optimizers.Adagrad(0.05)
        self.optimizer.build(self.model.trainable_variables)

        def replica(dense, ids, clicks):
            with tf.GradientTape() as tape:
                logits = self.model([dense] + tf.unstack(ids, axis=1), training=True)
                loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=clicks, logits=logits))
            gradients = tape.gradient(loss, self.model.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables))
            return loss

        @tf.function
        def step(number):
            index = number % Ctr.BATCHES
            batch = [tf.gather(tf.constant(values), index) for values in (dense, ids, clicks)]
            return self.strategy.run(replica, args=batch) if self.strategy else replica(*batch)

        self.step, self.losses = step, []

    def run(self, steps=1):
        self.losses.append(float(super().run(steps)))

    def init(self):
        random = np.random.RandomState(Ctr.first_seed)
        for variable in self.model.trainable_variables:
            variable.assign(random.uniform(-0.05, 0.05, variable.shape).astype(np.float32))
        for variable in self.optimizer.variables:
            variable.assign(tf.fill(variable.shape, tf.cast(0.1, variable.dtype)) if len(variable.shape) else tf.cast(variable, variable.dtype))
        self.optimizer.iterations.assign(0)
        self.losses.clear()

    def trace(self, steps):
        self.init()
        self.steps = 0
        for _ in range(steps):
            self.run()
        return _digest([np.array(self.losses, np.float32)])

    def check(self, total_steps):
        got = int(self.optimizer.iterations.numpy())
        assert got == total_steps, f"the workers made {total_steps} steps, the optimizer counted {got}"
        early, late = np.mean(self.losses[:5]), np.mean(self.losses[-5:])
        assert np.isfinite(late) and late < early, f"the loss did not fall: {early} → {late}"
        return float(late)


def all_functions():
    if not SUPPORTED:
        return []
    return [
        FunctionVariables("tf2-300x1KB", "TensorFlow 2: 300 variables × 1 KB, 2 ps", 300, 1 * KB),
        FunctionVariables("tf2-100x4KB", "TensorFlow 2: 100 variables × 4 KB, 2 ps", 100, 4 * KB),
        FunctionVariables("tf2-10x1MB", "TensorFlow 2: 10 variables × 1 MB, 2 ps", 10, 1 * MB),
        KerasCtr("tf2-ctr", "TensorFlow 2: Keras CTR model, 2 ps, 1 worker, batch 512", 512, 1),
        KerasCtr("tf2-ctr-2w", "TensorFlow 2: Keras CTR model, 2 ps, 2 workers, batch 512", 512, 2),
    ]


def _at_once(steps, case):
    case.at_once = steps
    return case


def others():
    """Only `--cases` selects these in benches/tf/run.py, and those below."""
    if not SUPPORTED:
        return []
    return [
        _at_once(8, FunctionVariables("tf2-300x1KB-8s", "TensorFlow 2: 300 variables × 1 KB, 2 ps, 8 steps in a loop", 300, 1 * KB)),
        FunctionVariables("tf2-30x1KB", "TensorFlow 2: 30 variables × 1 KB, 2 ps", 30, 1 * KB),
        _at_once(8, KerasCtr("tf2-ctr-8s", "TensorFlow 2: Keras CTR model, 2 ps, 1 worker, batch 512, 8 steps in a loop", 512, 1)),
    ]


def many_workers():
    if not SUPPORTED:
        return []
    return [Tiny(f"tf2-tiny-{workers}w", f"TensorFlow 2: a step that adds 1, {workers} workers", workers) for workers in (1, 4, 16, 64)]
