"""star_server and star_server_lite: the same bits as stock gRPC, in star calls.

Tests of other files run over both protocols as well (the marker `star`); those here bound the number of calls per step, and cover what only calls can get
wrong. The servers' metrics and the executed partitions show that calls were made.
"""

import os
import re
import time

import pytest

import steps
from cluster import RemoteError, is_tensorflow_1, one, state, tf, worker_call
from fuse_graphs import traffic
from graphs import PS0, WORKER0, freeze, session, session_config, thaw
from metrics import counters, star_calls
from star_graphs import CASES, back_and_forth
from tensors import digest
from training_job import batch, regression, setter
from waiting import wait_for, wait_until

PROTOCOLS = ("star_server", "star_server_lite")

pytestmark = pytest.mark.ours


@pytest.fixture(scope="module", params=PROTOCOLS)
def protocol(request):
    return request.param


# Calls per step; unlisted cases make some.
CALLS = {"dense_model": 5, "ctr_model": 7, "optimizer_sgd": 7}
# Cases that send some tensors outside of calls. conditional_update_v1: a reference variable read in a branch after an update must show the
# update. large_branch_v1: a table is too large to be sent to the worker that decides.
SENDS = {"conditional_update_v1", "large_branch_v1", "functions", "loop_v1", "loop_v2", "late_company", "fed_and_fetched", "types", "exotic_types", "replicas"}
# Minimum number of calls for cases whose calls are split.
PARTS = {"large_model_sgd": 15, "large_model_adam": 15}


def freeze_case(target, name):
    return freeze(CASES, name, container=name.replace("_", ""))


def run_case(target, frozen):
    """Returns digests of a frozen case's results per step and, for the last step, (calls, tensors received individually from another task)."""
    with thaw(frozen) as (initializers, fetches, feeds), session(target) as sess:
        sess.run(initializers)
        values = []
        for feed in feeds:
            metadata = one().RunMetadata()
            options = one().RunOptions(output_partition_graphs=True)
            values.append([digest(v) for v in sess.run(tf.nest.flatten(fetches), feed, options=options, run_metadata=metadata)])
        nodes = [node for graph in metadata.partition_graphs for node in graph.node]
        return values, (sum(node.op == "StarwireCall" for node in nodes), traffic(metadata.partition_graphs)[0])


# test_training.py trains with these optimizers; a model with more variables is split into parts.
ELSEWHERE = ("optimizer_adagrad", "optimizer_momentum", "large_model_sgd")
# Where a graph has updates, star_server_lite may delay them and repeat reads.
UPDATING = ("dense_model", "optimizer_adam", "read_after_update", "conditional_update_v2", "back_and_forth", "training_loop_10_v2")


@pytest.mark.quick(
    lambda of: of["name"] not in ELSEWHERE if of["protocol"] == "star_server" else of["name"] in UPDATING,
    reason="lite delays any update alike, and without updates only makes fewer calls; the planner's model and the graph fuzzer compare both in every run",
)
@pytest.mark.parametrize("name", CASES)
def test_same_bits_in_calls(compared, cluster, name):
    if is_tensorflow_1() and name.startswith("training_loop") and name.endswith("_v2"):
        pytest.skip("TensorFlow 1.15 refuses such loops over several tasks, over gRPC too")
    frozen = compared.stock(worker_call, freeze_case, name)
    want, (none, received) = compared.stock(worker_call, run_case, frozen)
    assert none == 0 and received > 0
    values, (calls, left) = worker_call(cluster, run_case, frozen)
    assert values == want
    assert PARTS.get(name, 0) <= calls <= CALLS.get(name, 40)
    if name in ("loop_v1", "loop_v2"):
        assert left <= received
    else:
        assert calls > 0 and left < received
    if name not in SENDS:
        assert left == 0, "a tensor travelled by itself"


# Number of calls. -----------------------------------------------------------------------------------------------------


