"""An Estimator with TFRA's dynamic embeddings on the parameter servers, like TFRA's movielens demo. Nothing here knows of starwire."""

import sys

import numpy as np
import tensorflow as tf
import tensorflow_recommenders_addons as tfra

STEPS = int(sys.argv[2])
v1 = tf.compat.v1


def input_fn(seed):
    def make():
        rng = np.random.RandomState(seed)
        users, movies = rng.randint(0, 200, 4096).astype(np.int64), rng.randint(0, 300, 4096).astype(np.int64)
        ratings = ((users + movies) % 5).astype(np.float32)
        return tf.data.Dataset.from_tensor_slices(({"user": users, "movie": movies}, ratings)).repeat().batch(64)

    return make


def model_fn(features, labels, mode, params):
    servers = [f"/job:ps/replica:0/task:{i}" for i in range(params["ps"])]
    rows = []
    for name in ("user", "movie"):
        table = tfra.dynamic_embedding.get_variable(f"{name}_embeddings", devices=servers, dim=8, initializer=tf.keras.initializers.Constant(0.1))
        looked_up, _ = tfra.dynamic_embedding.embedding_lookup_unique(table, features[name], return_trainable=True, name=f"{name}_lookup")
        rows.append(looked_up)
    hidden = v1.layers.dense(tf.concat(rows, axis=1), 16, activation=tf.nn.relu, kernel_initializer=v1.glorot_uniform_initializer(seed=3))
    predicted = tf.squeeze(v1.layers.dense(hidden, 1, kernel_initializer=v1.glorot_uniform_initializer(seed=4)), axis=1)
    loss = tf.reduce_mean(tf.square(predicted - labels))
    optimizer = tfra.dynamic_embedding.DynamicEmbeddingOptimizer(v1.train.AdamOptimizer(0.01))
    train = optimizer.minimize(loss, global_step=v1.train.get_or_create_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train, training_hooks=[Losses(loss)])


class Losses(tf.estimator.SessionRunHook):
    def __init__(self, loss):
        self.loss = loss

    def before_run(self, context):
        return tf.estimator.SessionRunArgs(self.loss)

    def after_run(self, context, values):
        print("loss", values.results, flush=True)


def main():
    v1.logging.set_verbosity(v1.logging.INFO)
    config = tf.estimator.RunConfig(model_dir=sys.argv[1], save_checkpoints_steps=500, tf_random_seed=1, log_step_count_steps=200)
    print("task", config.task_type, config.task_id, "protocol", config.protocol)
    model = tf.estimator.Estimator(model_fn, config=config, params={"ps": config.num_ps_replicas})
    tf.estimator.train_and_evaluate(
        model,
        tf.estimator.TrainSpec(input_fn(config.global_id_in_cluster or 0), max_steps=STEPS),
        tf.estimator.EvalSpec(input_fn(99), steps=1),
    )
    if config.task_type == "chief":
        print(f"result: global step {tf.train.load_variable(sys.argv[1], 'global_step')}")


if __name__ == "__main__":
    main()
