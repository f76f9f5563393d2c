"""TensorFlow 2: ParameterServerStrategy and ClusterCoordinator over grpc++ (a chief, parameter servers, workers).

    python examples/local.py examples/parameter_server_strategy.py --chief --ps 2 --worker 2
"""

import starwire  # noqa: F401  in every task, including the chief
import tensorflow as tf

STEPS = 100


def main():
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    resolver.rpc_layer = resolver.rpc_layer or "grpc++"  # keep a protocol set by TF_CONFIG
    if resolver.task_type in ("ps", "worker"):
        server = tf.distribute.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol=resolver.rpc_layer)
        server.join()

    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope():
        table = tf.Variable(tf.zeros([1000, 8]), name="table")
        weights = tf.Variable(tf.ones([8]), name="weights")
        steps = tf.Variable(0, dtype=tf.int64, name="steps")

    @tf.function
    def train(ids):
        with tf.GradientTape() as tape:
            rows = tf.gather(table, ids)
            loss = tf.reduce_mean(tf.square(tf.linalg.matvec(rows, weights) - 1.0))
        gradients = tape.gradient(loss, [table, weights])
        table.scatter_sub(tf.IndexedSlices(gradients[0].values * 5.0, gradients[0].indices))
        weights.assign_sub(gradients[1] * 0.1)
        steps.assign_add(1)
        return loss

    @tf.function
    def step():
        return train(tf.random.uniform([256], maxval=1000, dtype=tf.int32))

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    losses = [coordinator.schedule(step) for _ in range(STEPS)]
    coordinator.join()
    first, last = losses[0].fetch(), losses[-1].fetch()
    print(f"{int(steps.numpy())} steps, loss {first:.4f} -> {last:.4f}")
    if int(steps.numpy()) != STEPS or not last < first:
        raise SystemExit("the training is not what it should be")


if __name__ == "__main__":
    main()
