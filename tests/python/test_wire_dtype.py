"""starwire.config(wire_dtype="bfloat16"): parameters and gradients of training steps cross with 16 bits; nothing else changes."""

import re

import pytest

from cluster import RemoteError, one, tf, worker_call

pytestmark = pytest.mark.ours


# In the worker process. -----------------------------------------------------------------------------------------------


def session(target, dtype="bfloat16"):
    import starwire

    return one().Session(target, config=starwire.config(wire_dtype=dtype))


def rounded(value):
    """As it crosses."""
    import numpy as np

    return np.asarray(value).astype(tf.bfloat16.as_numpy_dtype).astype(np.float32)


def on(ps):
    return one().device(f"/job:ps/task:{ps}")


def here():
    return one().device("/job:worker/task:0")


def values(seed, *shape):
    import numpy as np

    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Model:
    def __init__(self, name, use_resource):
        with one().variable_scope(name, use_resource=use_resource):
            with on(0):
                self.dense = one().get_variable("dense", initializer=values(1, 20, 3))
                self.rate = one().get_variable("rate", initializer=0.1234567)
            with on(1):
                self.table = one().get_variable("table", initializer=values(2, 50, 4))
                self.double = one().get_variable("double", initializer=values(3, 5).astype("float64"))
        with here():
            self.ids = one().placeholder(tf.int64, [None])
            self.rows = tf.nn.embedding_lookup(self.table, self.ids)
            self.seen = {"dense": self.dense * 1.5, "rows": self.rows * 1.5, "rate": self.rate * 1.5, "double": self.double * 1.5}
            self.pushed = {"dense": tf.sin(self.dense), "rows": tf.sin(self.rows), "double": tf.sin(self.double)}
        optimizer = one().train.GradientDescentOptimizer(1.0)
        gradients = [(self.pushed["dense"], self.dense), (tf.IndexedSlices(self.pushed["rows"], self.ids), self.table), (self.pushed["double"], self.double)]
        self.train = optimizer.apply_gradients(gradients)


def one_step(target, name, use_resource):
    """What a step sees and applies, and whether it is what rounding once each way gives, bit for bit."""
    import numpy as np

    ids = np.array([3, 3, 7, 11, 49])
    with tf.Graph().as_default():
        model = Model(name, use_resource)
        with session(target) as sess:
            sess.run(one().global_variables_initializer())
            variables = [model.dense, model.table, model.rate, model.double]
            before = sess.run(variables)
            seen, pushed, _ = sess.run([model.seen, model.pushed, model.train], {model.ids: ids})
            dense, table, rate, double = sess.run(variables)
        start = [values(1, 20, 3), values(2, 50, 4), np.float32(0.1234567), values(3, 5).astype("float64")]
        expected_dense, expected_table = start[0] - rounded(pushed["dense"]), start[1].copy()
        for row, gradient in zip(ids, rounded(pushed["rows"])):
            expected_table[row] -= gradient
        return {
            "initial values": all(np.array_equal(a, b) for a, b in zip(before, start)),
            "pulled": np.array_equal(seen["dense"], rounded(start[0]) * np.float32(1.5)),
            "rows": np.array_equal(seen["rows"], rounded(start[1])[ids] * np.float32(1.5)),
            "numbers": np.array_equal(seen["rate"], start[2] * np.float32(1.5)),
            "doubles": np.array_equal(seen["double"], start[3] * 1.5) and np.array_equal(double, start[3] - pushed["double"]),
            "pushed": np.array_equal(dense, expected_dense),
            "rows pushed": np.array_equal(table, expected_table),
        }


def without_training(target, name):
    """Reads, evaluations and assignments are exact, and so is a variable that a training step fetches or saves."""
    import os

    import numpy as np

    with tf.Graph().as_default():
        model = Model(name, True)
        with here():
            assign = model.dense.assign(tf.constant(values(9, 20, 3)) * 1.0)
            passed = tf.identity(model.table.read_value())
        saver = one().train.Saver({"dense": model.dense})
        with session(target) as sess:
            sess.run(one().global_variables_initializer())
            evaluated = np.array_equal(sess.run(model.seen["dense"]), values(1, 20, 3) * np.float32(1.5))
            sess.run(assign)
            assigned = np.array_equal(sess.run(model.dense), values(9, 20, 3))
            path = saver.save(sess, os.path.abspath("narrow/model"))
            saved = np.array_equal(tf.train.load_variable(path, "dense"), values(9, 20, 3))
            fetched = sess.run([model.table.read_value(), passed, model.train], {model.ids: [1]})[:2]
            return (evaluated, assigned, saved, *(np.array_equal(table[2:], values(2, 50, 4)[2:]) for table in fetched))


