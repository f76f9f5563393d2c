"""TensorFlow's tutorial for parameter servers: Keras' Model.fit with ParameterServerStrategy, over "grpc". Nothing here knows of starwire."""

import os

import tensorflow as tf

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
os.environ["GRPC_FAIL_FAST"] = "use_caller"

if resolver.task_type in ("worker", "ps"):
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol=resolver.rpc_layer or "grpc",
        start=True,
    )
    print(f"{resolver.task_type} {resolver.task_id} serves {server.server_def.protocol}")
    server.join()

strategy = tf.distribute.ParameterServerStrategy(
    resolver,
    variable_partitioner=tf.distribute.experimental.partitioners.MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=2),
)
xs = tf.random.stateless_uniform((200, 10), (1, 2))
ys = tf.reduce_sum(xs, axis=1, keepdims=True)
dataset = tf.data.Dataset.from_tensor_slices((xs, ys)).shuffle(200).repeat().batch(20)

with strategy.scope():
    model = tf.keras.models.Sequential([tf.keras.layers.Dense(10), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.legacy.SGD(0.02), loss="mse", steps_per_execution=10)

history = model.fit(dataset, epochs=4, steps_per_epoch=20, verbose=2).history["loss"]
if not history[-1] < history[0]:
    raise SystemExit(f"the loss did not fall: {history}")
print(f"result: loss {history[-1]:.4f}")
