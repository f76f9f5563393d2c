"""TensorFlow 1 training with real servers: optimizers, hooks, checkpoints, queues, Estimator. Deterministic results are compared with stock gRPC."""

import glob
import json
import os

import pytest

import steps
from cluster import RemoteError, free_port, is_stock, load, one, tf, worker_call
from training_job import OPTIMIZERS, batch, regression, setter, synchronous, train, wait_for_checkpoint
from waiting import wait_until


@pytest.mark.star
@pytest.mark.quick(
    lambda of: of["protocol"] == "star_server" or of["optimizer"] == "adam",
    reason="an optimizer is a set of operations on a server, which only star calls run otherwise than TensorFlow; the two kinds of star calls run them alike",
)
@pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_give_the_same_bits(cluster, stock, optimizer, use_resource):
    ours, theirs = (worker_call(c, train, optimizer, use_resource) for c in (cluster, stock))
    assert ours == theirs
    assert ours[0][0] != ours[0][-1]


@pytest.mark.quick(lambda of: of["other"] in ("starwire+star_server", "grpc+seastar"), reason="all protocols get their names in one loop (cc/server)")
@pytest.mark.parametrize("other, name", [("starwire+grpc++", "grpc++"), ("starwire+star_server", "star_server"), ("grpc+seastar", "grpc++"), ("star_server_v2", "star_server")])
def test_other_names_mean_the_same(fresh_cluster, stock, other, name):
    """In a TensorFlow that has a protocol of the plain name, only the one with the prefix is starwire's. Jobs for DeepRec have the others. One server has the plain name."""
    cluster = fresh_cluster(shape=(("ps", 2), ("worker", 2)), protocol=other, start=False)
    for job, index in (("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1)):
        cluster.start(job, index, protocol=name if (job, index) == ("ps", 1) else None)
    assert worker_call(cluster, train, "adam", True) == worker_call(stock, train, "adam", True)


# MonitoredTrainingSession. --------------------------------------------------------------------------------------------


def monitored(target, directory, until, is_chief=True, task=0):
    """Trains up to a global step with hooks and checkpoints; returns what the hooks recorded."""

    class Seen(one().train.SessionRunHook):
        def __init__(self):
            self.began = self.created = self.ended = 0
            self.steps = []

        def begin(self):
            self.began += 1

        def after_create_session(self, session, coord):
            self.created += 1

        def before_run(self, run_context):
            return one().train.SessionRunArgs(one().train.get_global_step())

        def after_run(self, run_context, run_values):
            self.steps.append(int(run_values.results))

        def end(self, session):
            self.ended += 1

    seen = Seen()
    with tf.Graph().as_default():
        with one().device(setter(task)):
            step = one().train.get_or_create_global_step()
            ids, x, loss = regression(False)
            train_op = one().train.AdagradOptimizer(0.1).minimize(loss, global_step=step)
        hooks = [seen, one().train.StopAtStepHook(last_step=until), one().train.NanTensorHook(loss), one().train.LoggingTensorHook([loss], every_n_iter=5)]
        with one().train.MonitoredTrainingSession(
            target, is_chief=is_chief, checkpoint_dir=directory, hooks=hooks, save_checkpoint_steps=5, save_summaries_steps=None, save_summaries_secs=None, log_step_count_steps=7
        ) as sess:
            while not sess.should_stop():
                i, xs = batch(len(seen.steps))
                sess.run([train_op, loss], {ids: i, x: xs})
    return {"began": seen.began, "created": seen.created, "ended": seen.ended, "steps": seen.steps}


@pytest.mark.star
def test_monitored_session_trains_checkpoints_and_restores(cluster, tmp_path):
    directory = str(tmp_path / "checkpoints")
    first = worker_call(cluster, monitored, directory, 12, timeout=120)
    assert (first["began"], first["created"], first["ended"]) == (1, 1, 1)
    assert len(first["steps"]) == 12
    assert glob.glob(directory + "/model.ckpt-12.index") and glob.glob(directory + "/model.ckpt-5.index")
    second = worker_call(cluster, monitored, directory, 20, timeout=120)
    assert len(second["steps"]) == 8, "it must go on at step 12"


@pytest.mark.star
def test_two_workers_between_graph(cluster, tmp_path):
    """Two workers share variables; every step of each counts once."""
    directory = str(tmp_path / "shared")
    workers = [cluster["worker", i] for i in range(2)]
    for i, worker in enumerate(workers):
        worker.begin(monitored, cluster.target("worker", i), directory if i == 0 else None, 60, i == 0, i)
        wait_for_checkpoint(directory)
    seen = [worker.result(120) for worker in workers]
    assert all(s["ended"] == 1 for s in seen)
    total = sum(len(s["steps"]) for s in seen)
    assert total >= 60
    assert worker_call(cluster, read_global_step) == total, "every step of either worker counts once"
    assert all(s["steps"] for s in seen)


def read_global_step(target):
    with tf.Graph().as_default():
        with one().device(setter()):
            step = one().train.get_or_create_global_step()
        with one().Session(target) as sess:
            return int(sess.run(step))


@pytest.mark.star
def test_sync_replicas(cluster, tmp_path):
    """Accumulators and token queues on the ps; the workers wait for each other in every step."""
    directory = str(tmp_path / "sync")
    for i in range(2):
        cluster["worker", i].begin(synchronous, cluster.target("worker", i), i, directory if i == 0 else None, 10, str(tmp_path))
        wait_for_checkpoint(directory)
    results = [cluster["worker", i].result(60) for i in range(2)]
    for losses, step in results:
        assert len(losses) == 10 and losses[-1] != losses[0]
        assert step == 10, "two gradients make one step"


# Input pipelines, queues, functions on other tasks. -------------------------------------------------------------------


def remote_iterators(target):
    out = []
    with tf.Graph().as_default():
        with tf.device("/job:ps/task:1"):
            dataset = tf.data.Dataset.range(6).map(lambda i: (i, tf.strings.as_string(i))).batch(2)
            iterator = one().data.make_initializable_iterator(dataset, shared_name="numbers")
            numbers, words = iterator.get_next()
        with tf.device("/job:worker/task:0"):
            doubled, joined = numbers * 2, tf.strings.join([words, words])
        with one().Session(target) as sess:
            for _ in range(2):
                sess.run(iterator.initializer)
                while True:
                    try:
                        a, b = sess.run([doubled, joined])
                        out.append((a.tolist(), b.tolist()))
                    except tf.errors.OutOfRangeError:
                        out.append("end")
                        break
    return out


@pytest.mark.star
def test_iterator_on_another_task(cluster):
    epoch = [([0, 2], [b"00", b"11"]), ([4, 6], [b"22", b"33"]), ([8, 10], [b"44", b"55"]), "end"]
    assert worker_call(cluster, remote_iterators) == epoch * 2


def remote_call(target):
    """RemoteCall runs a function on another task; arguments and results travel."""
    from tensorflow.python.framework import function as legacy

    with tf.Graph().as_default():

        @legacy.Defun(tf.float32, tf.string)
        def there(x, s):
            return tf.reduce_sum(x) * 2.0, tf.strings.join([s, "!"])

        with tf.device("/job:worker/task:0"):
            x = one().placeholder(tf.float32, (5000,))
            s = one().placeholder(tf.string, ())
            from tensorflow.python.ops import functional_ops

            total, shout = functional_ops.remote_call(args=[x, s], Tout=[tf.float32, tf.string], f=there, target="/job:ps/replica:0/task:1/device:CPU:0")
        with one().Session(target) as sess:
            a, b = sess.run([total, shout], {x: [1.0] * 5000, s: "hello"})
            return float(a), bytes(b)


@pytest.mark.star
def test_remote_call(cluster, stock):
    """The outcome must be that of stock TensorFlow."""
    results = []
    for c in (stock, cluster):
        try:
            results.append(worker_call(c, remote_call))
        except RemoteError as error:
            results.append((error.type, error.message.splitlines()[0]))
    assert results[0] == results[1]


def waiting_consumers():
    """Has an element for each step of the consumer that waits, or has waited."""
    return tf.queue.FIFOQueue(100, [tf.int32], [()], shared_name="waiting_consumers")


def producer(target, count):
    with tf.Graph().as_default():
        with tf.device("/job:ps/task:0"):
            queue, come = tf.queue.FIFOQueue(3, [tf.int32], [()], shared_name="between"), waiting_consumers()
            waits = come.size()
        with tf.device("/job:worker/task:1"):
            value = one().placeholder(tf.int32, ())
            put = queue.enqueue(value * 1)
        with one().Session(target) as sess:
            wait_until(lambda: sess.run(waits), 60, "the consumer waits")
            for i in range(count):
                sess.run(put, {value: i})
            sess.run(queue.close())


def consumer(target):
    with tf.Graph().as_default():
        with tf.device("/job:ps/task:0"):
            queue = tf.queue.FIFOQueue(3, [tf.int32], [()], shared_name="between")
            with tf.control_dependencies([waiting_consumers().enqueue(0)]):
                item = queue.dequeue()
        with tf.device("/job:worker/task:0"):
            got = item + 0
        out = []
        with one().Session(target) as sess:
            while True:
                try:
                    out.append(int(sess.run(got)))
                except tf.errors.OutOfRangeError:
                    return out


@pytest.mark.star
def test_queue_between_workers(cluster):
    """Steps that block on the ps until another worker's step runs."""
    cluster["worker", 0].begin(consumer, cluster.target("worker", 0))
    cluster["worker", 1].call(producer, cluster.target("worker", 1), 50)
    assert cluster["worker", 0].result(30) == list(range(50))


def estimator_job(protocol, directory, tf_config):
    load(protocol)
    os.environ["TF_CONFIG"] = json.dumps(tf_config)
    estimator = tf.estimator

    def model_fn(features, labels, mode):
        with one().variable_scope("m"):
            w = one().get_variable("w", (4, 1))
        prediction = tf.matmul(features, w)
        loss = tf.reduce_mean(tf.square(prediction - labels))
        train_op = one().train.AdagradOptimizer(0.3).minimize(loss, global_step=one().train.get_global_step())
        return estimator.EstimatorSpec(mode, predictions=prediction, loss=loss, train_op=train_op)

    def input_fn():
        x = tf.random.stateless_normal((64, 4), seed=[1, 2])
        return tf.data.Dataset.from_tensor_slices((x, tf.reduce_sum(x, 1, keepdims=True))).repeat().batch(16)

    arguments = dict(model_dir=directory, protocol=protocol, save_checkpoints_steps=20)
    if is_stock(protocol):
        config = estimator.RunConfig(**arguments)
    else:
        import starwire

        with pytest.raises(ValueError, match="model_dir is missing"):
            starwire.run_config(protocol)
        config = starwire.run_config(**arguments)
        # As for an evaluator, which has no cluster.
        os.environ["TF_CONFIG"] = "{}"
        stock = estimator.Estimator(model_fn, config=estimator.RunConfig(model_dir=directory))
        assert starwire.run_config(**arguments).session_config == stock.config.session_config
        os.environ["TF_CONFIG"] = json.dumps(tf_config)
    estimator.train_and_evaluate(
        estimator.Estimator(model_fn, config=config), estimator.TrainSpec(input_fn, max_steps=60), estimator.EvalSpec(input_fn, steps=1, start_delay_secs=0, throttle_secs=1)
    )
    return True


@pytest.mark.star
def test_estimator(runner, protocol, tmp_path):
    probe = runner.task("version")
    version = probe.call(steps.tensorflow_minor)
    probe.kill()
    if version > (2, 15):
        pytest.skip("this TensorFlow has no Estimator (it went in 2.16)")
    spec = {job: [f"127.0.0.1:{free_port()}"] for job in ("ps", "chief", "worker")}
    tasks = {job: runner.task(f"estimator-{job}") for job in spec}
    try:
        for job, task in tasks.items():
            task.begin(estimator_job, protocol, str(tmp_path / "model"), {"cluster": spec, "task": {"type": job, "index": 0}})
        for job in ("chief", "worker"):
            assert tasks[job].result(180)
        assert glob.glob(str(tmp_path / "model" / "model.ckpt-6*.index"))
    finally:
        for task in tasks.values():
            task.kill()
