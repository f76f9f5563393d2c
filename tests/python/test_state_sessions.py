"""What sessions of several programs do to the state of a server that they share."""

import pytest

from cluster import one, tf
from counting import begin_counting, count, counted, environment, flush

pytestmark = pytest.mark.ours

SHAPE = (("ps", 1), ("worker", 1))


# In the task processes. ------------------------------------------------------------------------------------------------


def fill(target, size, isolated=False, dtype="float32"):
    """A session gives a reference variable its first value. Returns its sum."""
    with tf.Graph().as_default() as graph:
        with tf.device("/job:ps/task:0"):
            variable = one().get_variable("w", (size,), dtype, one().ones_initializer(), use_resource=False)
        with one().Session(target, graph=graph, config=one().ConfigProto(isolate_session_state=isolated)) as sess:
            sess.run(variable.initializer)
            return float(sess.run(tf.reduce_sum(variable)))


def find(target, size, dtype="float32"):
    """Returns the sum of the variable that another session has filled."""
    with tf.Graph().as_default() as graph:
        with tf.device("/job:ps/task:0"):
            variable = one().get_variable("w", (size,), dtype, one().zeros_initializer(), use_resource=False)
        with one().Session(target, graph=graph) as sess:
            return float(sess.run(tf.reduce_sum(variable)))


def expect_other_types(target, use_resource):
    """Sessions read and assign variables that count as if they had other types. Returns the errors.

    TensorFlow aborts where a resource variable is read so that has had a sparse update."""
    errors = []
    for name, shape, dtype in (("count0", (), tf.float32), ("table0", (1000, 4), tf.int32)):
        with tf.Graph().as_default() as graph:
            with tf.device("/job:ps/task:0"):
                variable = one().get_variable(name, shape, dtype, one().zeros_initializer(), use_resource=use_resource)
                fetches = [one().assign(variable, tf.ones(shape, dtype))]
                if name == "count0":
                    fetches.append(tf.reduce_sum(variable))
            with one().Session(target, graph=graph) as sess:
                for fetch in fetches:
                    try:
                        sess.run(fetch)
                    except tf.errors.OpError as error:
                        errors.append(type(error).__name__)
    return errors


def handle_of(dtype):
    return tf.raw_ops.VarHandleOp(dtype=dtype, shape=(4,), shared_name="v")


def make_again(target, dtype):
    """A session deletes a resource variable through a handle with a type that the variable may not have, and makes it with this type."""
    with tf.Graph().as_default() as graph:
        with tf.device("/job:ps/task:0"):
            delete = tf.raw_ops.DestroyResourceOp(resource=handle_of(dtype), ignore_lookup_error=True)
            assign = tf.raw_ops.AssignVariableOp(resource=handle_of(dtype), value=tf.ones((4,), dtype))
        with one().Session(target, graph=graph) as sess:
            sess.run(delete)
            sess.run(assign)


def sum_of(target, dtype):
    with tf.Graph().as_default() as graph:
        with tf.device("/job:ps/task:0"):
            total = tf.reduce_sum(tf.raw_ops.ReadVariableOp(resource=handle_of(dtype), dtype=dtype))
        with one().Session(target, graph=graph) as sess:
            return float(sess.run(total))


def reset(target):
    one().Session.reset(target)


# Tests. ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(fresh_cluster, protocol, tmp_path):
    return fresh_cluster(SHAPE, protocol="star_server", environment=environment(tmp_path))


def worker_call(cluster, program, *arguments, **options):
    return cluster["worker", 0].call(program, cluster.target("worker", 0), *arguments, **options)


def restart(cluster):
    flush(cluster["ps", 0])
    cluster["ps", 0].kill()
    cluster.start("ps", 0)


def test_variables_that_were_reset_may_be_made_again_with_another_form(cluster):
    """To look whether a reference variable is there would make it, with the old shape."""
    for size, dtype in ((10, "float32"), (20, "float32"), (30, "float64")):
        assert worker_call(cluster, fill, size, dtype=dtype) == size
        restart(cluster)
        assert worker_call(cluster, find, size, dtype) == size
        worker_call(cluster, reset)
        flush(cluster["ps", 0])


def test_a_variable_may_be_made_again_with_another_type(cluster):
    for dtype in ("float32", "int64", "float32"):
        worker_call(cluster, make_again, dtype)
        restart(cluster)
        assert worker_call(cluster, sum_of, dtype) == 4


def test_variables_of_isolated_sessions_are_no_ones_else(cluster):
    assert worker_call(cluster, fill, 10, True) == 10
    flush(cluster["ps", 0])
    assert worker_call(cluster, fill, 20) == 20
    restart(cluster)
    assert worker_call(cluster, find, 20) == 20


@pytest.mark.parametrize("use_resource", [False, True])
def test_sessions_with_a_cluster_of_their_own_may_share_the_variables(fresh_cluster, tmp_path, use_resource):
    """What they change is kept, like the changes of others."""
    cluster = fresh_cluster((("ps", 2), ("worker", 1)), protocol="star_server", environment=environment(tmp_path, "sync"))
    worker_call(cluster, begin_counting, use_resource, cluster.spec)
    steps = cluster["worker", 0].call(count, 0.5)[0]
    for server in (0, 1):
        cluster["ps", server].kill()
        cluster.start("ps", server)
        steps += cluster["worker", 0].call(count, 0.5)[0]
    assert cluster["worker", 0].call(counted) == [(steps, 12 * steps)] * 2


@pytest.mark.parametrize("use_resource", [False, True])
def test_a_session_that_expects_other_types_changes_nothing(fresh_cluster, tmp_path, use_resource):
    cluster = fresh_cluster((("ps", 2), ("worker", 1)), protocol="star_server", environment=environment(tmp_path, "sync"))
    worker_call(cluster, begin_counting, use_resource)
    steps = cluster["worker", 0].call(count, 0.2)[0]
    for server in (0, 1):
        assert len(worker_call(cluster, expect_other_types, use_resource)) == 3
        steps += cluster["worker", 0].call(count, 0.2)[0]
        cluster["ps", server].kill()
        cluster.start("ps", server)
        steps += cluster["worker", 0].call(count, 0.2)[0]
    assert cluster["worker", 0].call(counted) == [(steps, 12 * steps)] * 2