def plain_steps(target, frozen, count):
    """Runs steps of a model that pulls and pushes each of its variables."""
    with thaw(frozen) as (initializers, fetches, _), session(target) as sess:
        sess.run(initializers)
        for _ in range(count):
            sess.run(fetches)


def test_a_step_takes_two_or_three_calls_per_server(compared, fresh_cluster, protocol):
    cluster = fresh_cluster((("ps", 2), ("worker", 2)), protocol=protocol)
    frozen = compared.stock(worker_call, freeze_case, "dense_model")
    worker_call(cluster, plain_steps, frozen, 1)
    before = [counters(cluster["ps", i]) for i in range(2)]
    worker_call(cluster, plain_steps, frozen, 21)
    after = [counters(cluster["ps", i]) for i in range(2)]
    for old, new in zip(before, after):
        # Includes creating, initialising and closing two sessions.
        assert 2 * 21 <= new["calls_received"] - old["calls_received"] <= 3 * 21 + 16
        assert new["tensor_requests_received"] - old["tensor_requests_received"] <= 4


def train_and_stay(target, task):
    """Trains a model with dense and partitioned variables; the session stays open."""
    with tf.Graph().as_default() as graph:
        with one().device(setter(task)):
            ids, x, loss = regression(False)
            train_op = one().train.AdamOptimizer(0.01).minimize(loss, global_step=one().train.get_or_create_global_step())
        session = state[f"session of {task}"] = one().Session(target, graph=graph, config=session_config())
        session.run(one().global_variables_initializer())
        for step in range(3):
            i, xs = batch(step)
            session.run([train_op, loss], {ids: i, x: xs})


def test_workers_with_the_same_model_share_their_plans(fresh_cluster, protocol):
    cluster = fresh_cluster((("ps", 2), ("worker", 2)), protocol=protocol)
    seen = []
    for task in range(2):
        cluster["worker", task].call(train_and_stay, cluster.target("worker", task), task)
        seen.append([{name: counters(cluster["ps", i])[name] for name in ("star_plans", "star_registrations")} for i in range(2)])
    assert all(counts["star_plans"] >= 3 for counts in seen[0])
    assert seen[1] == seen[0], "the second worker brought plans of its own"


# Failures. ------------------------------------------------------------------------------------------------------------


def failing_kernel(target):
    with tf.Graph().as_default():
        with tf.device(PS0):
            x = one().placeholder(tf.float32, (2,))
            checked = one().debugging.check_numerics(x * 2.0, "the number is bad", name="inspector")
        with tf.device(WORKER0):
            out = checked + 1.0
        with one().Session(target) as sess:
            assert sess.run(out, {x: [1.0, 2.0]}).tolist() == [3.0, 5.0]
            try:
                sess.run(out, {x: [1.0, float("nan")]})
            except tf.errors.InvalidArgumentError as error:
                message = error.message
            assert sess.run(out, {x: [2.0, 2.0]}).tolist() == [5.0, 5.0]
            return message


def test_an_error_of_a_kernel_names_the_node_and_the_server(cluster):
    message = worker_call(cluster, failing_kernel)
    assert "the number is bad" in message and "inspector" in message and "/job:ps/replica:0/task:0" in message, message


def abandoned(target, started):
    """Runs steps without end that keep values on the ps between two calls."""
    with tf.Graph().as_default():
        fetches, _ = back_and_forth()
        with session(target) as sess:
            sess.run(one().global_variables_initializer())
            sess.run(fetches)
            open(started, "w").close()
            while True:
                sess.run(fetches)


def test_a_dead_worker_leaves_nothing_on_the_server(fresh_cluster, protocol, tmp_path):
    cluster = fresh_cluster((("ps", 2), ("worker", 2)), protocol=protocol)
    started = tmp_path / "started"
    cluster["worker", 0].begin(abandoned, cluster.target("worker", 0), str(started))
    wait_for(started)
    before = star_calls(cluster)
    wait_until(lambda: star_calls(cluster) > before, 60, "calls of its steps")
    cluster["worker", 0].kill()
    cluster.start("worker", 0)  # creating a session needs all tasks
    assert cluster["worker", 1].call(steps.run_steps, cluster.target("worker", 1), 5, 1) == 5
    wait_until(lambda: not any(counters(cluster["ps", i])["requests_unanswered"] for i in range(2)), 60, "the end of the calls of a dead worker")


