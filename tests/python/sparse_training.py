"""Training of embeddings, by rows."""

from cluster import one, tf
from tensors import digest

ROWS = 40


def keras_momentum():
    class KerasMomentum(one().train.MomentumOptimizer):
        """By the operation that Keras uses."""

        def _resource_apply_sparse(self, grad, var, indices):
            accum = self.get_slot(var, "momentum")
            lr, momentum = (tf.cast(value, grad.dtype) for value in (self._learning_rate_tensor, self._momentum_tensor))
            return tf.raw_ops.ResourceSparseApplyKerasMomentum(var=var.handle, accum=accum.handle, lr=lr, grad=grad, indices=indices, momentum=momentum, use_nesterov=True)

    return KerasMomentum(0.1, 0.9)


def optimizer(name):
    train = one().train
    if name == "KerasMomentum":
        return keras_momentum()
    return train.MomentumOptimizer(0.1, 0.9) if name == "Momentum" else getattr(train, f"{name}Optimizer")(0.05)


def build(name, use_resource):
    """Tables in one and in two parts, of two types, looked up by ids of two types and ranks. Returns the feeds, the loss and the update."""
    feeds, losses = [], []
    setter = one().train.replica_device_setter(ps_tasks=2, worker_device="/job:worker/task:0")
    with one().device(setter):
        for at in range(6):
            ids = one().placeholder(tf.int64 if at % 2 else tf.int32, [None] if at < 4 else [None, 3])
            table = one().get_variable(
                f"table{at}", (ROWS, 8), tf.float64 if at == 3 else tf.float32, one().random_normal_initializer(seed=at), use_resource=use_resource,
                partitioner=one().fixed_size_partitioner(2) if at % 3 else None,
            )  # fmt: skip
            rows = tf.nn.embedding_lookup(table, ids)
            # Every example has another gradient, so that the order of additions matters.
            position = tf.cast(tf.range(tf.size(ids)), rows.dtype)
            losses.append(tf.cast(tf.reduce_sum(tf.sin(rows) * tf.reshape(position, tf.concat([tf.shape(ids), [1]], 0))), tf.float32))
            feeds.append(ids)
        loss = tf.add_n(losses)
        train = optimizer(name).minimize(loss, global_step=one().train.get_or_create_global_step())
    return feeds, loss, train


def batches(feeds):
    import numpy as np

    rng = np.random.default_rng(3)
    for count, different in ((64, 5), (0, 1), (1, ROWS), (7, 2), (300, ROWS), (64, 1)):
        yield {feed: rng.integers(0, different, (count,) if len(feed.shape) == 1 else (count, 3)) for feed in feeds}


def train_sparse(target, name, use_resource):
    with tf.Graph().as_default():
        feeds, loss, train = build(name, use_resource)
        with one().Session(target) as sess:
            sess.run(one().global_variables_initializer())
            seen = [digest(sess.run([loss, train], batch)[0]) for batch in batches(feeds)]
            # Slots as well.
            return seen + [digest(value) for value in sess.run(one().global_variables())]
