"""star_server_lite: a step's counter does not wait for the updates on other servers, where nothing can tell the difference but another worker."""

import re

import pytest

from cluster import one, tf, worker_call
from tensors import digest

pytestmark = pytest.mark.ours


# In the worker process. -----------------------------------------------------------------------------------------------


def on(ps):
    return one().device(f"/job:ps/task:{ps}")


def here():
    return one().device("/job:worker/task:0")


class Model:
    """Two variables on different servers, what is fed, and a counter on the first."""

    def __init__(self, use_resource, dtype="int64"):
        self.variables = []
        with one().variable_scope(f"model_{dtype}", use_resource=use_resource):
            for ps in range(2):
                with on(ps):
                    self.variables.append(one().get_variable(f"v{ps}", initializer=tf.constant([1.0, 2.0, 3.0])))
            with on(0):
                self.counter = one().get_variable("counter", initializer=tf.zeros([], dtype), trainable=False)
        with here():
            self.feed = one().placeholder(tf.float32, [3])
            self.loss = tf.add_n([tf.reduce_sum(tf.square(v - self.feed)) for v in self.variables])

    def train(self, rate=0.125, after=None):
        """As optimizers do it, after what `after` makes of the updates."""
        optimizer = one().train.GradientDescentOptimizer(rate)
        with here():
            gradients = optimizer.compute_gradients(self.loss, self.variables)
        updates = optimizer.apply_gradients(gradients)
        with tf.control_dependencies([updates] if after is None else after(updates)):
            return self.count()

    def count(self, add=1):
        return self.counter.assign_add(tf.constant(add, self.counter.dtype.base_dtype)).op


def usual(resource):
    model = Model(resource)
    return model, model.train()


def minimized(resource):
    model = Model(resource)
    with here():
        return model, one().train.AdagradOptimizer(0.1).minimize(model.loss, global_step=model.counter)


def with_a_rate(resource):
    """Only the other server's update depends on the counter."""
    model = Model(resource)
    with here():
        rate = 0.125 / (1.0 + tf.cast(model.counter, tf.float32))
        push = [tf.ones([3]) * rate + model.loss, tf.ones([3]) * 0.5 + model.loss]
    updates = []
    for ps, variable in enumerate(model.variables):
        with on(ps):
            updates.append(variable.assign_add(push[1 - ps]).op)
    with tf.control_dependencies(updates):
        return model, model.count()


def with_a_reader(resource):
    model = Model(resource)
    with tf.control_dependencies([model.train()]), on(1):
        seen = model.variables[1].read_value()
    with here():
        return model, seen * 2.0


def with_a_read_beside(resource):
    """It waits for the updates as the counter does: whether it sees the count may not depend on the protocol."""
    model = Model(resource)
    waiting = []
    step = model.train(after=lambda updates: waiting.append(updates) or [updates])
    with tf.control_dependencies(waiting), on(0):
        seen = model.counter.read_value()
    with here():
        return model, (step, seen * 2)


def with_a_read_behind(resource):
    """As the one beside it, but it takes the counter's handle, or its memory, from another operation."""
    model = Model(resource)
    waiting = []
    with on(0):
        passed = tf.identity(model.counter.handle if resource else model.counter)
    step = model.train(after=lambda updates: waiting.append(updates) or [updates])
    with tf.control_dependencies(waiting), on(0):
        seen = tf.raw_ops.ReadVariableOp(resource=passed, dtype=tf.int64) if resource else passed * 3
    with here():
        return model, (step, seen * 2)


def with_another_counter(resource):
    """The second counts on the other server, after the first."""
    model = Model(resource)
    with tf.control_dependencies([model.train()]):
        return model, model.variables[1].assign_add([1.0, 1.0, 1.0]).op


def in_a_branch(resource):
    model = Model(resource)
    return model, model.train(after=lambda updates: [one().cond(model.feed[0] > -100.0, lambda: tf.constant(1.0), lambda: tf.constant(2.0)), updates])


def alone_on_its_server(resource):
    model = Model(resource)
    optimizer = one().train.GradientDescentOptimizer(0.125)
    return model, optimizer.minimize(model.loss, model.counter, var_list=model.variables[1:])


def of_fractions(resource):
    model = Model(resource, dtype="float32")
    return model, model.train()


def of_what_is_fed(resource):
    model = Model(resource)
    optimizer = one().train.GradientDescentOptimizer(0.125)
    updates = optimizer.apply_gradients(optimizer.compute_gradients(model.loss, model.variables))
    with here():
        number = tf.cast(model.feed[0], tf.int64)
    with tf.control_dependencies([updates]):
        return model, model.counter.assign_add(number).op


def checked(resource):
    """It waits for a check of the worker as well."""
    model = Model(resource)
    with here():
        check = one().debugging.check_numerics(model.feed, "no number")
    return model, model.train(after=lambda updates: [updates, check])