def stored(target, name, use_resource):
    """What a training step stores, passes on or fetches. Only a variable that gets nothing but gradients crosses with 16 bits, where something is computed from it."""
    import numpy as np

    with tf.Graph().as_default():
        model = Model(name, use_resource)
        with one().variable_scope(name, use_resource=use_resource), on(0):
            average, clipped = (one().get_variable(what, initializer=values(seed, 20, 3)) for what, seed in (("average", 6), ("clipped", 7)))
            plain, behind = (one().get_variable(what, initializer=values(seed, 20, 3)) for what, seed in (("plain", 8), ("behind", 9)))
            seen = one().get_variable("seen", initializer=np.full(3, 257.0, np.float32))
        with one().variable_scope(name, use_resource=use_resource), here():
            local = one().get_variable("local", initializer=np.zeros((20, 3), np.float32))
        with here():
            old = tf.identity(average) if use_resource else average
            assigned = {
                "average": average.assign(np.float32(0.5) * plain + np.float32(0.75) * old),
                "clipped": clipped.assign(tf.clip_by_value(clipped, -0.1, 0.1)),
                "local": local.assign(plain),
            }
            fetched = {
                "rows": model.rows,
                "reshaped": tf.reshape(plain, [-1]),
                "chosen": tf.cond(model.ids[0] > 0, lambda: tf.identity(behind), lambda: behind + 1.0),
                "joined": tf.concat([plain, behind], 0),
                "shape": tf.shape(plain * 1.5),
                "number": tf.cast(seen * 2, tf.int32),
                "cast": tf.cast(seen, tf.int32),
                "text": tf.strings.as_string(seen, precision=1),
            }
        optimizer = one().train.GradientDescentOptimizer(1.0)
        train = optimizer.apply_gradients([(model.pushed["dense"], model.dense)])
        with session(target) as sess:
            sess.run(one().global_variables_initializer())
            found = sess.run([fetched, train, {what: update.op for what, update in assigned.items()}], {model.ids: [3, 7]})[0]
            found |= dict(zip(assigned, sess.run([average, clipped, local])))
        expected = {
            "average": np.float32(0.5) * rounded(values(8, 20, 3)) + np.float32(0.75) * values(6, 20, 3), "clipped": np.clip(values(7, 20, 3), np.float32(-0.1), np.float32(0.1)),
            "local": values(8, 20, 3), "rows": values(2, 50, 4)[[3, 7]], "reshaped": values(8, 20, 3).reshape(-1), "chosen": values(9, 20, 3),
            "joined": np.concatenate([values(8, 20, 3), values(9, 20, 3)]), "shape": [20, 3],
            "number": [512] * 3, "cast": [257] * 3, "text": [b"257.0"] * 3,
        }
        return {what: np.array_equal(value, expected[what]) for what, value in found.items()}


def adagrad(target, dtype, steps=300):
    """Losses of a regression."""
    with tf.Graph().as_default():
        with one().device(one().train.replica_device_setter(ps_tasks=2, worker_device="/job:worker/task:0", ps_device="/job:ps")):
            x = one().placeholder(tf.float32, [32, 16])
            with one().variable_scope(f"adagrad_{dtype}", use_resource=True):
                kernel = one().get_variable("kernel", initializer=values(4, 16, 4))
            loss = tf.reduce_mean(tf.square(tf.matmul(x, kernel) - tf.matmul(x, tf.constant(values(5, 16, 4)))))
            train = one().train.AdagradOptimizer(0.3).minimize(loss)
        with session(target, dtype) as sess:
            sess.run(one().global_variables_initializer())
            return [float(sess.run([loss, train], {x: values(100 + step, 32, 16)})[0]) for step in range(steps)]


def refused(dtype):
    import starwire

    starwire.config(wire_dtype=dtype)


# Tests. ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=("grpc++", "star_server", "star_server_lite"))
def protocol(request):
    return request.param


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_a_step_rounds_parameters_and_gradients_once(cluster, use_resource):
    log = cluster["worker", 0].log_size()
    assert set(worker_call(cluster, one_step, f"step_{use_resource}", use_resource).items()) == {
        (what, True) for what in ("initial values", "pulled", "rows", "numbers", "doubles", "pushed", "rows pushed")
    }
    # One graph only: rows, and dense, which resource variables may read for each use.
    text = cluster["worker", 0].full_log()[log:]
    assert re.findall(r", (\d+) pulled and (\d+) pushed values cross as bfloat16", text) == [("3" if use_resource else "2", "2")], text[-3000:]


def test_only_training_steps_round(cluster):
    assert worker_call(cluster, without_training, "exact") == (True,) * 5


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_what_is_stored_or_fetched_is_exact(cluster, use_resource):
    found = worker_call(cluster, stored, f"stored_{use_resource}", use_resource)
    assert set(found) == {"average", "clipped", "local", "rows", "reshaped", "chosen", "joined", "shape", "number", "cast", "text"} and all(found.values()), found


def test_it_trains(cluster):
    narrow, wide = worker_call(cluster, adagrad, "bfloat16"), worker_call(cluster, adagrad, "float32")
    assert narrow != wide and narrow[0] == pytest.approx(wide[0], rel=0.02)
    assert narrow[-1] < 0.01 * narrow[0] and narrow[-1] < 3 * wide[-1] + 1e-3


@pytest.mark.parametrize("dtype", ["float16", "int32", "nonsense"])
def test_other_types_are_refused(cluster, dtype):
    with pytest.raises(RemoteError, match="must be bfloat16 or float32|Cannot convert"):
        cluster["worker", 0].call(refused, dtype)