def failing_steps(target, count):
    """Steps whose first call keeps a value for the second, and that fail on the worker in between. The session stays open. Returns the kinds of errors."""
    with tf.Graph().as_default():
        with tf.device(PS0):
            v = one().get_variable("failing", initializer=[1.0, 2.0], use_resource=True)
            kept = v * 2.0
        with tf.device(WORKER0):
            feed = one().placeholder(tf.float32, ())
            checked = one().debugging.check_numerics(tf.reduce_sum(kept) * feed, "no number")
        with tf.device(PS0):
            update = one().assign_add(v, kept * checked).op
        sess = session(target)
        sess.run(v.initializer)
        sess.run(update, {feed: 0.0})
        kinds = set()
        for _ in range(count):
            try:
                sess.run(update, {feed: float("nan")})
            except tf.errors.OpError as error:
                kinds.add(type(error).__name__)
        state["failing"] = sess
        return sorted(kinds)


def test_steps_that_fail_leave_nothing_on_the_server(fresh_cluster, protocol):
    cluster = fresh_cluster((("ps", 1), ("worker", 1)), protocol=protocol)
    server = cluster["ps", 0]
    assert worker_call(cluster, failing_steps, 5) == ["InvalidArgumentError"]
    wait_until(lambda: not counters(server)["star_slots"], 60, "the end of the values of failed steps")
    assert counters(server)["star_calls"] >= 2 + 5


def overtaken_call(target):
    """Three calls share a value that stays on the server. The last of them lies behind a Merge whose other branch is taken, so it may run first."""
    with tf.Graph().as_default():
        go = one().placeholder(tf.bool, ())
        with tf.device(PS0):
            v = one().get_variable("v", initializer=[1.0, 2.0], use_resource=True)
            kept = v * 2.0
        with tf.device(WORKER0):
            slow = one().py_func(lambda x: time.sleep(0.5) or x, [kept + 1.0], tf.float32)
            slow.set_shape((2,))
        with tf.device(PS0):
            late = kept + slow
        with tf.device(WORKER0):
            not_taken, _ = tf.raw_ops.Switch(data=late + 1.0, pred=go)
            _, taken = tf.raw_ops.Switch(data=tf.constant([3.0, 4.0]), pred=go)
            merged = tf.raw_ops.Merge(inputs=[not_taken, taken])[0] * 1.0
        with tf.device(PS0):
            early = kept * merged
        with tf.device(WORKER0):
            out = [late * 1.0, early * 1.0]
        with one().Session(target) as sess:
            sess.run(v.initializer)
            return [[value.tolist() for value in sess.run(out, {go: True})] for _ in range(2)]


def test_a_call_behind_a_merge_does_not_end_the_step_for_others(cluster):
    assert worker_call(cluster, overtaken_call) == [[[5.0, 9.0], [6.0, 16.0]]] * 2


def close_full_queue(target):
    """A queue that is closed while somebody puts an element in is closed when there is room, which a later part of the same step makes."""
    import threading

    with tf.Graph().as_default():
        with one().device(PS0):
            queue = tf.queue.FIFOQueue(2, tf.float32, (), shared_name="closed_while_full")
            variable = one().get_variable("beside", initializer=0.0)
            fill, again = queue.enqueue(1.0), queue.enqueue_many([[2.0, 3.0]])  # puts one element in, and waits with the other
            size, close, update = queue.size(), queue.close(), variable.assign_add(1.0)
            with tf.control_dependencies([update]):
                taken = queue.dequeue()
        with one().Session(target, config=session_config()) as sess:
            sess.run(variable.initializer)
            sess.run(fill)
            waiting = threading.Thread(target=sess.run, args=(again,))
            waiting.start()
            wait_until(lambda: sess.run(size) == 2, 60, "somebody puts an element in")
            result = sess.run([taken, close], options=one().RunOptions(timeout_in_ms=20000))[0]
            waiting.join()
            return float(result), int(sess.run(size))


