"""The models of DeepRec's zoo that models.py lacks: xDeepFM on the data of models.py, the others on data like Taobao's advertisements.

The shapes are like the published ones; layers, vectors and histories are shorter where a step would take a core more than some 40 ms. What draws at random
(dropout) is left out, so that every protocol computes the same losses.
"""

import numpy as np
import tensorflow as tf

from models import Criteo

tf1 = tf.compat.v1


class XDeepFm(Criteo):
    """Wide & Deep, plus a compressed interaction network: each layer weighs the products of all pairs of its input and the embeddings, per dimension."""

    DIM, INTERACTIONS = 8, (8, 8)

    def logits(self, dense):
        deep = [self.deep(field) for field in range(self.FIELDS)]
        wide = tf.add_n([self.wide(field) for field in range(self.FIELDS)])
        vectors = tf.stack(deep, axis=2)  # [batch, dimension, field]
        layer, maps, sums = vectors, self.FIELDS, []
        for index, width in enumerate(self.INTERACTIONS):
            products = tf.reshape(tf.matmul(layer[:, :, :, None], vectors[:, :, None, :]), [self.batch * self.DIM, maps * self.FIELDS])
            weights = self.variable(f"interactions{index}", [maps * self.FIELDS, width], (maps * self.FIELDS) ** -0.5)
            layer, maps = tf.nn.relu(tf.reshape(tf.matmul(products, weights), [self.batch, self.DIM, width])), width
            sums.append(tf.reduce_sum(layer, axis=1))
        interactions = self.perceptron(tf.concat(sums, axis=1), (1,), "sums_")
        return self.perceptron(tf.concat([dense, *deep], axis=1), self.LAYERS + (1,)) + wide + interactions


class Taobao(Criteo):
    """The fields of a user, those of an item, and a history: items that the user has looked at, and their categories, in the same tables as the item.

    The ids are the fields, then the items of the history, then their categories. Instead of dense features, there is a mask of the history.
    """

    # Rows by field: user, segment, group, age, spending, shopping, occupation, city; item, category, campaign, customer, brand, position, price.
    rows = (100_000, 100, 100, 10, 10, 10, 10, 10) + (100_000, 10_000, 100_000, 100_000, 100_000, 10, 50)
    FIELDS, USER, ITEM, CATEGORY = len(rows), 0, 8, 9
    LENGTH, TASKS, ATTENTION = 20, 1, (80, 40)

    def data(self, random):
        shape = (self.BATCHES, self.batch)
        items = random.zipf(1.3, (*shape, 1 + self.LENGTH)) * 7919 % self.rows[self.ITEM]
        mask = np.arange(self.LENGTH) < random.randint(1, self.LENGTH + 1, (*shape, 1))
        items[:, :, 1:] *= mask  # the end is filled up with item 0
        categories = items % self.rows[self.CATEGORY]
        fields = random.zipf(1.3, (*shape, self.FIELDS)) * 7919 % np.array(self.rows)
        fields[:, :, self.ITEM], fields[:, :, self.CATEGORY] = items[:, :, 0], categories[:, :, 0]
        # Users click what is of a category that they know, and half of them buy it.
        clicks = ((categories[:, :, 1:] == categories[:, :, :1]) & mask).any(axis=2)
        labels = np.stack([clicks, clicks & (fields[:, :, self.USER] % 2 == 0)], axis=2)[:, :, : self.TASKS]
        return np.concatenate([fields, items[:, :, 1:], categories[:, :, 1:]], axis=2).astype(np.int64), mask.astype(np.float32), labels.astype(np.float32)

    def fields(self, *fields):
        return tf.concat([self.deep(field) for field in fields], axis=1)

    def user(self, mask):
        """The fields of the user and the mean of the history."""
        mean = tf.reduce_sum(self.history() * mask[:, :, None], axis=1) / tf.reduce_sum(mask, axis=1, keepdims=True)
        return tf.concat([self.fields(*range(self.ITEM)), mean], axis=1)

    def item(self):
        return self.fields(*range(self.ITEM, self.FIELDS))

    def history(self):
        """[batch, length, vector of the item and vector of its category]"""
        ends = self.FIELDS, self.FIELDS + self.LENGTH, self.FIELDS + 2 * self.LENGTH
        tables = [self.table("deep", field, 0.05, self.DIM) for field in (self.ITEM, self.CATEGORY)]
        return tf.concat([tf.nn.embedding_lookup(table, self.batch_ids[:, begin:end]) for table, begin, end in zip(tables, ends, ends[1:])], axis=2)

    def weights(self, name, fan_in, width):
        return self.variable(name, [fan_in, width], fan_in**-0.5)

    def attention(self, target, keys, mask):
        """[batch, length]: how much each of the keys matters for the target."""
        width = int(keys.shape[2])
        targets = tf.tile(target[:, None, :], [1, self.LENGTH, 1])
        pairs = tf.concat([targets, keys, targets - keys, targets * keys], axis=2)
        scores = self.perceptron(tf.reshape(pairs, [self.batch * self.LENGTH, 4 * width]), self.ATTENTION + (1,), "attention_", tf.sigmoid)
        return tf.nn.softmax(tf.reshape(scores, [self.batch, self.LENGTH]) + penalty(mask))

    def dice(self, layer):
        """A rectifier whose corner is at the mean of the batch, with a learned slope below."""
        mean, variance = tf.nn.moments(layer, [0], keepdims=True)
        above = tf.sigmoid((layer - mean) * tf1.rsqrt(variance + 1e-8))
        return layer * (above + (1 - above) * self.variable(f"slope{self.seed}", [int(layer.shape[1])], 1e-6))


