"""Star protocols: a read goes before an update of the same variable that has to wait for more, although no edge orders them, as over stock grpc."""

import pytest

from cluster import one, tf, worker_call
from graphs import control_flow_of

pytestmark = pytest.mark.ours

RUNS = 20


# In the worker process. -----------------------------------------------------------------------------------------------


def on_ps():
    return one().device("/job:ps/task:0")


def here():
    return one().device("/job:worker/task:0")


def variable(name, value, resource):
    with on_ps():
        return one().get_variable(name, initializer=tf.constant(value), use_resource=resource)


def read(name, of):
    with on_ps():
        return of.read_value() if hasattr(of, "handle") else tf.identity(of.op.outputs[0], name=name)


def used(value, size=0.0):
    """What the worker makes of it. With `size`, all that is fetched needs the feed, so that nothing has to be there without it."""
    with here():
        return value + 0.0 * size


def fed():
    """A value that the worker computes, and what it is computed from."""
    with here():
        feed = one().placeholder(tf.float32, [None])
        return tf.reduce_sum(feed) * 1.0, feed


def counter(resource, first, second):
    """The names of update and read, in either order of the alphabet."""
    size, feed = fed()
    count = variable("count", 0.0, resource)
    with on_ps(), one().name_scope(second):
        before = read("seen", count)
    with on_ps(), one().name_scope(first):
        return count, used(before, size), count.assign_add(size).op, feed


def moving_mean(resource, first, second):
    """The names of update and read, in either order of the alphabet."""
    size, feed = fed()
    mean = variable("mean", 0.0, resource)
    with on_ps(), one().name_scope(first):
        update = one().assign_sub(mean, (read("now", mean) - size) * 0.1).op
    with on_ps(), one().name_scope(second):
        seen = read("seen", mean)
    return mean, used(seen, size), update, feed


def client_gradient(resource):
    """What the client feeds reaches the update only: the read may not wait for it."""
    weight = variable("weight", 0.0, resource)
    with here():
        feed = one().placeholder(tf.float32, [1])
        gradient = one().reshape(feed, []) * 1.0
    loss = used(read("seen", weight))
    with on_ps():
        return weight, loss, weight.assign_add(gradient).op, feed


def lookup(resource):
    size, feed = fed()
    table = variable("table_of_rows", [[0.0], [0.0]], resource)
    with on_ps():
        rows = tf.gather(table, [0])
        update = table.assign_add(tf.fill([2, 1], size)).op
    return table, tf.reduce_sum(used(rows, size)), update, feed


SCENARIOS = {
    "counter_update_first": lambda resource: counter(resource, "a_update", "z_read"),
    "counter_read_first": lambda resource: counter(resource, "z_update", "a_read"),
    "moving_mean_update_first": lambda resource: moving_mean(resource, "a_update", "z_read"),
    "moving_mean_read_first": lambda resource: moving_mean(resource, "z_update", "a_read"),
    "client_gradient": client_gradient,
    "lookup": lookup,
}


def saw_own_update(target, name, resource, runs=RUNS):
    """Returns the number of steps in which the read saw the step's own update."""
    with tf.Graph().as_default():
        of, seen, update, feed = SCENARIOS[name](resource)
        total = of if of.shape.rank == 0 else of[0, 0]
        with one().Session(target) as sess:
            sess.run(one().global_variables_initializer())
            wrong = 0
            for _ in range(runs):
                before = sess.run(total)
                value, _ = sess.run([seen, update], {feed: [1.0]})
                wrong += int(value != before)
            assert sess.run(total) != 0.0
            return wrong


