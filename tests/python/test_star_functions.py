"""Star calls in functions of TensorFlow 2: that they are made, when they are not, and what functions do that sessions do not.

test_functions.py compares the results of ordinary training over every protocol; here the variables are captured twice, deleted and shared, and the servers die.
"""

import gc
import os
import re

import pytest

from cluster import RemoteError, state, tf
from metrics import counters, star_calls
from tensors import digest
from tf2_job import OPT_OUT, PS, chief_call, contents, goes_on, variable
from waiting import wait_until

pytestmark = pytest.mark.ours

STARS = ("star_server", "star_server_lite")
PAIR = (("ps", 2), ("worker", 2))
LOOP = 8


def one_by_one(step, count, *args):
    """Like `run`, but each step ends before the next one begins: two workers."""
    function = tf.function(step)
    out = []
    for number in range(count):
        result = state["coordinator"].schedule(function, args=(tf.constant(number, tf.int64), *args))
        state["coordinator"].join()
        out.append([digest(value) for value in tf.nest.flatten(result.fetch())])
    return out


def in_turns(step, count):
    """The same with the workers in turns. The coordinator gives a step to whichever worker is free first."""
    function = tf.function(step)
    out = []
    for number in range(count):
        with tf.device(f"/job:worker/replica:0/task:{number % 2}"):
            result = function(tf.constant(number, tf.int64))
        out.append([digest(value) for value in tf.nest.flatten(result)])
    return out


# In the chief's process. ----------------------------------------------------------------------------------------------


def plain():
    variables = [variable(tf.fill((4,), float(i)), where=i % 2) for i in range(12)]

    def step(number):
        loss = tf.add_n([tf.reduce_sum(v) for v in variables])
        for v in variables:
            v.assign_sub(0.1 * v + 0.001 * loss)
        return loss

    return one_by_one(step, 8), contents(variables)


def aliases():
    """Two captured handles of one variable: a function does not know it, but its control dependencies order what they are used for."""
    out = []
    for size in (3, 2000):
        v, other = variable(tf.range(size, dtype=tf.float32), where=0), variable(tf.zeros((size,)), where=1)
        with tf.device(PS[0]):
            again = tf.identity(v.handle)

        def step(number):
            before = tf.raw_ops.ReadVariableOp(resource=again, dtype=tf.float32)
            with tf.control_dependencies([before]):
                added = tf.raw_ops.AssignAddVariableOp(resource=v.handle, value=before + 1.0)
            with tf.control_dependencies([added]):
                between = tf.raw_ops.ReadVariableOp(resource=again, dtype=tf.float32)
                moved = tf.raw_ops.AssignVariableOp(resource=other.handle, value=between * 2.0)
            with tf.control_dependencies([moved]):
                scattered = tf.raw_ops.ResourceScatterAdd(resource=again, indices=[0, 2, 0], updates=[1.0, 2.0, 3.0])
            with tf.control_dependencies([scattered]):
                after = tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=tf.float32)
                # The first value is still that of the beginning.
                last = tf.raw_ops.AssignAddVariableOp(resource=other.handle, value=before)
            with tf.control_dependencies([last]):
                return before, between, after, tf.raw_ops.ReadVariableOp(resource=other.handle, dtype=tf.float32)

        out.append((one_by_one(step, 4), contents([v, other])))
    return out


def shared():
    """Two functions that share variables, one of which has them in another order."""
    a, b, c = variable(1.0, where=0), variable([2.0, 3.0], where=0), variable(5.0, where=1)

    def first(number):
        a.assign_add(tf.reduce_sum(b) + tf.cast(number, tf.float32))
        return a + c

    def second(number):
        c.assign(c + tf.reduce_sum(b.read_value()))
        b.assign(b * 0.5 + a)
        return b + c

    out = []
    for _ in range(3):
        out += [one_by_one(first, 2), one_by_one(second, 2)]
    return out, contents([a, b, c])


def state_of_kernels():
    """Operations on a server whose kernels have state: each task that runs a function has its own."""
    scale = variable(2.0, where=0)

    def make(name):
        def step(number):
            with tf.device(PS[0]):
                noise = tf.raw_ops.RandomUniform(shape=[3], seed=7, seed2=11, dtype=tf.float32, name="noise")
                scaled = noise * scale
            scale.assign_add(1.0)
            return tf.identity(scaled)

        return step

    return [in_turns(make(name), 5) for name in ("a", "b")], contents([scale])


def borders():
    """What a function is given on a server, and what it leaves there."""
    v, w = variable([1.0, 2.0], where=0), variable([3.0], where=1)
    with tf.device(PS[1]):
        there = tf.constant([10.0, 20.0])

    def step(number, value):
        with tf.device(PS[0]):
            stays = v.read_value() + value
        v.assign_add(value)
        w.assign(tf.reduce_sum(stays)[tf.newaxis] + w)
        return stays, v.read_value(), w.read_value()

    return one_by_one(step, 3, there), contents([v, w])


