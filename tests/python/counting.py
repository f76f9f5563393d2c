"""A job that counts its steps on two servers that keep their state, in the task processes, and what its tests share."""

import time
from pathlib import Path

from cluster import one, state, tf
from metrics import data_port, metric
from waiting import wait_for, wait_until

STARCTL = Path(__file__).resolve().parents[2] / "target/debug/starctl"


def environment(folder, mode="async"):
    return {"STARWIRE_STATE": str(folder), "STARWIRE_STATE_MODE": mode, "STARWIRE_RECOVER_S": 60}


def flush(*servers):
    """Waits until what these servers have answered is on their disks."""
    begun = lambda server: metric(data_port(server), "starwire_state_pause_seconds_count")  # noqa: E731
    before = [begun(server) for server in servers]
    # One may have begun before, the second has everything, and has ended when the third begins.
    wait_until(lambda: all(begun(server) >= count + 3 for server, count in zip(servers, before)), 60, "three flushes")


def begin_counting(target, use_resource, spec=None):
    """A session whose steps add one to three rows of a table and to a counter, on each server. With `spec`, it brings a ClusterSpec, and shares its variables."""
    config = one().ConfigProto()
    if spec is not None:
        # TensorFlow wants another name for the task that has the session.
        own = {"ps": spec["ps"], "trainer": spec["worker"]}
        config.cluster_def.CopyFrom(tf.train.ClusterSpec(own).as_cluster_def())
        config.experimental.share_session_state_in_clusterspec_propagation = True
    worker = "/job:worker/task:0" if spec is None else "/job:trainer/task:0"
    graph = tf.Graph()
    with graph.as_default():
        rows = one().placeholder(tf.int64, [3])
        counts, adds = [], []
        for server in range(2):
            with tf.device(f"/job:ps/task:{server}"):
                count = one().get_variable(f"count{server}", (), tf.int64, one().zeros_initializer(), use_resource=use_resource)
                table = one().get_variable(f"table{server}", (1000, 4), tf.float32, one().zeros_initializer(), use_resource=use_resource)
            with tf.device(worker):
                update = tf.ones((3, 4)) * tf.cast(tf.size(rows) - 2, tf.float32)
            with tf.device(f"/job:ps/task:{server}"):
                adds += [one().assign_add(count, 1), one().scatter_add(table, rows, update)]
            counts += [count, table]
        sess = one().Session(target, graph=graph, config=config)
        sess.run(one().global_variables_initializer())
        state["counting"] = sess, rows, tf.group(*adds), counts


def count(seconds):
    """Steps for so long. Returns how many, and the longest."""
    import numpy as np

    sess, rows, add, _ = state["counting"]
    steps, longest, until = 0, 0.0, time.monotonic() + seconds
    rng = np.random.default_rng(1)
    while time.monotonic() < until:
        begun = time.monotonic()
        sess.run(add, {rows: rng.choice(1000, 3, replace=False)})
        longest = max(longest, time.monotonic() - begun)
        steps += 1
    return steps, longest


def count_until(path):
    """Steps until the file is there; another one has a byte for each. Returns how many."""
    steps = 0
    with open(f"{path}.steps", "ab", buffering=0) as made:
        while not Path(path).exists():
            more = count(0.05)[0]
            made.write(b"." * more)
            steps += more
    return steps


def counted():
    """By server: the counter, and the sum of the table."""
    sess, _, _, counts = state["counting"]
    values = sess.run(counts)
    return [(int(values[at]), float(values[at + 1].sum())) for at in (0, 2)]


def stop():
    import starwire

    starwire.stop(state["server"])


# In the test process. -------------------------------------------------------------------------------------------------


class Counting:
    """A worker that counts from now on, while a test does something to its servers."""

    def __init__(self, cluster, folder, use_resource):
        self.worker, self.end, self.made = cluster["worker", 0], folder / "end", folder / "end.steps"
        for file in (self.end, self.made):
            file.unlink() if file.exists() else None
        self.worker.call(begin_counting, cluster.target("worker", 0), use_resource)
        self.worker.begin(count_until, str(self.end))
        wait_for(self.made)
        self.goes_on()

    def goes_on(self, steps=50):
        """Waits until so many more steps are made."""
        before = self.made.stat().st_size
        wait_until(lambda: self.worker.ready() or self.made.stat().st_size >= before + steps, 60, f"{steps} more steps")
        if self.worker.ready():
            raise AssertionError(f"the counting has ended after {self.worker.result(0)} steps")

    def stop(self):
        """Returns how many steps it has made."""
        self.end.touch()
        return self.worker.result(90)
