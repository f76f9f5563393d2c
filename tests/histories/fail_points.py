"""A server is killed at each fail point of the product in turn, while two workers use it: no update of the synchronous state is missing or there twice, and no step
fails. Needs a library with fail points (`make test-deep ONLY=fail-points`)."""

import contextlib
import signal
import time

import run  # before the others: it says where they are

import cluster
import counting
import moves
import proxy
from cluster import one, tf

EVICTION = "plans are evicted, and reactors still know them"
LARGE = 4 << 20  # numbers of a variable whose answer does not fit into a socket's memory


def visit(target, is_first=False):
    """A session that reads a large variable, and is closed."""
    graph = tf.Graph()
    with graph.as_default():
        with tf.device("/job:ps/task:0"):
            large = one().get_variable("large", (LARGE,), tf.float32, one().zeros_initializer(), use_resource=True)
        with tf.device("/job:worker/task:1"):
            total = tf.reduce_sum(large)
        with one().Session(target, graph=graph) as sess:
            if is_first:
                # TensorFlow runs it on the server as a whole, and nobody knows whether it did if that dies.
                sess.run(large.initializer)
            return float(sess.run(total))


class Killed:
    """Counts while servers are killed."""

    def __init__(self, runner, network, folder):
        self.job, self.folder = moves.Moves(runner, network, folder, workers=2), folder
        self.worker, self.other = (self.job.cluster["worker", number] for number in range(2))
        self.worker.call(counting.begin_counting, self.job.cluster.target("worker", 0), True)
        self.other.call(visit, self.job.cluster.target("worker", 1), True)
        self.steps = self.rounds = 0

    def round(self, point):
        """Returns whether a process was killed at the point."""
        end = self.folder / f"end{self.rounds}"
        self.rounds += 1
        self.worker.begin(counting.count_until, str(end))
        is_killed = self._kill_at(point)
        end.touch()
        self.steps += self.worker.result(90)
        found = self.worker.call(counting.counted)
        assert found == [(self.steps, 12 * self.steps)] * 2, f"{point}: {found} after {self.steps} steps"
        return is_killed

    def _kill_at(self, point):
        # A plan that a session has left is evicted after a second, when somebody next looks: within five more.
        job, faults = self.job, {"FAIL_POINTS": f"{point}=kill@1", "STARWIRE_STAR_LIMITS": "plan_idle_s=1"}
        patience = 10 if point == EVICTION else 2.5
        job.owner.kill()
        job.begin_again(**faults)
        with contextlib.suppress(cluster.TaskDied):
            job.owner.result(cluster.START_TIMEOUT)
        if not self._is_dead(job.owner, 0):
            self.other.begin(visit, job.cluster.target("worker", 1))
            is_dead = self._is_dead(job.owner, patience)
            if is_dead:
                job.begin_again()
                job.owner.result(cluster.START_TIMEOUT)
            assert self.other.result(90) == 0
            if is_dead:
                return True
            return self._kill_while_moving({}) or self._kill_while_moving(faults)
        job.begin_again()
        job.owner.result(cluster.START_TIMEOUT)
        return True

    def _kill_while_moving(self, faults):
        """From a process that may have faults to one with these."""
        old, new = self.job.owner, self.job.begin_move(**faults)
        until = time.monotonic() + 60
        while new.poll() is None and old.poll() is None and not new.ready() and time.monotonic() < until:
            time.sleep(0.02)
        is_dead = self._is_dead(new if faults else old, 1)
        self.job.end_move(new)
        return is_dead

    @staticmethod
    def _is_dead(task, seconds):
        until = time.monotonic() + seconds
        while task.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        task.expected_exit = -signal.SIGKILL
        return task.poll() is not None


def test_a_server_is_killed_at_each_fail_point(tmp_path):
    assert run.has_fail_points()
    runner, network = cluster.Runner(), proxy.Network()
    killed = Killed(runner, network, tmp_path)
    try:
        points = run.fail_points()
        assert len(points) > 20 and EVICTION in points
        missed = [point for point in points if not killed.round(point)]
        assert not missed, "nobody was killed at these points"
        assert killed.steps > 10 * len(points)
        complaints = [line for task in runner.tasks for line in task.complaints()]
        assert not complaints, "\n".join(complaints)
    finally:
        killed.job.close()
        runner.close()
        network.close()
