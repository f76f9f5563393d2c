"""No update is lost or applied twice: workers change the same variables in thousands of short steps, and every element must have the exact sum.

All values are whole numbers, also the floats. TensorFlow's guarantees must hold over every protocol: updates under a lock, updates of resource variables, and
unlocked updates where no two workers touch the same element. Only our executor guarantees unlocked `AssignAdd` and `AssignSub`.
STARWIRE_TEST_COUNT_SECONDS=60 counts for longer.
"""

import os
import time
from pathlib import Path

import pytest

from cluster import Cluster, is_stock, one, tf

SECONDS = float(os.environ.get("STARWIRE_TEST_COUNT_SECONDS", "2"))
PS, WORKERS = 2, 3
ROWS, WIDTH = 12, 3  # of tables; each worker has its own rows and shares the first
LONG = 4_000  # elements: an unlocked update takes long enough to overlap another
TIMEOUT = SECONDS + 90


# Ways to increment a variable; each makes the variable and its update. ------------------------------------------------


def assign_add(shape, use_locking):
    def make(name, unit, worker):
        v = one().get_variable(name, shape, tf.int64, initializer=one().zeros_initializer(), use_resource=False)
        return v, one().assign_add(v, tf.zeros(shape, tf.int64) + tf.cast(unit, tf.int64), use_locking=use_locking).op

    return make


def assign_sub(name, unit, worker):
    v = one().get_variable(name, (), tf.float32, initializer=one().zeros_initializer(), use_resource=False)
    return v, one().assign_sub(v, -unit).op


def resource_add(shape):
    def make(name, unit, worker):
        v = one().get_variable(name, shape, tf.float32, initializer=one().zeros_initializer(), use_resource=True)
        return v, v.assign_add(tf.zeros(shape) + unit, read_value=False)

    return make


def descent(use_resource):
    def make(name, unit, worker):
        v = one().get_variable(name, (64,), tf.float32, initializer=one().zeros_initializer(), use_resource=use_resource)
        apply = tf.raw_ops.ResourceApplyGradientDescent if use_resource else tf.raw_ops.ApplyGradientDescent
        update = apply(var=v.handle if use_resource else v._ref(), alpha=1.0, delta=tf.zeros((64,)) - unit, use_locking=True)
        return v, update if use_resource else update.op

    return make


def sparse(kind, use_locking, own_rows):
    """`kind`: scatter, apply or adagrad, on a reference or a resource. With `own_rows`, each worker updates only its own rows."""
    use_resource = kind.startswith("resource")

    def make(name, unit, worker):
        v = one().get_variable(name, (ROWS, WIDTH), tf.float32, initializer=one().zeros_initializer(), use_resource=use_resource)
        rows = tf.constant([1 + worker, 1 + worker + WORKERS] if own_rows else [0, 0, 5])
        values = tf.zeros((rows.shape[0], WIDTH)) + unit
        ref = v.handle if use_resource else v._ref()
        if kind == "scatter":
            return v, tf.raw_ops.ScatterAdd(ref=ref, indices=rows, updates=values, use_locking=use_locking).op
        if kind == "resource scatter":
            return v, tf.raw_ops.ResourceScatterAdd(resource=ref, indices=rows, updates=values)
        if "adagrad" in kind:
            # The accumulator counts: it gets the squares of the gradients.
            table = one().get_variable(f"{name}_table", (ROWS, WIDTH), tf.float32, initializer=one().zeros_initializer(), use_resource=use_resource)
            apply = tf.raw_ops.ResourceSparseApplyAdagradV2 if use_resource else tf.raw_ops.SparseApplyAdagradV2
            update = apply(var=table.handle if use_resource else table._ref(), accum=ref, lr=0.0, epsilon=1.0, grad=values, indices=rows, use_locking=use_locking)
            return v, update if use_resource else update.op
        # Apply updates a row once even if its index repeats, so indices are unique.
        rows, values = (rows, values) if own_rows else (rows[1:], values[1:])
        apply = tf.raw_ops.ResourceSparseApplyProximalGradientDescent if use_resource else tf.raw_ops.SparseApplyProximalGradientDescent
        update = apply(var=ref, alpha=1.0, l1=0.0, l2=0.0, grad=-values, indices=rows, use_locking=use_locking)
        return v, update if use_resource else update.op

    return make


PROMISED = {
    "locked": assign_add((), True),
    "locked_long": assign_add((LONG,), True),
    "resource": resource_add(()),
    "resource_long": resource_add((LONG,)),
    "descent": descent(False),
    "resource_descent": descent(True),
    "scatter": sparse("scatter", True, False),
    "scatter_own_rows": sparse("scatter", False, True),
    "apply": sparse("apply", True, False),
    "apply_own_rows": sparse("apply", False, True),
    "resource_scatter_own_rows": sparse("resource scatter", False, True),
    "resource_apply": sparse("resource apply", True, False),
    "resource_apply_own_rows": sparse("resource apply", False, True),
    "adagrad": sparse("adagrad", True, False),
    "adagrad_own_rows": sparse("adagrad", False, True),
    "resource_adagrad": sparse("resource adagrad", True, False),
    "resource_adagrad_own_rows": sparse("resource adagrad", False, True),
}
# Guaranteed only by our executor. Many of them, so that some concurrent updates overlap.
OURS = {"unlocked": assign_add((), False), "unlocked_sub": assign_sub, **{f"unlocked_long{i}": assign_add((LONG,), False) for i in range(20)}}


