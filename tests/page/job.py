"""usage: job.py JOB:INDEX WORKER PS0 PS1: a task of a job that trains without end over star_server."""

import sys

import numpy as np
import starwire  # noqa: F401
import tensorflow as tf

v1 = tf.compat.v1


def main(task, worker, *servers):
    job, index = task.split(":")
    cluster = tf.train.ClusterSpec({"worker": [worker], "ps": list(servers)})
    server = tf.distribute.Server(cluster, job_name=job, task_index=int(index), protocol="star_server")
    if job == "ps":
        server.join()
    v1.disable_eager_execution()
    with v1.device(v1.train.replica_device_setter(cluster=cluster)):
        tables = [v1.get_variable(f"table{n}", [20_000, 16], initializer=v1.random_uniform_initializer(-0.1, 0.1)) for n in range(8)]
        dense = [v1.get_variable(f"dense{n}", [64, 64]) for n in range(8)]
    ids = v1.placeholder(tf.int32, [None])
    rows = [tf.reduce_mean(tf.nn.embedding_lookup(table, ids)) for table in tables]
    loss = tf.add_n(rows) + tf.add_n([tf.reduce_mean(tf.square(weight)) for weight in dense])
    train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
    random = np.random.default_rng(1)
    with v1.Session(server.target) as session:
        session.run(v1.global_variables_initializer())
        while True:
            session.run(train, {ids: random.integers(0, 20_000, 512)})


main(*sys.argv[1:])