def nested():
    """A function that is not inlined shares its caller's step, and captures handles of its own."""
    a, b = variable(1.0, where=0), variable(100.0, where=0)

    def inner(x):
        b.assign_add(x)
        return b.read_value()

    try:
        inner = tf.function(inner, experimental_attributes={"_noinline": True})
    except ValueError:  # TensorFlow 2.12 has no such attribute, and inlines it
        inner = tf.function(inner)

    def step(number):
        a.assign_add(1.0)
        total = tf.constant(0.0)
        for _ in tf.range(3):
            total += inner(a + total)
        a.assign_add(total)
        return total, a.read_value()

    return one_by_one(step, 3), contents([a, b])


def deleted():
    """Variables are deleted while steps of other functions run, and new ones take their place."""
    kept = variable(tf.zeros((4,), tf.int64), where=1)
    out = []
    for number in range(6):
        passing = [variable(tf.fill((8,), tf.cast(number * 10 + i, tf.int64)), where=i % 2) for i in range(4)]

        def step(_):
            kept.assign_add(tf.add_n([v[:4] for v in passing]))
            return tf.add_n([tf.reduce_sum(v) for v in passing])

        function = tf.function(step)
        results = [state["coordinator"].schedule(function, args=(tf.constant(i, tf.int64),)) for i in range(8)]
        del passing, step, function
        gc.collect()
        state["coordinator"].join()
        out.append([digest(result.fetch()) for result in results])
    return out, contents([kept])


SCENARIOS = (plain, aliases, shared, state_of_kernels, borders, nested, deleted)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("way", STARS)
def test_star_functions(chiefs, way, scenario):
    cluster = chiefs.cluster(way, PAIR)
    before = star_calls(cluster)
    chiefs.check(way, chief_call, scenario, shape=PAIR)
    assert star_calls(cluster) > before


# What the servers are asked for. --------------------------------------------------------------------------------------


def prepare():
    v, w = [variable(tf.fill((8,), float(i)), where=0) for i in range(30)], [variable(tf.fill((8,), float(i)), where=1) for i in range(30)]

    @tf.function
    def step():
        loss = tf.add_n([tf.reduce_sum(one) for one in v + w])
        for one in v + w:
            one.assign_sub(0.01 * one + 1e-9 * loss)

    state["step"] = step


    @tf.function
    def loop():
        for _ in tf.range(LOOP):
            step()

    state["loop"] = loop


def train(function, times):
    for _ in range(times):
        state["coordinator"].schedule(state[function])
    state["coordinator"].join()


@pytest.mark.quick(lambda of: of["way"] == "star_server", reason="a pull and a push are the least that lite could make; test_star_functions runs both")
@pytest.mark.parametrize("function, steps", [("step", 1), ("loop", LOOP)])
@pytest.mark.parametrize("way", STARS)
def test_a_step_is_a_pull_and_a_push(chiefs, way, function, steps):
    """A server is not asked for anything else: neither to run its part of the function nor for a tensor."""
    cluster = chiefs.cluster(way, PAIR)
    chief = cluster["chief", 0]
    chief.call(prepare)
    chief.call(train, function, 12, timeout=60)
    before = [counters(cluster["ps", index]) for index in range(2)]
    times = 20
    chief.call(train, function, times, timeout=60)
    calls = 2 * steps * times
    for index in range(2):
        now = counters(cluster["ps", index])
        difference = {name: now[name] - before[index][name] for name in ("star_calls", "calls_received", "tensor_requests_received")}
        assert difference == {"star_calls": calls, "calls_received": calls, "tensor_requests_received": 0}


@pytest.mark.parametrize("server, chief_config, calls", [(None, b"", True), (OPT_OUT, b"", False), (None, OPT_OUT, False)])
def test_opt_out(chiefs, server, chief_config, calls):
    """starwire.config(star=False), for a server or for the functions of a chief."""
    assert_is_opt_out()
    with chiefs.fresh("star_server", (("ps", 2), ("worker", 1)), chief_config, config=server) as cluster:
        chief_call(cluster, prepare)
        chief_call(cluster, train, "step", 4)
        assert (star_calls(cluster) > 0) == calls


def assert_is_opt_out():
    made = tf.compat.v1.ConfigProto(device_count={"STARWIRE_STAR": 0}).SerializeToString()
    assert made == OPT_OUT, made


# Errors. --------------------------------------------------------------------------------------------------------------


