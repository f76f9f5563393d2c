"""Sessions with real servers: saving, sharing, extending, isolation and device filters; ports, resolvers and masters."""

import json
import os
import subprocess
import threading

import pytest

import steps
from cluster import RemoteError, is_stock, load, one, state, tf, worker_call


# Saver, partial runs, callables. --------------------------------------------------------------------------------------


def save_and_restore(target, prefix):
    import numpy as np

    with tf.Graph().as_default():
        for task, dtype in ((0, tf.float32), (1, tf.bfloat16), (0, tf.int64), (1, tf.complex64)):
            with tf.device(f"/job:ps/task:{task}"):
                one().get_variable(f"v_{dtype.name}", initializer=tf.cast(tf.range(2000), dtype), use_resource=task == 1)
        with tf.device("/job:ps/task:0"):
            sharded, plain = one().train.Saver(sharded=True), one().train.Saver()
        with one().Session(target) as sess:
            sess.run(one().global_variables_initializer())
            before = [np.asarray(v).tobytes() for v in sess.run(one().global_variables())]
            paths = sharded.save(sess, prefix + "-sharded"), plain.save(sess, prefix + "-plain")
            for saver, path in zip((sharded, plain), paths):
                sess.run([v.assign(tf.zeros_like(v)) for v in one().global_variables()])
                saver.restore(sess, path)
                after = [np.asarray(v).tobytes() for v in sess.run(one().global_variables())]
                assert before == after
    return True


@pytest.mark.star
def test_saver(cluster, tmp_path):
    assert worker_call(cluster, save_and_restore, str(tmp_path / "model"))


def long_error(target):
    text = "x" * 100_000
    with tf.Graph().as_default():
        with tf.device("/job:ps/task:0"):
            holds = one().placeholder(tf.bool, ())
            check = one().Assert(holds, [text])
        with one().Session(target) as sess:
            try:
                sess.run(check, {holds: False})
            except tf.errors.InvalidArgumentError as error:
                return text in error.message


def test_a_long_error_arrives_whole(cluster):
    assert worker_call(cluster, long_error)


def partial_run(target):
    with tf.Graph().as_default(), one().Session(target) as sess:
        with tf.device("/job:ps/task:0"):
            a, b = one().placeholder(tf.float32, ()), one().placeholder(tf.float32, ())
            r1 = a + b
        with tf.device("/job:worker/task:1"):
            c = one().placeholder(tf.float32, ())
            r2 = r1 * c
        out = []
        for _ in range(2):
            handle = sess.partial_run_setup([r1, r2], [a, b, c])
            out.append(float(sess.partial_run(handle, r1, {a: 1, b: 2})))
            out.append(float(sess.partial_run(handle, r2, {c: 17})))
        return out


@pytest.mark.star
def test_partial_run(cluster):
    assert worker_call(cluster, partial_run) == [3.0, 51.0] * 2


def callables(target):
    with tf.Graph().as_default(), one().Session(target) as sess:
        with tf.device("/job:ps/task:1"):
            a = one().placeholder(tf.float32, (3,))
            b = a * 2.0
        with tf.device("/job:worker/task:1"):
            c = b + 1.0
        call = sess.make_callable([b, c], [a])
        options = one().RunOptions(trace_level=one().RunOptions.FULL_TRACE)
        traced = sess.make_callable(c, [a], accept_options=True)
        metadata = one().RunMetadata()
        out = [[v.tolist() for v in call([i, 0, 1])] for i in range(20)]
        out.append(traced([1, 2, 3], options=options, run_metadata=metadata).tolist())
        return out, sorted({stats.device for stats in metadata.step_stats.dev_stats})


@pytest.mark.star
def test_make_callable_and_full_trace(cluster):
    out, devices = worker_call(cluster, callables)
    assert out[:20] == [[[2.0 * i, 0, 2], [2.0 * i + 1, 1, 3]] for i in range(20)]
    assert out[20] == [3.0, 5.0, 7.0]
    for task in ("/job:ps/replica:0/task:1", "/job:worker/replica:0/task:1"):
        assert any(device.startswith(task) for device in devices), devices


# Sessions, containers. ------------------------------------------------------------------------------------------------


def counter(target, increments, container="", isolate=False, initialise=True):
    config = one().ConfigProto(isolate_session_state=isolate)
    with tf.Graph().as_default():
        with one().container(container), tf.device("/job:ps/task:0"):
            count = one().get_variable("count", initializer=0, use_resource=False)
        with tf.device("/job:worker/task:0"):
            bumped = one().assign_add(count, 1)
        with one().Session(target, config=config) as sess:
            if initialise:
                sess.run(count.initializer)
            value = None
            for _ in range(increments):
                value = int(sess.run(bumped))
            return value