def penalty(mask):
    """Added to scores, it leaves nothing of what the mask hides."""
    return (mask - 1) * 2.0**32


class Din(Taobao):
    """Deep Interest Network: the sum of the history, weighted by attention to the item."""

    DIM = 18

    def logits(self, mask):
        target, keys = self.fields(self.ITEM, self.CATEGORY), self.history()
        total = tf.reduce_sum(keys * mask[:, :, None], axis=1)
        interest = self.interest(target, keys, mask)
        return self.perceptron(tf.concat([self.deep(self.USER), target, total, target * total, interest], axis=1), (200, 80, 1), activation=self.dice)

    def interest(self, target, keys, mask):
        return tf.reduce_sum(keys * self.attention(target, keys, mask)[:, :, None], axis=1)


class Dien(Din):
    """Deep Interest Evolution Network: a recurrent network over the history, attention to its states, and another network that changes by this attention.

    The networks are loops of `dynamic_rnn`, as users write them: in TensorFlow 2 `While` operations, in 1.15 operations of the graph. A state should also
    tell the next item from that of another user.
    """

    DIM, ATTENTION = 8, (40, 20)

    def interest(self, target, keys, mask):
        states = self.recurrent(keys, mask, "extract_")[0]
        truth = tf.roll(keys, -1, axis=1)
        follows = tf.concat([mask[:, 1:], tf.zeros([self.batch, 1])], axis=1)
        losses = [tf.nn.softplus(sign * tf.reduce_sum(states * item, axis=2)) for sign, item in ((-1, truth), (1, tf.roll(truth, 1, axis=0)))]
        self.auxiliary = tf.reduce_sum(tf.add_n(losses) * follows) / tf.reduce_sum(follows)
        return self.recurrent(states, mask, "evolve_", self.attention(target, states, mask))[1]

    def recurrent(self, inputs, mask, name, attention=None):
        """All states, and the last."""
        size = int(inputs.shape[2])
        weights = []
        for kind, width in (("gates", 2 * size), ("change", size)):
            weights += [self.weights(f"{name}{kind}", 2 * size, width), self.variable(f"{name}{kind}_bias", [width], 1e-6)]
        cell = Gru(size, attention is not None, *weights)
        if attention is not None:
            inputs = tf.concat([inputs, attention[:, :, None]], axis=2)
        return tf1.nn.dynamic_rnn(cell, inputs, sequence_length=tf.cast(tf.reduce_sum(mask, axis=1), tf.int32), dtype=tf.float32, scope=f"{name}loop")

    def objective(self, mask, labels):
        loss = super().objective(mask, labels)
        return loss + self.auxiliary


class Gru:
    """A cell as `dynamic_rnn` wants it; TensorFlow's own needs a Keras. With attention (the last column of its inputs), that scales the update."""

    def __init__(self, size, attends, *weights):
        self.state_size = self.output_size = size
        self.attends = attends
        # Read once, before the loop, as `dynamic_rnn` does with the variables of TensorFlow's cells.
        self.gates, self.gates_bias, self.change, self.change_bias = map(tf.convert_to_tensor, weights)

    def zero_state(self, batch, dtype):
        return tf.zeros([batch, self.state_size], dtype)

    def __call__(self, inputs, state, scope=None):
        if self.attends:
            inputs, attention = tf.split(inputs, [self.state_size, 1], axis=1)
        reset, update = tf.split(tf.sigmoid(tf.matmul(tf.concat([inputs, state], axis=1), self.gates) + self.gates_bias), 2, axis=1)
        change = tf.tanh(tf.matmul(tf.concat([inputs, reset * state], axis=1), self.change) + self.change_bias)
        if self.attends:
            update = update * attention
        state = state + update * (change - state)
        return state, state


