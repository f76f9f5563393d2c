"""Workers that are in no ClusterSpec but their own: they join a running job, train beside its worker, and leave; every update counts once."""

import os
import shutil
import time

import pytest

from authority import Authority
from cluster import RemoteError, free_port, is_tensorflow_1, one, tf
from metrics import counters
from settings import QUICK, SECRET, TCP
from waiting import wait_for, wait_until

pytestmark = [pytest.mark.ours]

SHAPE = (("ps", 2), ("worker", 1))
JOIN = {"STARWIRE_JOIN": "worker:3"}
VERBS = pytest.mark.deep(reason="tasks join before connections have a transport")
OTHER = pytest.mark.deep(reason="the tests over PROTOCOLS join by both; who may join is decided by the engine, which all protocols share")
PROTOCOLS = ["grpc++", "star_server", "star_server_lite", pytest.param("grpc+verbs", marks=VERBS)]
NEEDS = pytest.mark.skipif(is_tensorflow_1() or not shutil.which("openssl"), reason="needs one port, and the openssl command")
NAMES = {"STARWIRE_TLS_PEERS": "spiffe://example.org/train/{job}/{task}"}


# In the task processes. ------------------------------------------------------------------------------------------------


def train(target, task, made, stop=None, beside=None):
    """Trains until the file `stop` exists, or until whoever writes to the file `beside` has made ten more steps. Each step adds one to the global step and
    what the worker computes, its number and one, to a sum on each server; then it adds a byte to the file `made`. Returns the number of steps."""
    config = one().ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{task}"])
    written = open(made, "ab", buffering=0)

    def is_done():
        return os.path.exists(stop) if stop else os.path.getsize(beside) >= begin + 10

    with tf.Graph().as_default():
        step, sums = variables()
        with tf.device(f"/job:worker/task:{task}"):
            value = tf.constant(task + 1.0, tf.float64) + 0.0 * tf.add_n([s.read_value() for s in sums])
        adds = []
        for server, total in enumerate(sums):
            with tf.device(f"/job:ps/task:{server}"):
                adds.append(one().assign_add(total, value))
        with tf.device("/job:ps/task:0"), tf.control_dependencies(adds):
            train_op = tf.group(one().assign_add(step, 1))
        with one().Session(target, config=config) as sess:
            if task == 0:
                sess.run(one().global_variables_initializer())
            begin = os.path.getsize(beside) if beside else 0
            count = 0
            while count == 0 or not is_done():
                sess.run(train_op)
                written.write(b".")
                count += 1
            return count


def variables():
    with tf.device("/job:ps/task:0"):
        step = one().get_variable("step", (), tf.int64, initializer=one().zeros_initializer(), use_resource=True)
    sums = []
    for server in range(2):
        with tf.device(f"/job:ps/task:{server}"):
            sums.append(one().get_variable(f"sum{server}", (), tf.float64, initializer=one().zeros_initializer(), use_resource=True))
    return step, sums


def totals(target):
    """The global step and the sums."""
    with tf.Graph().as_default():
        step, sums = variables()
        with one().Session(target) as sess:
            number, values = sess.run([step, sums])
            return int(number), [float(value) for value in values]


def rest(target, paused, resumed):
    """Makes a step, pauses, and makes another one in the same session. A step whose connection is lost may be repeated."""
    config = one().ConfigProto(device_filters=["/job:ps", "/job:worker/task:1"])
    with tf.Graph().as_default():
        _, sums = variables()
        with tf.device("/job:worker/task:1"):
            value = sums[1].read_value() + 1.0
        with tf.device("/job:ps/task:0"):
            other = one().get_variable("other", (), tf.float64, initializer=one().zeros_initializer(), use_resource=True)
            train_op = one().assign(other, value)
        with one().Session(target, config=config) as sess:
            sess.run(train_op)
            open(paused, "w").close()
            wait_for(resumed)
            for _ in range(10):
                try:
                    return float(sess.run(train_op)) > 0
                except tf.errors.UnavailableError as error:
                    lost = error
            raise lost


