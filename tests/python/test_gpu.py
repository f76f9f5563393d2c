"""Tensors on GPUs, staged through the device's context in both directions. Needs a GPU and a TensorFlow that uses it; skipped otherwise."""

import os

import pytest

from cluster import tf
from graphs import PS0, WORKER0, session
from tensors import digest, random_array
from training_job import batch, regression


# To the other task's GPU, from there to its CPU, and back to the first task.
HOPS = ("/job:ps/task:0/device:GPU:0", "/job:worker/task:0/device:GPU:0", PS0, WORKER0, "/job:ps/task:0/device:GPU:0")
DTYPES = ("float32", "float64", "half", "bfloat16", "int64", "complex64", "bool", "uint8")
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0"), "TF_FORCE_GPU_ALLOW_GROWTH": "true"}


def count_gpus():
    return len(tf.config.list_physical_devices("GPU"))


@pytest.fixture(scope="module")
def gpu(runner):
    if not os.path.exists("/dev/nvidiactl"):
        pytest.skip("no GPU")
    probe = runner.task("gpus", environment=ENVIRONMENT, spawn=True)
    try:
        if not probe.call(count_gpus):
            pytest.skip("this TensorFlow sees no GPU")
    finally:
        probe.kill()


@pytest.fixture(scope="module", params=["grpc++", "star_server"])
def pair(gpu, make_cluster, request):
    """Returns (run on stock gRPC, run on ours): functions that run their argument in worker 0 of either cluster."""

    def on(protocol):
        cluster = make_cluster(shape=(("ps", 2), ("worker", 1)), protocol=protocol, environment=ENVIRONMENT, spawn=True)
        return lambda function, *args: cluster["worker", 0].call(function, cluster.target("worker", 0), *args, timeout=300)

    return on("grpc"), on(request.param)


def relay(target, dtype_name):
    """Digests of the values fed and of those after each hop; sizes that are not whole blocks, and an empty tensor."""
    import numpy as np

    dtype, rng = tf.as_dtype(dtype_name), np.random.default_rng(3)
    shapes = ((), (0, 3), (7,), (8191,), (8193,), (3, 100_001), (1 << 20,))
    with tf.Graph().as_default(), session(target) as sess:
        feeds, hops = {}, []
        for shape in shapes:
            value = tf.compat.v1.placeholder(dtype, shape)
            feeds[value] = random_array(dtype, shape, rng)
            stops = []
            for device in HOPS:
                with tf.device(device):
                    value = tf.identity(value)
                stops.append(value)
            hops.append(stops)
        steps = [sess.run(hops, feeds) for _ in range(3)]
        return [[digest(array) for array in feeds.values()]] + [[[digest(stop) for stop in stops] for stops in step] for step in steps]


@pytest.mark.ours
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_hop_brings_the_same_bits(pair, dtype):
    stock, ours = (run(relay, dtype) for run in pair)
    for step in ours[1:]:
        for fed, arrived in zip(ours[0], step):
            assert arrived == [fed] * len(HOPS)
    assert ours == stock


def branches(target):
    """Dead tensors of a branch on a GPU that is not taken cross as well."""
    with tf.Graph().as_default(), session(target) as sess:
        with tf.device(PS0):
            flag = tf.compat.v1.placeholder(tf.bool, ())
        with tf.device(HOPS[0]):
            value = tf.random.stateless_uniform((5000,), seed=[1, 2])
            off, on = tf.raw_ops.Switch(data=value, pred=flag)
        with tf.device(HOPS[1]):
            merged, _ = tf.raw_ops.Merge(inputs=[off * 2.0, on * 3.0])
        with tf.device(PS0):
            merged = tf.identity(merged)
        return [digest(sess.run(merged, {flag: taken})) for taken in (True, False, True)]


@pytest.mark.ours
def test_dead_tensors(pair):
    stock, ours = (run(branches) for run in pair)
    assert ours == stock
    assert ours[0] == ours[2] != ours[1]


def train(target, steps=10):
    """A model on the worker's GPU, with variables on the parameter servers' CPUs."""
    import numpy as np

    one = tf.compat.v1
    with tf.Graph().as_default():
        with one.device(one.train.replica_device_setter(ps_tasks=2, worker_device="/job:worker/task:0/device:GPU:0", ps_device="/job:ps/device:CPU:0")):
            ids, x, loss = regression(True)
            push = one.train.AdagradOptimizer(0.1).minimize(loss)
        # Operations without a GPU kernel run on the worker's CPU.
        with one.Session(target, config=one.ConfigProto(allow_soft_placement=True)) as sess:
            sess.run(one.global_variables_initializer())
            losses = []
            for step in range(steps):
                i, xs = batch(step)
                losses.append(sess.run([loss, push], {ids: i, x: xs})[0])
            metadata = one.RunMetadata()
            sess.run(push, {ids: i, x: xs}, options=one.RunOptions(trace_level=one.RunOptions.FULL_TRACE), run_metadata=metadata)
        on_gpu = any("/job:worker" in device.device and "GPU:0" in device.device and device.node_stats for device in metadata.step_stats.dev_stats)
        return [float(np.float32(value)) for value in losses], on_gpu


@pytest.mark.ours
def test_a_worker_with_a_gpu_trains(pair):
    (stock, _), (ours, on_gpu) = (run(train) for run in pair)
    assert on_gpu
    assert ours == pytest.approx(stock, rel=1e-4)  # GPUs may sum in another order
    assert ours[-1] < ours[0]
