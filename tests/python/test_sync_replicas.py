"""SyncReplicasOptimizer while its workers are killed mid-step and return: steps continue where stock gRPC's do, and no gradient counts twice.

Every worker contributes the gradient 1 to a dense variable on one ps and to rows of a table on the other, and each step subtracts the mean. So whenever a
worker dies, the variables equal minus the number of steps.
"""

import os
import time

import pytest

from cluster import TaskDied, is_stock, one, tf
from compared import OURS
from metrics import counters
from waiting import wait_until

pytestmark = pytest.mark.ours

PROGRESS = 60  # seconds within which steps must be made
ROWS = (1, 3)


# In the worker processes. ---------------------------------------------------------------------------------------------


def look_again_soon():
    """A worker that finds the model uninitialised retries after 30 s; this makes it 0.2 s."""
    manager = one().train.SessionManager
    if not hasattr(manager, "patient_wait"):
        manager.patient_wait = manager.wait_for_session

        def wait_for_session(self, *args, **kwargs):
            self._recovery_wait_secs = 0.2
            return self.patient_wait(*args, **kwargs)

        manager.wait_for_session = wait_for_session


def build(task):
    with one().device(one().train.replica_device_setter(ps_tasks=2, worker_device=f"/job:worker/task:{task}", ps_device="/job:ps")):
        step = one().train.get_or_create_global_step()
        dense = one().get_variable("dense", (4,), initializer=one().zeros_initializer(), use_resource=False)
        table = one().get_variable("table", (5, 2), initializer=one().zeros_initializer(), use_resource=False)
        loss = tf.reduce_sum(dense) + tf.reduce_sum(one().nn.embedding_lookup(table, list(ROWS)))
    return step, dense, table, loss


def synchronous(target, task, aggregate, workers, directory, progress):
    """Runs steps without end and records each global step."""
    look_again_soon()
    with tf.Graph().as_default():
        step, _, _, loss = build(task)
        with one().device(one().train.replica_device_setter(ps_tasks=2, worker_device=f"/job:worker/task:{task}", ps_device="/job:ps")):
            optimizer = one().train.SyncReplicasOptimizer(one().train.GradientDescentOptimizer(1.0), replicas_to_aggregate=aggregate, total_num_replicas=workers)
            train_op = optimizer.minimize(loss, global_step=step)
        config = one().ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{task}"])
        with one().train.MonitoredTrainingSession(
            target, is_chief=task == 0, checkpoint_dir=directory if task == 0 else None, hooks=[optimizer.make_session_run_hook(task == 0)], config=config,
            save_checkpoint_steps=5, save_summaries_steps=None, save_summaries_secs=None, log_step_count_steps=None, stop_grace_period_secs=1,
        ) as sess:
            while True:
                _, number = sess.run([train_op, step])
                with open(progress, "a") as out:
                    out.write(f"{int(number)}\n")


def read(target):
    """Returns the global step and the variables."""
    with tf.Graph().as_default():
        step, dense, table, _ = build(0)
        with one().Session(target, config=one().ConfigProto(device_filters=["/job:ps", "/job:worker/task:0"])) as sess:
            number, dense, table = sess.run([step, dense, table])
    return int(number), dense.tolist(), table.tolist()


# In the test process. -------------------------------------------------------------------------------------------------


class Training:
    def __init__(self, cluster, aggregate, workers, folder):
        self.cluster, self.aggregate, self.workers, self.folder = cluster, aggregate, workers, folder

    def begin(self, task):
        self.cluster["worker", task].begin(synchronous, self.cluster.target("worker", task), task, self.aggregate, self.workers, f"{self.folder}/checkpoints", self.file(task))

    def file(self, task):
        return f"{self.folder}/progress{task}"

    def made(self, task):
        """The number of steps that the worker has made."""
        return len(open(self.file(task)).read().split()) if os.path.exists(self.file(task)) else 0

    def goes_on(self, *tasks, steps=8):
        """Waits until each of these tasks has made `steps` more steps."""
        start = {task: self.made(task) for task in tasks}
        deadline = time.monotonic() + PROGRESS
        while any(self.made(task) < start[task] + steps for task in tasks):
            late = {task: self.made(task) - start[task] for task in tasks}
            for task in tasks:
                if self.cluster["worker", task].ready():
                    self.cluster["worker", task].result(0)
                    raise AssertionError("a worker's loop has no end")
            if time.monotonic() > deadline:
                for task in self.cluster.tasks.values():
                    task.dump_stacks()
                raise TaskDied(f"steps made within {PROGRESS} s: {late}\n" + "\n".join(f"{task}:\n{task.log()}" for task in self.cluster.tasks.values()))
            time.sleep(0.02)

    def kill(self, task):
        self.cluster["worker", task].kill()

    def back(self, task):
        self.cluster.start("worker", task)
        self.begin(task)


def train_and_kill(cluster, aggregate, workers, folder):
    training = Training(cluster, aggregate, workers, folder)
    everyone, last = range(workers), workers - 1
    for task in everyone:
        training.begin(task)
    training.goes_on(*everyone)

    training.kill(last)
    if aggregate < workers:
        training.goes_on(*range(last))
    else:
        time.sleep(0.2)  # the fault: others may wait for it, or still have tokens
    training.back(last)
    training.goes_on(*everyone)

    training.kill(0)
    time.sleep(0.2)  # the fault: nobody looks after the tokens
    training.back(0)
    training.goes_on(*everyone)

    for task in everyone:
        training.kill(task)
    cluster.start("worker", 0)
    if is_stock(cluster.protocol):
        time.sleep(0.5)  # lets the dead workers' requests end; stock gRPC does not count them
    else:
        wait_until(lambda: not any(counters(cluster["ps", i])["requests_unanswered"] for i in range(2)), PROGRESS, "the end of the dead workers' requests")
    number, dense, table = cluster["worker", 0].call(read, cluster.target("worker", 0))
    kills = 2 + workers
    assert number >= 20
    # A worker that dies between update and count does only one of them.
    for value in dense + table[ROWS[0]] + table[ROWS[1]]:
        assert abs(value + number) <= kills, (number, dense, table)
    assert table[0] == table[2] == [0.0, 0.0]


# Over grpc++ with fused tensors, and with calls; each loses a worker that the others wait for, or one that they do not need.
ALWAYS = ("fused", 2, 2), ("star_server", 2, 3)
CASES = [(way, aggregate, workers) for way in ("grpc", *OURS) for aggregate, workers in ((2, 2), (2, 3), (3, 3))]


OTHER_CASE = pytest.mark.deep(reason="ALWAYS has sends and calls, and a worker that is needed and one that is not")


@pytest.mark.parametrize("way, aggregate, workers", [pytest.param(*case, marks=() if case in ALWAYS else OTHER_CASE) for case in CASES])
def test_workers_killed(compared, tmp_path, way, aggregate, workers):
    with compared.fresh(way, (("ps", 2), ("worker", workers))) as cluster:
        train_and_kill(cluster, aggregate, workers, str(tmp_path))