def sink_names(target, elements, names, runs=RUNS):
    """ps: r = identity(v), m = 2 r; worker: g and h of r; ps: v += g, w += m + h. Returns the steps in which m was made of the new v."""
    with tf.Graph().as_default():
        with on_ps():
            v = one().get_variable(f"v_{elements}", initializer=tf.ones([elements]), use_resource=False)
            w = one().get_variable(f"w_{elements}", initializer=tf.zeros([elements]), use_resource=False)
            r = tf.identity(v.op.outputs[0], name="r")
            with one().name_scope(names[0]):
                m = r * 2.0
        with here():
            g, h = r * 100.0, r * 0.0
        with on_ps():
            with one().name_scope(names[1]):
                first = one().assign_add(v, g).op
            second = one().assign_add(w, m + h).op
        with one().Session(target) as sess:
            wrong = 0
            for _ in range(runs):
                sess.run(one().global_variables_initializer())
                sess.run([first, second])
                wrong += int(sess.run(w[0]) != 2.0)
            return wrong


def taken_twice(target, runs=3 * RUNS):
    """Two workers take the memory of a variable, whose update waits for one of them. Returns the steps in which the other one got the new value."""
    with tf.Graph().as_default():
        with on_ps():
            v = one().get_variable("v_twice", initializer=tf.ones([3]), use_resource=False)
            r = tf.identity(v.op.outputs[0])
        with one().device("/job:worker/task:0"):
            g = r * 100.0
        with one().device("/job:worker/task:1"):
            h = r * 1.0
        with on_ps():
            update = one().assign_add(v, g).op
        with one().Session(target) as sess:
            wrong = 0
            for _ in range(runs):
                sess.run(v.initializer)
                wrong += int(sess.run([h, update])[0][0] != 1.0)
            return wrong


def conditions_on_a_flag(target, on_worker, resource, runs=3):
    """A condition that does not hold reads a variable; then it holds, and the same variable is updated. Returns the variable after each step."""
    with control_flow_of("v1"), tf.Graph().as_default():
        with here() if on_worker else on_ps():
            flag = one().get_variable("flag", initializer=False, use_resource=False)
            now = tf.identity(flag.op.outputs[0])
        x = variable("x", 1.0, resource)
        with on_ps():
            first = one().cond(now, lambda: read("first", x) * 2.0, lambda: tf.constant(0.0))
        with tf.control_dependencies([first]):
            changed = flag.assign(True)
        with tf.control_dependencies([changed]):
            with here() if on_worker else on_ps():
                later = tf.identity(flag.op.outputs[0])
            with on_ps():
                second = one().cond(later, lambda: tf.identity(one().assign_add(x, 1.0)), lambda: tf.constant(0.0))
        with one().Session(target) as sess:
            seen = []
            for _ in range(runs):
                sess.run([flag.initializer, x.initializer])
                sess.run(second.op)
                seen.append(float(sess.run(x)))
            return seen


def reference_after_an_update(target, runs=RUNS):
    """The worker takes a reference together with what an update has made: it is looked at when that is there."""
    with tf.Graph().as_default():
        with on_ps():
            v = one().get_variable("v_after", initializer=1.0, use_resource=False)
            updated = tf.identity(one().assign_add(v, 10.0))
        with here():
            product = tf.raw_ops.Mul(x=v._ref(), y=tf.square(updated))
        with one().Session(target) as sess:
            seen = set()
            for _ in range(runs):
                sess.run(v.initializer)
                seen.add(float(sess.run(product)))
            return seen


def order_on_the_worker(target):
    """A variable of the worker's is read, and updated by what a server sends. Returns what the update waits for."""
    with tf.Graph().as_default():
        with here():
            v = one().get_variable("v_here", initializer=[1.0, 2.0], use_resource=True)
            read_here = tf.negative(v.read_value(), name="read_here")
        with on_ps():
            sent = one().get_variable("sent", initializer=[1.0, 2.0], use_resource=True) * 2.0
        with here():
            update = tf.raw_ops.AssignAddVariableOp(resource=v.handle, value=sent * 2.0, name="update_here")
        with one().Session(target) as sess:
            sess.run(one().global_variables_initializer())
            metadata = one().RunMetadata()
            sess.run([read_here, update], options=one().RunOptions(output_partition_graphs=True), run_metadata=metadata)
            nodes = {node.name: node for graph in metadata.partition_graphs for node in graph.node}
            read = nodes["read_here"].input[0]
            return read in [name.lstrip("^") for name in nodes["update_here"].input if name.startswith("^")]


