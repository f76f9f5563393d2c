"""usage: restart.py ps|worker PS_PORT WORKER_PORT CHECKPOINTS: a small training that counts its updates; the parameter server may be killed and started again."""

import sys
import time

import starwire  # noqa: F401 (registers the protocols)
import tensorflow as tf

v1 = tf.compat.v1
STEPS = 100


def main(job, ps_port, worker_port, checkpoints):
    cluster = tf.train.ClusterSpec({"ps": [f"localhost:{ps_port}"], "worker": [f"localhost:{worker_port}"]})
    server = tf.distribute.Server(cluster, job_name=job, task_index=0, protocol="star_server")
    if job == "ps":
        server.join()
    with tf.Graph().as_default():
        with v1.device(v1.train.replica_device_setter(cluster=cluster)):
            step = v1.train.get_or_create_global_step()
            total = v1.get_variable("total", shape=[4], initializer=v1.zeros_initializer(), use_resource=True)
            with tf.control_dependencies([v1.assign_add(total, tf.ones([4]))]):
                train = v1.assign_add(step, 1)
        with v1.train.MonitoredTrainingSession(
            server.target, is_chief=True, checkpoint_dir=checkpoints, save_checkpoint_steps=5, save_checkpoint_secs=None, log_step_count_steps=None
        ) as session:
            at = 0
            while at < STEPS:
                at = int(session.run(train))
                print(f"step {at}", flush=True)
                time.sleep(0.05)  # the kill comes in between
            total = int(session.run(total)[0])
    print(f"done: {at} steps, {total} updates", flush=True)


main(*sys.argv[1:])