def of_checked_gradients(resource):
    """Only the other server's update waits for the check."""
    model = Model(resource)
    optimizer = one().train.GradientDescentOptimizer(0.125)
    with here():
        (first, v0), (second, v1) = optimizer.compute_gradients(model.loss, model.variables)
        second = one().debugging.check_numerics(second * tf.where(model.feed[0] < 3.0, 1.0, float("nan")), "no number")
    with tf.control_dependencies([optimizer.apply_gradients([(first, v0), (second, v1)])]):
        return model, model.count()


def limited(resource, where):
    """The update of server 1 waits for what fails in the fourth step, on server `where`."""
    model = Model(resource)
    with one().variable_scope("limit", use_resource=resource), on(where):
        limit = one().get_variable("limit", initializer=0)
        allowed = limit.count_up_to(3)
    first, second = model.variables
    with here():
        push = model.loss * tf.ones([3])
    with on(0):
        updates = [first.assign_sub(push).op]
    with tf.control_dependencies([allowed]), on(1):
        updates.append(second.assign_sub(push).op)
    with tf.control_dependencies(updates):
        return model, model.count()


def limited_here(resource):
    return limited(resource, 0)


def limited_elsewhere(resource):
    return limited(resource, 1)


# By name: the graph, and whether its counter waits for its own server only, with resource and with reference variables.
GRAPHS = {
    "usual": (usual, 1, 1),
    "minimized": (minimized, 1, 1),
    "with_a_rate": (with_a_rate, 1, 0),
    "with_a_reader": (with_a_reader, 0, 0),
    "with_a_read_beside": (with_a_read_beside, 0, 0),
    "with_a_read_behind": (with_a_read_behind, 0, 0),
    "with_another_counter": (with_another_counter, 0, 0),
    "in_a_branch": (in_a_branch, 0, 0),
    "alone_on_its_server": (alone_on_its_server, 0, 0),
    "of_fractions": (of_fractions, 0, 0),
    "of_what_is_fed": (of_what_is_fed, 0, 0),
    "checked": (checked, 1, 1),
    "of_checked_gradients": (of_checked_gradients, 1, 1),
    "limited_here": (limited_here, 1, 1),
    "limited_elsewhere": (limited_elsewhere, 0, 0),
}


def trained(target, name, resource):
    with tf.Graph().as_default():
        model, step = GRAPHS[name][0](resource)
        with one().Session(target) as sess:
            sess.run(one().global_variables_initializer())
            seen = []
            for number in range(6):
                try:
                    value = sess.run([model.loss, step], {model.feed: [number, 2.0, 1.0 / (number + 1)]})[0]
                except (tf.errors.InvalidArgumentError, tf.errors.OutOfRangeError) as error:
                    # How far the others came is not determined.
                    seen.append((type(error).__name__, int(sess.run(model.counter))))
                    break
                seen.append((digest(value), [digest(one) for one in sess.run([*model.variables, model.counter])]))
            return seen


def failing_check(target):
    """Returns the counter after a step whose check on the worker failed."""
    with tf.Graph().as_default():
        model, step = checked(True)
        with one().Session(target) as sess:
            sess.run(one().global_variables_initializer())
            try:
                sess.run(step, {model.feed: [float("nan"), 0.0, 0.0]})
            except tf.errors.InvalidArgumentError:
                return int(sess.run(model.counter))
            return "no error"


# Tests. ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=("star_server", "star_server_lite"))
def protocol(request):
    return request.param


# With references as well: where they make a difference, and one graph of each kind.
REFERENCES = ("with_a_rate", "usual", "with_a_reader", "with_a_read_behind", "limited_here")


@pytest.mark.quick(
    lambda of: (of["resource"] or of["name"] in REFERENCES) if of["protocol"] == "star_server_lite" else of["name"] == "usual",
    reason="over star_server every counter waits; the kind of the variables makes a difference to with_a_rate only",
)
@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
@pytest.mark.parametrize("name", GRAPHS)
def test_counters(cluster, stock, protocol, name, resource):
    log = cluster["worker", 0].log_size()
    assert worker_call(cluster, trained, name, resource) == worker_call(stock, trained, name, resource)
    text = cluster["worker", 0].full_log()[log:]
    found = re.findall(r"in (\d+) rounds .*, (\d+) counters wait for no other server", text)
    expected = GRAPHS[name][1 if resource else 2] if protocol == "star_server_lite" else 0
    # Pulls, then pushes with the counter.
    assert found == [("2", "1")] * expected, text[-3000:]
    rounds = [int(count) for count in re.findall(r"calls in (\d+) rounds", text)]
    assert max(rounds) == 2 if expected else max(rounds) >= 3, text[-3000:]


def test_a_step_that_fails_on_the_worker_does_not_count(cluster):
    assert worker_call(cluster, failing_check) == 0
