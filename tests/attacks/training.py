"""Code that the TensorFlow processes run while they are attacked: steps whose results are all checked, and sessions that come and go."""

import os
import struct
import time

from cluster import state, tf
from steps import Model

one = lambda: tf.compat.v1  # noqa: E731
PS = "/job:ps/task:0"


def config(task):
    """Limits a session to the server and its own worker, as other workers may be down."""
    return one().ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{task}"])


def train(target, stop_file, trail, task=0):
    """Runs steps until `stop_file` appears; appends the time of each to `trail`. Returns the number of steps."""
    with tf.Graph().as_default():
        model = Model(worker=f"/job:worker/task:{task}", name="trained")
        with one().Session(target, config=config(task)) as sess, open(trail, "ab", buffering=0) as out:
            sess.run(model.initializer)
            while not os.path.exists(stop_file):
                model.check(sess.run(model.sums))
                out.write(struct.pack("<d", time.monotonic()))
    return model.steps


def prepare_visits(target, task):
    with tf.Graph().as_default() as graph:
        with tf.device(PS):
            v = one().get_variable(f"visited{task}", (1000,), initializer=one().ones_initializer())
        with tf.device(f"/job:worker/task:{task}"):
            doubled = v * 2.0
        with tf.device(PS):
            total = tf.reduce_sum(doubled + 1.0)
        state["visit"] = target, task, graph, total
        with one().Session(target, graph=graph, config=config(task)) as sess:
            sess.run(v.initializer)
    return visit()


def visit():
    """Runs one step in a new session; returns the seconds it took."""
    target, task, graph, total = state["visit"]
    start = time.monotonic()
    with one().Session(target, graph=graph, config=config(task)) as sess:
        value = float(sess.run(total))
    assert value == 3000.0, value
    return time.monotonic() - start


def read_objects(target):
    """Runs a step that fetches a variant from the parameter server. Returns its error, and whether this worker still works."""
    with tf.Graph().as_default():
        with tf.device(PS):
            handle = tf.raw_ops.VarHandleOp(dtype=tf.variant, shape=[], shared_name="objects")
            read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.variant)
        with tf.device("/job:worker/task:0"):
            length = tf.raw_ops.TensorListLength(input_handle=read)
            local = tf.random.uniform((10,)) * 0.0 + 2.0
        error = None
        with one().Session(target, config=config(0)) as sess:
            try:
                error = "no error", str(sess.run(length))
            except tf.errors.OpError as caught:
                error = type(caught).__name__, caught.message
            works = float(sess.run(local)[3]) == 2.0
    return error, works