def test_a_close_that_waits_holds_nothing_back(cluster):
    assert worker_call(cluster, close_full_queue) == (1.0, 2)


def own_transfer(target):
    """A program sends a value from a server to the worker itself, beside a pull and a push."""
    with tf.Graph().as_default():
        with one().Session(target) as sess:
            incarnations = {device.name: device.incarnation for device in sess.list_devices()}
        names = {key: place.replace("/task:", "/replica:0/task:") for key, place in (("send_device", PS0), ("recv_device", WORKER0))}
        number = incarnations[names["send_device"]]
        names["send_device_incarnation"] = number if number < 1 << 63 else number - (1 << 64)
        with tf.device(PS0):
            v = one().get_variable("v", initializer=[1.0, 2.0], use_resource=True)
            sent = tf.raw_ops.Send(tensor=v * 2.0, tensor_name="own", **names)
        with tf.device(WORKER0):
            got = tf.raw_ops.Recv(tensor_type=tf.float32, tensor_name="own", **names)
            got.set_shape((2,))
            pulled = v * 3.0
        with tf.device(PS0):
            pushed = tf.raw_ops.AssignAddVariableOp(resource=v.handle, value=pulled)
        with one().Session(target) as sess:
            sess.run(v.initializer)
            return [value.tolist() for value in sess.run([got, pulled, sent, pushed])[:2]]


def test_a_programs_own_send_finds_the_rendezvous_of_the_step(cluster):
    assert worker_call(cluster, own_transfer) == [[2.0, 4.0], [3.0, 6.0]]


def named_as_calls(target):
    """An earlier graph of the session has variables on the worker with the names that calls could have."""
    with tf.Graph().as_default():
        with tf.device(WORKER0):
            own = [one().get_variable(f"starwire_call_ps_0_{number}", initializer=1, use_resource=False) for number in range(8)]
        with tf.device(PS0):
            v = one().get_variable("v", initializer=[1.0, 2.0])
        with tf.device(WORKER0):
            gradient = v * 2.0
        with tf.device(PS0):
            update = one().assign_add(v, gradient)
        with one().Session(target) as sess:
            sess.run([variable.initializer for variable in own])
            sess.run(v.initializer)
            return sess.run(update).tolist(), sum(sess.run(own))


def test_calls_share_no_name_with_variables(fresh_cluster, protocol):
    cluster = fresh_cluster((("ps", 1), ("worker", 1)), protocol=protocol)
    assert worker_call(cluster, named_as_calls) == ([3.0, 6.0], 8)


# Roles. ---------------------------------------------------------------------------------------------------------------


def pull_and_push(target, server, worker):
    with tf.Graph().as_default():
        with tf.device(server):
            v = one().get_variable("v", initializer=[1.0, 2.0])
        with tf.device(worker):
            gradient = v * 2.0
        with tf.device(server):
            update = one().assign_add(v, gradient)
        with one().Session(target) as sess:
            sess.run(v.initializer)
            metadata = one().RunMetadata()
            value = sess.run(update, options=one().RunOptions(output_partition_graphs=True), run_metadata=metadata).tolist()
            return value, sum(node.op == "StarwireCall" for graph in metadata.partition_graphs for node in graph.node)


@pytest.mark.parametrize("jobs, calls", [("", True), ("store", True), ("other", False)])
def test_jobs_of_any_name(fresh_cluster, protocol, jobs, calls):
    environment = {"STARWIRE_PS_JOBS": jobs} if jobs else {}
    cluster = fresh_cluster((("store", 1), ("trainer", 1)), protocol=protocol, environment=environment)
    value, made = cluster["trainer", 0].call(pull_and_push, cluster.target("trainer", 0), "/job:store/task:0", "/job:trainer/task:0")
    assert value == [3.0, 6.0]
    assert (made > 0) == calls