class Bst(Taobao):
    """Behavior Sequence Transformer: a transformer's layer over the history and the item."""

    DIM, HEADS = 8, 2

    def logits(self, mask):
        target = self.fields(self.ITEM, self.CATEGORY)[:, None, :]
        sequence, mask = tf.concat([self.history(), target], axis=1), tf.concat([mask, tf.ones([self.batch, 1])], axis=1)
        length, width = self.LENGTH + 1, 2 * self.DIM
        sequence += self.variable("places", [length, width], 0.05)
        rows = tf.reshape(self.transformer(sequence, mask), [self.batch, length * width])
        others = self.fields(*(field for field in range(self.FIELDS) if field not in (self.ITEM, self.CATEGORY)))
        return self.perceptron(tf.concat([rows, others], axis=1), (128, 64, 1), activation=tf.nn.leaky_relu)

    def transformer(self, sequence, mask):
        _, length, width = map(int, sequence.shape)
        rows = tf.reshape(sequence, [self.batch * length, width])

        def heads(name):
            projected = tf.matmul(rows, self.weights(name, width, width))
            return tf.transpose(tf.reshape(projected, [self.batch, length, self.HEADS, width // self.HEADS]), [0, 2, 1, 3])

        scores = tf.matmul(heads("queries"), heads("keys"), transpose_b=True) * (width // self.HEADS) ** -0.5
        attention = tf.nn.softmax(scores + penalty(mask)[:, None, None, :])
        mixed = tf.reshape(tf.transpose(tf.matmul(attention, heads("values")), [0, 2, 1, 3]), [self.batch * length, width])
        rows = self.normalized(rows + tf.matmul(mixed, self.weights("mix", width, width)), "mixed")
        return self.normalized(rows + self.perceptron(rows, (2 * width, width), "forward_", tf.nn.leaky_relu), "forward")

    def normalized(self, rows, name):
        mean, variance = tf.nn.moments(rows, [1], keepdims=True)
        width = [int(rows.shape[1])]
        return (rows - mean) * tf1.rsqrt(variance + 1e-6) * (1 + self.variable(f"{name}_scale", width, 1e-6)) + self.variable(f"{name}_shift", width, 1e-6)


class Mmoe(Taobao):
    """Multi-gate Mixture-of-Experts: clicks and purchases, each from its own mixture of the same perceptrons."""

    TASKS, EXPERTS, LAYERS = 2, 3, (256, 128, 64)

    def logits(self, mask):
        features = tf.concat([self.user(mask), self.item()], axis=1)
        experts = tf.stack([tf.nn.relu(self.perceptron(features, self.LAYERS, f"expert{index}_")) for index in range(self.EXPERTS)], axis=1)
        towers = []
        for task in range(self.TASKS):
            gate = tf.nn.softmax(self.perceptron(features, (self.EXPERTS,), f"gate{task}_"))
            towers.append(self.perceptron(tf.reduce_sum(experts * gate[:, :, None], axis=1), (64, 32, 1), f"tower{task}_"))
        return tf.concat(towers, axis=1)


class Esmm(Taobao):
    """Entire Space Multi-Task Model: whether there is a click, and a purchase if there is one; it learns from clicks, and purchases without this condition."""

    TASKS, LAYERS = 2, (256, 128, 96, 64)

    def logits(self, mask):
        towers = self.perceptron(self.user(mask), self.LAYERS, "user_"), self.perceptron(self.item(), self.LAYERS, "item_")
        both = tf.nn.relu(tf.concat(towers, axis=1))
        return [self.perceptron(both, self.LAYERS + (1,), name) for name in ("click_", "buy_")]

    def objective(self, mask, labels):
        click, buy = self.logits(mask)
        clicks = self.reduce(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels[:, :1], logits=click))
        return clicks + tf1.losses.log_loss(labels[:, 1:], tf.sigmoid(click) * tf.sigmoid(buy))


class Dssm(Taobao):
    """Deep Structured Semantic Model: the cosine of a user's vector and an item's."""

    LAYERS = (256, 128, 64, 32)

    def logits(self, mask):
        user = tf.nn.l2_normalize(self.perceptron(self.user(mask), self.LAYERS, "user_"), axis=1)
        item = tf.nn.l2_normalize(self.perceptron(self.item(), self.LAYERS, "item_"), axis=1)
        return self.perceptron(tf.reduce_sum(user * item, axis=1, keepdims=True), (1,), "scale_")


KINDS = (
    ("din", "DIN", Din), ("dien", "DIEN", Dien), ("bst", "BST", Bst), ("mmoe", "MMoE", Mmoe), ("esmm", "ESMM", Esmm), ("dssm", "DSSM", Dssm),
    ("xdeepfm", "xDeepFM", XDeepFm),
)
# What `--cases zoo` selects.
NAMES = [f"{name}-512" for name in ("wdl", "dlrm", "deepfm")] + [f"{name}-512" for name, _, _ in KINDS]


def other_models():
    """Only `--cases` selects these."""
    return [kind(f"{name}-512", title, 512) for name, title, kind in KINDS]
