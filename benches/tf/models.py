"""Click-through-rate models as they are trained on the Criteo data set: 26 tables in parts on two parameter servers, Adagrad, one worker."""

import numpy as np
import tensorflow as tf

from cases import Ctr

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
    """The first model with other numbers of tasks; only `--cases` selects these."""
    sizes = [(512, 1, 1), (512, 4, 1), (2048, 2, 2)]
    return [WideAndDeep(f"wdl-{batch}-{ps}ps-{workers}w", "Wide & Deep", batch, ps, workers) for batch, ps, workers in sizes]