@pytest.mark.star
def test_sessions_share_variables_unless_isolated(cluster):
    assert worker_call(cluster, counter, 3) == 3
    assert worker_call(cluster, counter, 2, initialise=False) == 5, "a second session sees the same variable"
    other = cluster["worker", 1].call(counter_from_other_worker, cluster.target("worker", 1))
    assert other == 6, "so does a session of another master"
    assert worker_call(cluster, counter, 4, isolate=True) == 4, "an isolated session has its own"
    assert worker_call(cluster, counter, 1, initialise=False) == 7


def counter_from_other_worker(target):
    with tf.Graph().as_default():
        with tf.device("/job:ps/task:0"):
            count = one().get_variable("count", initializer=0, use_resource=False)
            bumped = one().assign_add(count, 1)
        with one().Session(target) as sess:
            return int(sess.run(bumped))


def reset(target, containers):
    one().Session.reset(target, containers)
    return True


@pytest.mark.star
@pytest.mark.grpc_client
def test_reset_clears_a_container(cluster):
    assert worker_call(cluster, counter, 3, container="mine") == 3
    assert worker_call(cluster, counter, 3, container="yours") == 3
    assert worker_call(cluster, reset, ["mine"])
    with pytest.raises(RemoteError) as caught:
        worker_call(cluster, counter, 1, container="mine", initialise=False)
    assert caught.value.type == "FailedPreconditionError" and "uninitialized" in caught.value.message
    assert worker_call(cluster, counter, 1, container="yours", initialise=False) == 4


def closed_session(target):
    with tf.Graph().as_default():
        with tf.device("/job:ps/task:0"):
            value = one().placeholder_with_default(1.0, ()) + 1.0
        sess = one().Session(target)
        assert sess.run(value) == 2.0
        sess.close()
        try:
            sess.run(value)
        except RuntimeError as error:
            return str(error)


@pytest.mark.star
def test_closed_session_refuses(cluster):
    assert "closed" in worker_call(cluster, closed_session)


def extend(target):
    """A session whose graph grows between runs."""
    with tf.Graph().as_default(), one().Session(target) as sess:
        out = []
        value = None
        for i in range(5):
            with tf.device(("/job:ps/task:0", "/job:worker/task:1", "/job:ps/task:1")[i % 3]):
                value = one().placeholder_with_default(1.0, ()) if value is None else value + float(i)
            out.append(float(sess.run(value)))
        return out


@pytest.mark.star
def test_graph_extension(cluster):
    assert worker_call(cluster, extend) == [1.0, 2.0, 4.0, 7.0, 11.0]


def parallel_steps(target, threads, steps):
    """Many threads run steps of one session concurrently; each sum is checked."""
    import numpy as np

    with tf.Graph().as_default(), one().Session(target) as sess:
        with tf.device("/job:ps/task:0"):
            x = one().placeholder(tf.float32, (3000,))
            doubled = x * 2.0
        with tf.device("/job:worker/task:0"):
            total = tf.reduce_sum(doubled)
        with tf.device("/job:ps/task:1"):
            back = total + 1.0
        sess.run(back, {x: np.zeros(3000)})
        wrong = []

        def run(thread):
            for step in range(steps):
                value = sess.run(back, {x: np.full(3000, thread * steps + step, np.float32)})
                if value != 2.0 * 3000 * (thread * steps + step) + 1.0:
                    wrong.append((thread, step, float(value)))

        pool = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join()
        return wrong


@pytest.mark.star
def test_concurrent_steps_do_not_mix(cluster):
    assert worker_call(cluster, parallel_steps, 8, 25) == []


# ClusterSpec propagation, device filters, ports, resolvers. -----------------------------------------------------------


def local_server(protocol):
    load(protocol)
    server = tf.distribute.Server.create_local_server(start=True) if protocol == "grpc" else tf.distribute.Server({"localhost": ["localhost:0"]}, protocol=protocol)
    state["server"] = server
    return server.target


def propagated(target, spec):
    cluster_def = tf.train.ClusterSpec(spec).as_cluster_def()
    config = one().ConfigProto(cluster_def=cluster_def)
    with tf.Graph().as_default():
        with tf.device("/job:there/task:1"):
            a = one().get_variable("a", initializer=[1.0, 2.0])
        with tf.device("/job:here/task:0"):
            b = one().assign_add(a, [1.0, 1.0]) * 10.0
        with one().Session(target, config=config) as sess:
            names = sorted(device.name for device in sess.list_devices())
            sess.run(one().global_variables_initializer())
            return names, [sess.run(b).tolist() for _ in range(3)]


@pytest.mark.grpc_client
def test_cluster_spec_propagation(runner, protocol):
    """Three servers without knowledge of each other become one cluster through the session's config."""
    tasks = [runner.task(f"propagation{i}") for i in range(3)]
    try:
        targets = [task.call(local_server, protocol) for task in tasks]
        addresses = [target[len("grpc://") :] for target in targets]
        names, values = tasks[0].call(propagated, targets[0], {"here": {0: addresses[0]}, "there": {0: addresses[1], 1: addresses[2]}})
        assert any(name.startswith("/job:there/replica:0/task:1") for name in names)
        assert values == [[20.0, 30.0], [30.0, 40.0], [40.0, 50.0]]
    finally:
        for task in tasks:
            task.kill()