def fail_in_a_call():
    words = variable(["not a number"], where=0)
    total = variable(0.0, where=0)

    def step(number):
        with tf.device(PS[0]):
            total.assign_add(tf.cast(number, tf.float32) + tf.reduce_sum(tf.strings.to_number(words.read_value())))

    state["coordinator"].schedule(tf.function(step), args=(tf.constant(0, tf.int64),))
    try:
        state["coordinator"].join()
    except tf.errors.OpError as error:
        return type(error).__name__, error.message
    return None


def test_errors_name_the_server_and_the_call(chiefs):
    name, message = chief_call(chiefs.cluster("star_server", PAIR), fail_in_a_call)
    assert name == "InvalidArgumentError" and "not a number" in message
    assert re.search(r"a call to /job:ps/replica:0/task:0\)", message), message
    assert "GRPC error information from remote target /job:ps/replica:0/task:0" in message, message


def wait_in_a_call():
    """A function whose part on ps 0 waits for a value of ps 1 that does not come, before the first call can be made."""
    with state["strategy"].scope(), tf.device(PS[1]):
        queue, come = state["queue"], state["come"] = [tf.queue.FIFOQueue(10, tf.float32, ()) for _ in range(2)]
    v = state["v"] = variable(1.0, where=0)

    @tf.function
    def take():
        with tf.device(PS[1]), tf.control_dependencies([come.enqueue(1.0)]):
            value = queue.dequeue()
        v.assign_add(value)

    state["take"] = take
    state["coordinator"].schedule(take)
    wait_until(lambda: int(come.size()), 60, "it waits")


def join():
    state["coordinator"].join()


def fail_another():
    @tf.function
    def bad():
        tf.debugging.assert_equal(tf.random.uniform((), 0, 1, tf.int32), 2, "told so")

    state["coordinator"].schedule(bad)
    try:
        state["coordinator"].join()
    except tf.errors.InvalidArgumentError as error:
        return error.message
    return None


def take_after_all():
    state["queue"].enqueue(tf.constant(41.0))
    state["coordinator"].schedule(state["take"])
    state["coordinator"].join()
    return float(state["v"].numpy())


def test_cancelled_functions_end(chiefs, within):
    cluster = chiefs.cluster("star_server", PAIR)
    chief = cluster["chief", 0]
    chief.call(wait_in_a_call)
    with within(30):
        assert "told so" in chief.call(fail_another)
    # As in test_eager_calls.py: nothing orders the worker's giving up and the chief's element.
    servers = [task for (job, _), task in cluster.tasks.items() if job == "ps"]
    wait_until(lambda: not any(counters(server)["requests_unanswered"] for server in servers), 60, "the servers give up")
    assert chief.call(take_after_all) == 42.0


def train_until(stop):
    """Trains in rounds until the file `stop` exists; another file has a byte for each round. Returns the steps scheduled, and the least that a variable has seen."""
    variables = [variable(tf.zeros((100,), tf.int64), where=i % 2) for i in range(10)]

    @tf.function
    def step():
        for v in variables:
            v.assign_add(tf.ones((100,), tf.int64))
        return variables[0].read_value()

    @tf.function
    def least():
        return tf.reduce_min([tf.reduce_min(v) for v in variables])

    scheduled = 0
    with open(stop + ".rounds", "ab", buffering=0) as rounds:
        while not os.path.exists(stop):
            for _ in range(20):
                state["coordinator"].schedule(step)
            state["coordinator"].join()
            scheduled += 20
            rounds.write(b".")
    result = state["coordinator"].schedule(least)
    state["coordinator"].join()
    return scheduled, int(result.fetch())


def test_tasks_are_killed(chiefs, tmp_path, within):
    """A worker that comes back loses no step; a server that dies, or has already come back, ends the training with TensorFlow's error."""
    with chiefs.fresh("star_server", PAIR) as cluster:
        chief, stop = cluster["chief", 0], str(tmp_path / "stop")
        chief.begin(train_until, stop)
        goes_on(chief, stop)
        cluster["worker", 1].kill()
        goes_on(chief, stop)
        cluster.start("worker", 1)
        goes_on(chief, stop)
        open(stop, "w").close()
        scheduled, counted = chief.result(120)
        assert counted >= scheduled > 0
        assert star_calls(cluster) > 0
        chief.begin(train_until, str(tmp_path / "lost"))
        goes_on(chief, tmp_path / "lost")
        cluster["ps", 1].kill()
        cluster.start("ps", 1)
        with within(60), pytest.raises(RemoteError) as caught:
            chief.result(60)
        assert caught.value.type in ("UnavailableError", "AbortedError", "PSUnavailableError", "InvalidArgumentError"), caught.value
        assert "GRPC error information from remote target /job:ps/replica:0/task:1" in str(caught.value), caught.value
