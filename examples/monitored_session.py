"""MonitoredTrainingSession with checkpoints and recovery after a parameter server restarts. Only the protocol is specific to starwire.

    python examples/local.py examples/monitored_session.py --ps 1 --worker 2
"""

import os
import tempfile

import numpy as np
import starwire  # noqa: F401
import tensorflow as tf

STEPS = 300
v1 = tf.compat.v1


def main():
    v1.disable_eager_execution()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    cluster, job, task = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    server = tf.distribute.Server(cluster, job_name=job, task_index=task, protocol=resolver.rpc_layer or "grpc++")
    if job == "ps":
        server.join()

    with v1.device(v1.train.replica_device_setter(worker_device=f"/job:worker/task:{task}", cluster=cluster)):
        global_step = v1.train.get_or_create_global_step()
        features = tf.random.normal([64, 16], seed=task)
        weights = v1.get_variable("weights", initializer=tf.zeros([16, 1]), use_resource=True)
        wanted = tf.constant(np.linspace(-1, 1, 16, dtype=np.float32)[:, None])
        loss = tf.reduce_mean(tf.square(tf.matmul(features, weights) - tf.matmul(features, wanted)))
        train = v1.train.AdagradOptimizer(0.5).minimize(loss, global_step=global_step)

    directory = os.environ.get("CHECKPOINTS") or tempfile.mkdtemp(prefix="starwire-example-")
    hooks = [v1.train.StopAtStepHook(last_step=STEPS)]
    # A worker uses only the parameter servers and itself, so it need not wait for other workers.
    config = v1.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{task}"])
    with v1.train.MonitoredTrainingSession(
        server.target, is_chief=task == 0, checkpoint_dir=directory if task == 0 else None, hooks=hooks, config=config, save_checkpoint_steps=100
    ) as session:
        while not session.should_stop():
            value, step, _ = session.run([loss, global_step, train])
    print(f"worker {task}: loss {value:.6f} at step {step}")
    if task == 0:
        print(f"last checkpoint: {tf.train.latest_checkpoint(directory)}")


if __name__ == "__main__":
    main()
