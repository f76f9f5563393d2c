"""Between-graph training where every task reads its role from TF_CONFIG. Only the two marked lines differ from a gRPC script.

    python examples/local.py examples/tf_config.py --ps 2 --worker 2
"""

import time

import numpy as np
import starwire  # noqa: F401  (1) registers grpc++
import tensorflow as tf

STEPS = 200
v1 = tf.compat.v1


def main():
    v1.disable_eager_execution()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    cluster, job, task = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    server = tf.distribute.Server(cluster, job_name=job, task_index=task, protocol=resolver.rpc_layer or "grpc++")  # (2)
    if job == "ps":
        server.join()

    rng = np.random.RandomState(task)
    with v1.device(v1.train.replica_device_setter(worker_device=f"/job:worker/task:{task}", cluster=cluster)):
        global_step = v1.train.get_or_create_global_step()
        x = v1.placeholder(tf.float32, [None, 8])
        weights = v1.get_variable("weights", initializer=tf.zeros([8, 1]), use_resource=True)
        wanted = tf.constant(np.arange(8, dtype=np.float32)[:, None])
        loss = tf.reduce_mean(tf.square(tf.matmul(x, weights) - tf.matmul(x, wanted)))
        train = v1.train.GradientDescentOptimizer(0.05).minimize(loss, global_step=global_step)
        uninitialized = v1.report_uninitialized_variables()
        init = v1.global_variables_initializer()

    # A session waits for every task it may use; without the filters, that includes workers that have not started or have already finished.
    config = v1.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{task}"])
    with v1.Session(server.target, config=config) as session:
        if task == 0:
            session.run(init)
        while session.run(uninitialized).size:
            time.sleep(0.2)
        for _ in range(STEPS):
            value, _, step = session.run([loss, train, global_step], {x: rng.normal(size=[32, 8])})
    print(f"worker {task}: loss {value:.6f} after {step} steps of all workers")
    if value > 1.0:
        raise SystemExit("the model did not learn")


if __name__ == "__main__":
    main()
