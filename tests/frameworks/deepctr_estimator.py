"""DeepCTR's DeepFM as an Estimator, as its documentation trains it. Nothing here knows of starwire."""

import sys

import numpy as np
import tensorflow as tf
from deepctr.estimator import DeepFMEstimator

STEPS = 1000
ROWS = 2048


def input_fn(seed, repeat):
    def make():
        rng = np.random.RandomState(seed)
        sparse = {f"C{i}": rng.randint(0, 50, ROWS) for i in range(4)}
        dense = {f"I{i}": rng.rand(ROWS).astype(np.float32) for i in range(3)}
        labels = ((sparse["C0"] % 2) ^ (dense["I0"] > 0.5)).astype(np.float32)
        data = tf.data.Dataset.from_tensor_slices(({**sparse, **dense}, labels)).shuffle(ROWS, seed=seed)
        return (data.repeat() if repeat else data).batch(64)

    return make


def main():
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)
    linear, dnn = [], []
    for i in range(4):
        column = tf.feature_column.categorical_column_with_identity(f"C{i}", 50)
        dnn.append(tf.feature_column.embedding_column(column, 8))
        linear.append(column)
    for i in range(3):
        dnn.append(tf.feature_column.numeric_column(f"I{i}"))
        linear.append(tf.feature_column.numeric_column(f"I{i}"))
    config = tf.estimator.RunConfig(model_dir=sys.argv[1], save_checkpoints_steps=100, tf_random_seed=1)
    print("task", config.task_type, config.task_id, "protocol", config.protocol, "chief", config.is_chief)
    model = DeepFMEstimator(linear, dnn, task="binary", config=config)
    tf.estimator.train_and_evaluate(
        model,
        tf.estimator.TrainSpec(input_fn(config.global_id_in_cluster or 0, True), max_steps=STEPS),
        tf.estimator.EvalSpec(input_fn(99, False), steps=None, start_delay_secs=0, throttle_secs=0),
    )
    if config.task_type == "chief":
        step = tf.train.load_variable(sys.argv[1], "global_step")
        print(f"result: global step {step}")


if __name__ == "__main__":
    main()