# In the test. ----------------------------------------------------------------------------------------------------------


class Job:
    """A cluster whose worker 0 trains, and workers that join it."""

    def __init__(self, cluster, folder, **environment):
        self.cluster, self.folder, self.environment = cluster, folder, environment
        self.joined = 0

    def __enter__(self):
        target = self.cluster.target("worker", 0)
        self.cluster["worker", 0].begin(train, target, 0, self.file("made0"), stop=self.file("stop"))
        wait_for(self.file("made0"))
        wait_until(lambda: self.steps("made0") > 0, 60, "a step of worker 0")
        return self

    def __exit__(self, failed, *_):
        if not failed and self.cluster["worker", 0].busy:
            self.finish()

    def file(self, name):
        return str(self.folder / name)

    def steps(self, name):
        return os.path.getsize(self.file(name))

    def newcomer(self, task, **environment):
        """Starts a worker with a ClusterSpec of its own. Returns it and its target."""
        address = f"127.0.0.1:{free_port()}"
        spec = {"ps": self.cluster.spec["ps"], "worker": {task: address}}
        return self.cluster.start("worker", task, spec=spec, **{**self.environment, **environment}), f"grpc://{address}"

    def trains_beside(self, worker, target, task=1):
        """Trains in a worker while worker 0 trains; returns the number of steps."""
        self.joined += 1
        return worker.call(train, target, task, self.file(f"made{task}.{self.joined}"), beside=self.file("made0"))

    def finish(self):
        """Ends worker 0's training; returns its steps, the global step and the sums."""
        open(self.file("stop"), "w").close()
        return self.cluster["worker", 0].result(), *self.cluster["worker", 0].call(totals, self.cluster.target("worker", 0))

    def of_servers(self, name):
        return [counters(self.cluster["ps", server])[name] for server in range(2)]


@pytest.mark.parametrize("protocol", PROTOCOLS, indirect=True)
def test_workers_join_and_leave(fresh_cluster, tmp_path):
    cluster = fresh_cluster(shape=SHAPE, environment=JOIN)
    begun = time.monotonic()
    with Job(cluster, tmp_path) as job:
        worker, target = job.newcomer(1)
        first = job.trains_beside(worker, target)
        assert job.of_servers("tasks_joined") == [1, 1]
        worker.exit()
        wait_until(lambda: job.of_servers("tasks_left") == [1, 1], 60, "it has left")

        killed, target = job.newcomer(1)
        killed.begin(train, target, 1, job.file("killed"), stop=job.file("never"))
        wait_for(job.file("killed"))
        wait_until(lambda: job.steps("killed") >= 10, 60, "steps of the one that is killed")
        killed.kill()
        wait_until(lambda: job.of_servers("tasks_left") == [2, 2], 60, "it has left")
        lost = job.steps("killed")

        worker, target = job.newcomer(1)
        last = job.trains_beside(worker, target)
        # Another one at the same time.
        other, target = job.newcomer(2)
        third = job.trains_beside(other, target, 2)
        assert job.of_servers("tasks_joined") == [4, 4] and job.of_servers("tasks_left") == [2, 2]
        own, step, sums = job.finish()

    certain = own + first + lost + last + third
    # The step in which it was killed may have been applied on each server, or not.
    assert step in (certain, certain + 1)
    expected = own + 2 * (first + lost + last) + 3 * third
    assert all(total in (expected, expected + 2) for total in sums), (sums, expected)
    log = cluster["ps", 0].full_log()
    minutes = (time.monotonic() - begun) // 60
    assert 2 <= log.count(" joined (") <= 2 + minutes and 1 <= log.count(" left (") <= 1 + minutes, "of each task, once a minute"
    assert "was restarted: releasing" in log, "what the killed one had registered is freed"


