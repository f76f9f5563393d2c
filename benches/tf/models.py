"""Click-through-rate models as they are trained on the Criteo data set: 26 tables in parts on two parameter servers, Adagrad, one worker."""

import numpy as np
import tensorflow as tf

from cases import Ctr, FromDataset

# Values of the 26 categorical fields in the Criteo Kaggle data set.
VALUES = (
    1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194, 27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181,
    105, 142_572,
)
# Larger fields are hashed to this many rows, so that several clusters fit into memory. A batch touches far fewer.
MOST_ROWS = 200_000


class Criteo(Ctr):
    workers = 1
    rows = tuple(min(values, MOST_ROWS) for values in VALUES)

    def __init__(self, name, title, batch, ps=2, workers=1):
        super().__init__(name, f"{title}, {ps} ps, {f'{workers} workers, ' if workers > 1 else ''}batch {batch}", batch)
        self.ps, self.parts, self.workers = ps, ps, workers


class WideAndDeep(Criteo):
    """A perceptron over all embeddings, plus a weight for each value."""


class DatasetWideAndDeep(FromDataset, WideAndDeep):
    pass


class WithFtrl(WideAndDeep):
    """The weights are learned by FTRL, the rest by Adagrad, as in TensorFlow's estimator of these models; or everything by FTRL."""

    def __init__(self, name, title, batch, everything, **how):
        super().__init__(name, title, batch, **how)
        self.everything = everything

    def optimizer(self):
        ftrl = tf.compat.v1.train.FtrlOptimizer(0.05, l1_regularization_strength=0.001, l2_regularization_strength=0.001)
        return ftrl if self.everything else Two(ftrl, super().optimizer(), lambda name: name.startswith("wide"))


class Two:
    """An optimizer for the variables with some names, and one for all others."""

    def __init__(self, first, second, is_first):
        self.first, self.second, self.is_first = first, second, is_first

    def minimize(self, loss, global_step):
        variables = tf.compat.v1.trainable_variables()
        mine = [variable for variable in variables if self.is_first(variable.name)]
        first = self.first.minimize(loss, var_list=mine)
        second = self.second.minimize(loss, global_step=global_step, var_list=[variable for variable in variables if not self.is_first(variable.name)])
        return tf.group(first, second)

    def get_slot(self, variable, name):
        return (self.first if self.is_first(variable.name) else self.second).get_slot(variable, name)


class DeepFm(Criteo):
    """The same, plus the products of all pairs of embeddings."""

    def logits(self, dense):
        deep = [self.deep(field) for field in range(self.FIELDS)]
        wide = tf.add_n([self.wide(field) for field in range(self.FIELDS)])
        total, squares = tf.add_n(deep), tf.add_n([tf.square(vector) for vector in deep])
        pairs = 0.5 * tf.reduce_sum(tf.square(total) - squares, axis=1, keepdims=True)
        return self.perceptron(tf.concat([dense, *deep], axis=1), self.LAYERS + (1,)) + wide + pairs


class Dlrm(Criteo):
    """A perceptron over the dense features, the products of all pairs of its result and the embeddings, and a perceptron over these."""

    def logits(self, dense):
        bottom = tf.nn.relu(self.perceptron(dense, (64, self.DIM), "bottom_"))
        vectors = tf.stack([bottom] + [self.deep(field) for field in range(self.FIELDS)], axis=1)
        count = self.FIELDS + 1
        products = tf.reshape(tf.matmul(vectors, vectors, transpose_b=True), [self.batch, count * count])
        below = np.flatnonzero(np.tril(np.ones((count, count)), -1))
        return self.perceptron(tf.concat([bottom, tf.gather(products, below, axis=1)], axis=1), self.LAYERS + (1,))


def all_models():
    kinds = (("wdl", "Wide & Deep", WideAndDeep), ("dlrm", "DLRM", Dlrm), ("deepfm", "DeepFM", DeepFm))
    return [kind(f"{name}-{batch}", title, batch) for name, title, kind in kinds for batch in (512, 2048)]


def other_sizes():
    """The first model with other numbers of tasks and optimizers; only `--cases` selects these."""
    sizes = [(512, 1, 1), (512, 4, 1), (2048, 2, 2)]
    made = [WideAndDeep(f"wdl-{batch}-{ps}ps-{workers}w", "Wide & Deep", batch, ps, workers) for batch, ps, workers in sizes]
    made.append(WideAndDeep("wdl-2048-1ps-1w", "Wide & Deep", 2048, ps=1))
    for batch in (512, 2048):
        made.append(WithFtrl(f"wdl-ftrl-{batch}", "Wide & Deep, the wide part by FTRL", batch, False, ps=1))
        made.append(WithFtrl(f"wdl-all-ftrl-{batch}", "Wide & Deep by FTRL", batch, True, ps=1))
    return made + [DatasetWideAndDeep(f"wdl-data-{batch}", "Wide & Deep, batches from a dataset", batch) for batch in (512, 2048)]