def expected(name, v, steps):
    """`steps`: number of steps of each worker."""
    import numpy as np

    total = sum(steps)
    if len(v.shape) < 2:
        return np.full(v.shape, total)
    want = np.zeros((ROWS, WIDTH))
    if "own_rows" in name:
        for worker, count in enumerate(steps):
            want[[1 + worker, 1 + worker + WORKERS]] = count
    else:
        want[0] = 2 * total if name.startswith(("scatter", "adagrad", "resource_adagrad")) else total
        want[5] = total
    return want


def build(worker, kinds):
    """Pulls a one from each server, pushes it to all variables, and then counts the step, as optimizers do."""
    variables, pushes = {}, []
    for ps in range(PS):
        with tf.device(f"/job:ps/task:{ps}"):
            pulled = one().get_variable(f"one{ps}", (1,), tf.float32, initializer=one().ones_initializer(), use_resource=False)
        with tf.device(f"/job:worker/task:{worker}"):
            unit = tf.reshape(pulled * 1.0, ())
        with tf.device(f"/job:ps/task:{ps}"):
            for name, make in kinds.items():
                variables[f"{name}_{ps}"], update = make(f"{name}_{ps}", unit, worker)
                pushes.append(update)
    with tf.device("/job:ps/task:0"), tf.control_dependencies(pushes):
        counted = [tf.no_op()]
        for name in ("unlocked", "locked", "resource"):
            if name in kinds:
                variables[f"{name}_step"], update = kinds[name](f"{name}_step", tf.constant(1.0), worker)
                counted.append(update)
    with tf.device(f"/job:worker/task:{worker}"):
        return variables, tf.group(*counted)


def count(target, worker, folder, names, seconds):
    """Returns the number of steps and, in worker 0, the variables after all workers have finished."""
    kinds = {name: {**PROMISED, **OURS}[name] for name in names}
    meet = lambda place: wait_for_all(folder, place, worker)  # noqa: E731
    with tf.Graph().as_default():
        variables, step = build(worker, kinds)
        config = one().ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{worker}"])
        with one().Session(target, config=config) as session:
            if worker == 0:
                session.run(one().global_variables_initializer())
            meet("initialised")
            run = session.make_callable(step)
            steps, end = 0, time.monotonic() + seconds
            while time.monotonic() < end:
                run()
                steps += 1
            meet("counted")
            values = session.run(variables) if worker == 0 else None
            # If a worker left earlier, its session's end could disturb worker 0's read.
            meet("read")
    return steps, values


def wait_for_all(folder, place, worker):
    (Path(folder) / f"{place}{worker}").touch()
    end = time.monotonic() + 60
    while not all((Path(folder) / f"{place}{other}").exists() for other in range(WORKERS)):
        assert time.monotonic() < end, f"a worker did not come to {place!r}"
        time.sleep(0.005)


CASES = {
    "promised": (None, {}, PROMISED),
    "promised-fused": ("grpc++", {"STARWIRE_TENSOR_FUSE": "true"}, PROMISED),
    "promised-star_server": ("star_server", {}, PROMISED),
    "promised-star_server_lite": ("star_server_lite", {}, PROMISED),
    "unlocked-star_server": ("star_server", {}, OURS),
    "unlocked-star_server-pool": ("star_server", {"STARWIRE_STAR_LIMITS": "inline_us=0"}, OURS),
    "unlocked-star_server_lite": ("star_server_lite", {}, OURS),
}


QUICK = ("promised-star_server_lite", "unlocked-star_server", "unlocked-star_server-pool")


@pytest.mark.quick(
    lambda of: of["case"] in QUICK,
    reason="over grpc++, TensorFlow itself updates; both kinds of star calls have one executor, at a reactor or in the pool, and lite delays updates besides",
)
@pytest.mark.parametrize("case", CASES)
def test_every_update_counts(runner, protocol, tmp_path, case):
    wanted, environment, kinds = CASES[case]
    if is_stock(protocol) and wanted is not None:
        pytest.skip("not a protocol of stock TensorFlow")
    environment = {"STARWIRE_REACTORS": "2", **environment}
    with Cluster(runner, wanted or protocol, {"ps": PS, "worker": WORKERS}, environment=environment) as cluster:
        workers = [cluster["worker", i] for i in range(WORKERS)]
        for i, worker in enumerate(workers):
            worker.begin(count, cluster.target("worker", i), i, str(tmp_path), list(kinds), SECONDS)
        answers = [worker.result(TIMEOUT) for worker in workers]
    steps, values = [answer[0] for answer in answers], answers[0][1]
    assert min(steps) > 0
    wrong = {name: (value - expected(name, value, steps)).sum() for name, value in values.items() if (value != expected(name, value, steps)).any()}
    assert not wrong, f"updates too many (or, negative, too few) after {steps} steps: {wrong}"