@pytest.mark.parametrize("protocol", ["grpc++", pytest.param("star_server", marks=OTHER)], indirect=True)
def test_a_worker_that_was_away_goes_on_in_its_session(fresh_cluster, tmp_path):
    cluster = fresh_cluster(shape=SHAPE, environment={**JOIN, **QUICK})
    with Job(cluster, tmp_path) as job:
        worker, target = job.newcomer(1)
        worker.begin(rest, target, job.file("paused"), job.file("resumed"))
        wait_for(job.file("paused"))
        worker.stop()
        wait_until(lambda: job.of_servers("tasks_left") == [1, 1], 60, "it has left")
        open(job.file("resumed"), "w").close()
        worker.resume()
        assert worker.result()
        assert job.of_servers("tasks_joined") == [2, 2]


@pytest.mark.parametrize("proof", ["secret", pytest.param("tls", marks=NEEDS)])
@pytest.mark.parametrize("protocol", ["grpc++", pytest.param("star_server", marks=OTHER)], indirect=True)
def test_workers_with_proof(fresh_cluster, tmp_path, proof):
    names = [("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1), ("worker", 2)]
    identities, common = {}, {"STARWIRE_SECRET": SECRET}
    if proof == "tls":
        authority = Authority(tmp_path / "training-ca")
        identities = {(job, task): authority.issue(f"{job}-{task}", f"URI:spiffe://example.org/train/{job}/{task}") for job, task in names}
        common = {**TCP, **NAMES}
    cluster = fresh_cluster(shape=SHAPE, environment={**JOIN, **common}, per_task=identities)
    with Job(cluster, tmp_path) as job:
        if proof == "tls":
            # It accepts its servers, and has the certificate of another worker.
            everybody = {"STARWIRE_TLS_PEERS": "spiffe://example.org/train/worker/2,spiffe://example.org/train/ps/0,spiffe://example.org/train/ps/1"}
            refused(job, 1, "does not speak for /job:worker/replica:0/task:1", **identities["worker", 2], **everybody)
        else:
            refused(job, 1, "STARWIRE_SECRET", STARWIRE_SECRET="another secret that is long enough")
        worker, target = job.newcomer(1)
        first = job.trains_beside(worker, target)
        own, step, sums = job.finish()
    assert step == own + first and sums == [own + 2 * first] * 2


def refused(job, task, words, **environment):
    worker, target = job.newcomer(task, **environment)
    with pytest.raises(RemoteError) as caught:
        worker.call(train, target, task, job.file("refused"), beside=job.file("made0"))
    assert words in caught.value.message, caught.value
    worker.kill()
    assert job.steps("refused") == 0


@pytest.mark.parametrize("protocol", ["grpc++", pytest.param("star_server", marks=OTHER)], indirect=True)
def test_who_may_join(fresh_cluster, tmp_path):
    cluster = fresh_cluster(shape=SHAPE, environment=JOIN)
    with Job(cluster, tmp_path) as job:
        refused(job, 3, "/job:worker/replica:0/task:3 cannot join: it is not in the ClusterSpec of /job:ps/replica:0/task:")
        worker, target = job.newcomer(1)
        first = job.trains_beside(worker, target)
        refused(job, 1, "has joined and is still connected")
        first += job.trains_beside(worker, target)
        own, step, sums = job.finish()
    assert step == own + first and sums == [own + 2 * first] * 2


@pytest.mark.parametrize("protocol", ["grpc++", pytest.param("star_server", marks=OTHER)], indirect=True)
def test_without_the_setting(fresh_cluster, tmp_path, protocol):
    """A server of grpc++ has to fetch tensors from the worker, and says why it cannot; one of star_server has not."""
    cluster = fresh_cluster(shape=SHAPE)
    with Job(cluster, tmp_path) as job:
        if protocol == "grpc++":
            refused(job, 1, "unknown task /job:worker/replica:0/task:1: it is not in the cluster that")
        else:
            worker, target = job.newcomer(1)
            first = job.trains_beside(worker, target)
            own, step, sums = job.finish()
            assert step == own + first and sums == [own + 2 * first] * 2
        assert job.of_servers("tasks_joined") == [0, 0]