def test_the_log_reports_the_fate_of_a_graph(compared, cluster, protocol):
    start = cluster["worker", 0].log_size()
    for name in ("loop_v1", "dense_model"):
        worker_call(cluster, run_case, compared.stock(worker_call, freeze_case, name))
    log = cluster["worker", 0].full_log()[start:]
    assert re.search(rf"starwire: {protocol}: \d+ calls in \d+ rounds run \d+ of \d+ nodes", log), log
    assert re.search(r"left to send and receive: \d+ \(.*in a loop: \d+", log), log


def trace_a_push(target):
    """A step without fetches from the ps."""
    options = one().RunOptions(trace_level=one().RunOptions.FULL_TRACE)
    with tf.Graph().as_default():
        with tf.device(PS0):
            v = one().get_variable("traced", (3000,), initializer=one().zeros_initializer(), use_resource=True)
        with tf.device(WORKER0):
            fed = one().placeholder(tf.float32, (3000,))
            grown = fed + 1.0
        with tf.device(PS0):
            push = one().assign_add(v, grown).op
        with one().Session(target) as sess:
            sess.run(v.initializer)
            kernels = []
            for _ in range(5):  # the first runs of a plan use TensorFlow's pool, later ones the reactor
                metadata = one().RunMetadata()
                sess.run(push, {fed: [1.0] * 3000}, options=options, run_metadata=metadata)
                kernels.append([node.node_name for device in metadata.step_stats.dev_stats if "/job:ps" in device.device for node in device.node_stats])
            return float(sess.run(v)[0]), kernels


def test_a_trace_shows_the_kernels_of_a_push(cluster):
    value, kernels = worker_call(cluster, trace_a_push)
    assert value == 10.0
    assert all(any("AssignAdd" in name for name in step) for step in kernels), kernels


# Visibility. ----------------------------------------------------------------------------------------------------------


def look_inside(target, star, watch):
    """Runs one step with a star call; returns the names of all nodes in its partition graphs, and the number of calls among them."""
    import starwire

    with tf.Graph().as_default():
        with tf.device(PS0):
            variable = one().get_variable("looked_at", initializer=tf.zeros([4]), use_resource=True)
            pulled = variable.read_value()
        with tf.device(WORKER0):
            gradient = pulled + 1.0
        with tf.device(PS0):
            update = one().assign_add(variable, gradient)
        config = starwire.config(isolated(), star=star)
        with one().Session(target, config=config) as session:
            session.run(one().global_variables_initializer())
            options = one().RunOptions(output_partition_graphs=True)
            if watch:
                options.debug_options.debug_tensor_watch_opts.add(node_name=update.op.name, output_slot=0, debug_ops=["DebugNanCount"], debug_urls=[f"file://{os.getcwd()}/watched"])
            metadata = one().RunMetadata()
            session.run(update, options=options, run_metadata=metadata)
            nodes = [node for graph in metadata.partition_graphs for node in graph.node]
            return {node.name for node in nodes}, sum(node.op == "StarwireCall" for node in nodes), update.op.name


def isolated():
    return one().ConfigProto(isolate_session_state=True, graph_options=one().GraphOptions(optimizer_options=one().OptimizerOptions(opt_level=-1)))


def test_partition_graphs_show_what_calls_run(cluster):
    names, calls, update = worker_call(cluster, look_inside, None, False)
    assert calls >= 2 and any(name.startswith(update) for name in names)


def test_watch_on_what_a_call_runs_is_an_error(cluster):
    with pytest.raises(RemoteError, match=r"a debugger watches .*starwire\.config\(star=False\)") as raised:
        worker_call(cluster, look_inside, None, True)
    assert raised.value.type == "UnimplementedError"


def test_session_without_calls(cluster):
    names, calls, update = worker_call(cluster, look_inside, False, False)
    assert calls == 0 and any(name.startswith(update) for name in names)