def pinned_sums(target):
    """Returns which of three sums may not take the buffer of an input: one that a call makes, one that TensorFlow makes
    on the server and sends, as calls cannot hand on its first input, and one of the worker's that a call takes."""
    with tf.Graph().as_default():
        with on_ps():
            v = one().get_variable("v", initializer=[1.0, 2.0], use_resource=True)
            first = v.read_value() * 2.0
        with here():
            parts = [one().placeholder(tf.float32, [2]) * 2.0 for _ in range(3)]
            later = first * 2.0
        with on_ps():
            called = tf.add_n(parts, name="called")
            left = tf.add_n([first, later, parts[0]], name="left")
        with here():
            runs = [called * 2.0, left * 2.0]
            taken = tf.add_n(parts, name="taken")
        with on_ps():
            runs.append(tf.raw_ops.AssignAddVariableOp(resource=v.handle, value=taken))
        feeds = {part.op.inputs[0]: [1.0, 2.0] for part in parts}
        pinned = []
        with one().Session(target) as sess:
            sess.run(v.initializer)
            for fetched in runs:
                metadata = one().RunMetadata()
                options = one().RunOptions(output_partition_graphs=True)
                sess.run(fetched, feeds, options=options, run_metadata=metadata)
                sums = [node for graph in metadata.partition_graphs for node in graph.node if node.op == "AddN"]
                assert len(sums) == 1
                if "_forward_input" in sums[0].attr:
                    pinned.append(sums[0].name)
        return pinned


# Tests. ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=("star_server", "star_server_lite", "grpc++"))
def protocol(request):
    return request.param


REASON = "reads and updates are ordered by one function for all protocols (cc/graph/orders.cc); calls bring the most of them together"
SOME = ("counter_update_first", "moving_mean_read_first", "lookup")


@pytest.mark.quick(lambda of: of["protocol"] == "star_server" or of["name"] in SOME and not of["resource"], reason=REASON)
@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_read_sees_its_steps_update(cluster, name, resource):
    # Over stock gRPC, a read is late now and then, above all on a busy machine.
    assert worker_call(cluster, saw_own_update, name, resource) == 0


OTHERS = {"star_server_lite": (2, 3000), "grpc++": (200_000,)}


@pytest.mark.quick(lambda of: of["protocol"] == "star_server" or of["names"][1] == "a_update" and of["elements"] in OTHERS[of["protocol"]], reason=REASON)
@pytest.mark.parametrize("names", [("a_product", "z_update"), ("z_product", "a_update")], ids=["product_first", "update_first"])
@pytest.mark.parametrize("elements", [2, 3000, 200_000])
def test_a_product_of_a_reference_variable_is_made_of_the_old_value(cluster, elements, names):
    # Over stock gRPC, the product is sometimes late.
    assert worker_call(cluster, sink_names, elements, names) == 0


def test_a_value_arrives_at_every_task_as_it_was(cluster):
    # Over stock gRPC, one of the tasks sometimes gets the new value.
    assert worker_call(cluster, taken_twice) == 0


@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
@pytest.mark.parametrize("on_worker", [True, False], ids=["flag_on_worker", "flag_on_server"])
def test_a_condition_that_changes_within_a_step_is_two(cluster, on_worker, resource):
    assert worker_call(cluster, conditions_on_a_flag, on_worker, resource) == [2.0] * 3


def test_a_reference_is_looked_at_when_the_other_inputs_are_there(stock, cluster):
    assert worker_call(stock, reference_after_an_update) == {11.0 * 121.0}
    assert worker_call(cluster, reference_after_an_update) == {11.0 * 121.0}


def test_variables_of_the_worker_are_read_first_as_well(cluster):
    assert worker_call(cluster, order_on_the_worker)


def test_sums_that_tensorflow_sends_are_its_own(cluster, protocol):
    assert worker_call(cluster, pinned_sums) == ([] if protocol == "grpc++" else ["called", "taken"])