def filtered(target, filters):
    config = one().ConfigProto(device_filters=filters)
    with tf.Graph().as_default():
        with tf.device("/job:ps/task:0"):
            a = one().placeholder_with_default(2.0, ()) * 3.0
        with tf.device("/job:worker/task:0"):
            b = a + 1.0
        with one().Session(target, config=config) as sess:
            # TensorFlow 1 has devices for XLA beside the CPU.
            names = sorted(device.name for device in sess.list_devices() if device.device_type == "CPU")
            return names, float(sess.run(b))


@pytest.mark.star
def test_device_filters(fresh_cluster):
    """With filters, a session starts although a task that it does not need is down, and sees only its own devices."""
    cluster = fresh_cluster(shape=(("ps", 1), ("worker", 2)), start=False)
    cluster.start("ps", 0)
    cluster.start("worker", 0)
    names, value = worker_call(cluster, filtered, ["/job:ps", "/job:worker/task:0"], timeout=30)
    assert value == 7.0
    assert names == ["/job:ps/replica:0/task:0/device:CPU:0", "/job:worker/replica:0/task:0/device:CPU:0"]


def create_local(protocol):
    load(protocol)
    if protocol == "grpc":
        server = tf.distribute.Server.create_local_server()
    else:
        server = one().train.Server({"local": ["localhost:0"]}, protocol=protocol, start=False)
        server.start()
    with tf.Graph().as_default(), one().Session(server.target) as sess:
        return server.target, float(sess.run(one().placeholder_with_default(20.0, ()) + 1.0))


def test_server_on_port_zero(runner, protocol):
    task = runner.task("port0")
    target, value = task.call(create_local, protocol)
    assert value == 21.0
    assert target.startswith("grpc://localhost:") and not target.endswith(":0")
    assert task.exit() == 0


def start_from_tf_config(protocol, job, index, spec):
    load(protocol)
    os.environ["TF_CONFIG"] = json.dumps({"cluster": spec, "task": {"type": job, "index": index}, "rpc_layer": protocol})
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    assert resolver.rpc_layer == protocol
    assert resolver.task_type == job and resolver.task_id == index
    state["server"] = tf.distribute.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol=resolver.rpc_layer)
    return state["server"].target


def pull_push(target, steps=3):
    with tf.Graph().as_default():
        with tf.device("/job:ps/task:0"):
            v = one().get_variable("v", initializer=[1.0, 2.0])
        with tf.device("/job:worker/task:0"):
            pulled = v * 2.0
        with tf.device("/job:ps/task:0"):
            pushed = one().assign_add(v, pulled)
        with one().Session(target) as sess:
            sess.run(v.initializer)
            return [sess.run(pushed).tolist() for _ in range(steps)]


def test_tf_config_resolver(fresh_cluster, protocol):
    cluster = fresh_cluster(start=False)
    for job in ("ps", "worker"):
        cluster.process(job, 0).call(start_from_tf_config, protocol, job, 0, cluster.spec)
    assert worker_call(cluster, pull_push) == [[3.0, 6.0], [9.0, 18.0], [27.0, 54.0]]


@pytest.mark.star
@pytest.mark.grpc_client
def test_remote_master(cluster):
    """A client uses a master in another process, with or without the plug-in in the client."""
    client = cluster.runner.task("client")
    try:
        assert client.call(pull_push, cluster.target("worker", 0)) == [[3.0, 6.0], [9.0, 18.0], [27.0, 54.0]]
    finally:
        client.kill()


# Request ids. ---------------------------------------------------------------------------------------------------------


@pytest.mark.deep(reason="compiles a library that replaces a function of TensorFlow; ids are compared by no code of ours")
def test_equal_request_ids_do_no_harm(fresh_cluster, protocol, tmp_path):
    """TensorFlow draws request ids from per-thread generators with 32-bit seeds: after some 10^5 steps two collide, and stock `grpc` fails the step
    ("received twice"). Here all are equal."""
    if is_stock(protocol):
        pytest.skip("stock TensorFlow fails here")
    source = tmp_path / "constant.c"
    source.write_text("unsigned long _ZN3tsl6random16ThreadLocalNew64Ev(void) { return 7; }\n")
    library = tmp_path / "constant.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    options = {"environment": {"LD_PRELOAD": str(library)}, "spawn": True}
    stock = fresh_cluster(protocol="grpc", **options)
    with pytest.raises(RemoteError, match="twice"):
        stock["worker", 0].call(steps.run_steps, stock.target("worker", 0), 5)
    cluster = fresh_cluster(**options)
    assert cluster["worker", 0].call(steps.run_steps, cluster.target("worker", 0), 5) == 5
