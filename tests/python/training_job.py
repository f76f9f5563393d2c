"""Training with TensorFlow 1: a model that its seed determines, trained by several optimizers, or by two workers in step."""

import os
import time

from cluster import one, tf
from waiting import wait_for


def setter(task=0):
    return one().train.replica_device_setter(ps_tasks=2, worker_device=f"/job:worker/task:{task}", ps_device="/job:ps")


def regression(use_resource, seed=3, inputs=None):
    """A two-layer model with a partitioned embedding, fully determined by the seed. `inputs`: ids and numbers; without, they are fed."""
    import numpy as np

    rng = np.random.default_rng(seed)
    ids, x = inputs or (one().placeholder(tf.int64, (16,), name="ids"), one().placeholder(tf.float32, (16, 8), name="x"))
    with one().variable_scope("model", use_resource=use_resource):
        embedding = one().get_variable(
            "embedding", (50, 6), initializer=one().ones_initializer(), partitioner=one().fixed_size_partitioner(2)
        )
        looked_up = one().nn.embedding_lookup(embedding, ids, partition_strategy="div")
        kernel = one().get_variable("kernel", initializer=rng.normal(size=(14, 5)).astype(np.float32))
        bias = one().get_variable("bias", initializer=np.zeros(5, np.float32))
        out = one().get_variable("out", initializer=rng.normal(size=(5, 1)).astype(np.float32))
    hidden = tf.tanh(tf.matmul(tf.concat([looked_up, x], 1), kernel) + bias)
    loss = tf.reduce_mean(tf.square(tf.matmul(hidden, out) - tf.reduce_sum(x, 1, keepdims=True)))
    return ids, x, loss


def batch(step):
    import numpy as np

    rng = np.random.default_rng(1000 + step)
    return rng.integers(0, 50, 16), rng.normal(size=(16, 8)).astype(np.float32)


OPTIMIZERS = {
    "sgd": lambda: one().train.GradientDescentOptimizer(0.05),
    "adam": lambda: one().train.AdamOptimizer(0.01),
    "adagrad": lambda: one().train.AdagradOptimizer(0.1),
    "momentum": lambda: one().train.MomentumOptimizer(0.02, 0.9),
}


def train(target, optimizer_name, use_resource, steps=8):
    """Returns losses and final variables as bytes."""
    import numpy as np

    with tf.Graph().as_default():
        with one().device(setter()):
            ids, x, loss = regression(use_resource)
            train_op = OPTIMIZERS[optimizer_name]().minimize(loss)
        with one().Session(target) as sess:
            sess.run(one().global_variables_initializer())
            losses = []
            for step in range(steps):
                i, xs = batch(step)
                losses.append(sess.run([loss, train_op], {ids: i, x: xs})[0])
            variables = sess.run(one().global_variables())
        return [np.float32(value).tobytes() for value in losses], {v.name: np.asarray(value).tobytes() for v, value in zip(one().global_variables(), variables)}


def wait_for_checkpoint(directory):
    """Waits until the chief has initialised its model; a worker that checks before that retries only 30 s later."""
    wait_for(os.path.join(directory, "checkpoint"))


def meet(folder, number, task, others=2, timeout=60):
    """Waits for every worker: one that is a step ahead would take a token meant for another."""
    open(os.path.join(folder, f"{number}-{task}"), "w").close()
    deadline = time.monotonic() + timeout
    while not all(os.path.exists(os.path.join(folder, f"{number}-{other}")) for other in range(others)):
        assert time.monotonic() < deadline, f"worker {task} was alone after step {number}"
        time.sleep(0.002)


def synchronous(target, task, directory, steps, meeting):
    import numpy as np

    with tf.Graph().as_default():
        with one().device(setter(task)):
            step = one().train.get_or_create_global_step()
            ids, x, loss = regression(False)
            optimizer = one().train.SyncReplicasOptimizer(one().train.GradientDescentOptimizer(0.05), replicas_to_aggregate=2, total_num_replicas=2)
            train_op = optimizer.minimize(loss, global_step=step)
        hooks = [optimizer.make_session_run_hook(task == 0, num_tokens=0)]
        losses = []
        with one().train.MonitoredTrainingSession(target, is_chief=task == 0, checkpoint_dir=directory, hooks=hooks, save_summaries_steps=None, save_summaries_secs=None, stop_grace_period_secs=1) as sess:
            for number in range(steps):  # if a worker left early, the other would wait for its gradients
                i, xs = batch(2 * number + task)
                losses.append(float(np.float32(sess.run([train_op, loss], {ids: i, x: xs})[1])))
                meet(meeting, number, task)
            return losses, int(sess.run_step_fn(lambda step_context: step_context.session.run(step)))
