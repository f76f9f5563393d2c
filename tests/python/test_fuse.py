"""tensor_fuse: the same graph with and without it, over stock gRPC and over starwire, yields the same bits in fewer messages.

Every case runs unfused over stock gRPC, which defines the expected result, and fused over both. The executed partitions must show the fusion; otherwise a
test could pass because nothing was fused. Values come from variables and constants: feeds of different fetches are never fused (the client of a partial
run may hold one back), so the graphs of graphs.py, which feed everything, would show little.
"""

import json
import re

import pytest

import test_differential as differential
import test_training as training
from cluster import RemoteError, load, start_server, tf
from graphs import HOPS, PS0, PS1, WORKER0, WORKER1
from test_differential import digest

ON, OFF = b"\xc8\x0c\x01", b"\xc8\x0c\x00"  # ConfigProto's field 201, as starwire.config() sets it
EAGER = {"STARWIRE_TENSOR_FUSE_LIMITS": "wait_us=60000000,message_us=1000000"}  # group everything that may be grouped
PROTOCOLS = ("grpc++", "grpc")


def one():
    return tf.compat.v1


@pytest.fixture(scope="module")
def clusters(runner):
    """Creates clusters by protocol and environment; processes over `grpc` load the library, too."""
    made = {}

    def get(protocol, library=True, shape=(("ps", 2), ("worker", 2)), **environment):
        key = (protocol, library, shape, tuple(sorted(environment.items())))
        if key in made and not made[key].usable():
            made.pop(key).close()
        if key not in made:
            made[key] = start_cluster(runner, protocol, dict(shape), library, environment)
        return made[key]

    yield get
    for cluster in made.values():
        cluster.close()


def start_cluster(runner, protocol, shape, library=True, environment=None, config=None, without=()):
    import cluster as harness

    cluster = harness.Cluster(runner, protocol, shape, environment=environment, start=False)
    for job, count in shape.items():
        for index in range(count):
            task = cluster.process(job, index)
            if library and (job, index) not in without:
                task.call(load, "grpc++", timeout=harness.START_TIMEOUT)
            task.call(start_server, cluster.spec, job, index, protocol, config, timeout=harness.START_TIMEOUT)
    return cluster


def chief(cluster, function, *args, timeout=60, **kwargs):
    return cluster["worker", 0].call(function, cluster.target("worker", 0), *args, timeout=timeout, **kwargs)


# In the worker process. -----------------------------------------------------------------------------------------------


def session_config(fuse, optimise=False):
    config = differential.session_config()
    if optimise:
        config.graph_options.ClearField("optimizer_options")
    config.operation_timeout_in_ms = 60000
    config.MergeFromString(fuse)
    return config


class Session:
    """A session that records its traffic: messages between tasks, and the tensors in each fused one."""

    def __init__(self, target, fuse, optimise=False):
        self.session = one().Session(target, config=session_config(fuse, optimise))
        self.seen = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.session.close()

    def run(self, fetches, feeds=None):
        metadata = one().RunMetadata()
        values = self.session.run(fetches, feeds, options=one().RunOptions(output_partition_graphs=True), run_metadata=metadata)
        self.seen.append(traffic(metadata.partition_graphs))
        return values


def traffic(partitions):
    """Returns (messages between tasks, number of tensors in each fused one)."""
    task = lambda device: device.rsplit("/device:", 1)[0]  # noqa: E731
    nodes = [node for graph in partitions for node in graph.node]
    between = lambda node: task(node.attr["send_device"].s.decode()) != task(node.attr["recv_device"].s.decode())  # noqa: E731
    messages = sum(node.op in ("_Recv", "_HostRecv") and not node.attr["client_terminated"].b and between(node) for node in nodes)
    fused = sorted(len(node.attr["T"].list.type) for node in nodes if node.op == "StarwireUnfuse")
    assert fused == sorted(len(node.attr["members"].list.s) for node in nodes if node.op == "StarwireUnfuse")
    # A group of constants may itself have become a constant.
    assert set(fused) >= {len(node.attr["T"].list.type) for node in nodes if node.op == "StarwireFuse"}
    return messages, fused


def run_case(target, name, fuse, steps=3):
    """Returns digests of the case's results per step, and the last step's traffic."""
    control_flow_v2 = one().control_flow_v2_enabled()
    try:
        (one().enable_control_flow_v2 if name.endswith("_v2") else one().disable_control_flow_v2)()
        with tf.Graph().as_default():
            one().set_random_seed(7)
            fetches, feed_of_step = CASES[name]()
            with Session(target, fuse, optimise="optimised" in name) as sess:
                sess.session.run(one().global_variables_initializer())
                values = [[digest(v) for v in sess.run(tf.nest.flatten(fetches), feed_of_step(step) if feed_of_step else None)] for step in range(steps)]
                return values, sess.seen[-1]
    finally:
        (one().enable_control_flow_v2 if control_flow_v2 else one().disable_control_flow_v2)()


# Cases. ---------------------------------------------------------------------------------------------------------------


def relay(dtypes):
    """Values of every dtype, shape and size travel through all tasks."""

    def build():
        feeds = {}
        with tf.device(PS0):
            for name in dtypes:
                try:
                    dtype = tf.as_dtype(name)
                except TypeError:
                    continue
                feeds.update({one().placeholder(dtype, array.shape): array for array in differential.inputs_for(dtype, 5) if array.nbytes < 300_000})
            # Needed by every fetch, so a client cannot hold a feed back.
            all_there = tf.group(list(feeds))
            values = list(feeds)
        for device in HOPS[1:]:
            with tf.device(device):
                values = [tf.identity(value) for value in values]
        with tf.device(WORKER0), tf.control_dependencies([all_there]):
            return [tf.identity(value) for value in values], lambda step: feeds

    return build


def dense_model():
    """Many small variables on two ps, pulled, pushed and applied by SGD."""
    import numpy as np

    rng = np.random.default_rng(4)
    out, losses = [], []
    for i in range(60):
        with tf.device((PS0, PS1)[i % 2]):
            v = one().get_variable(f"v{i}", initializer=rng.normal(size=(i % 7 + 1, 33)).astype(np.float32), use_resource=bool(i % 3))
        with tf.device(WORKER0):
            losses.append(tf.reduce_sum(tf.square(v - float(i))))
    with tf.device(WORKER0):
        loss = tf.add_n(losses)
    train_op = one().train.GradientDescentOptimizer(0.01).minimize(loss)
    with tf.control_dependencies([train_op]):
        for v in one().global_variables()[::6]:
            with tf.device(v.device):
                out.append(tf.reduce_sum(v.read_value() if hasattr(v, "read_value") else v))
    with tf.device(WORKER0):
        return [tf.identity(loss), *[tf.identity(o) for o in out]], None


def ctr_model():
    """Partitioned embeddings with IndexedSlices gradients and string input; bfloat16 and bool cross as well."""
    import numpy as np

    with one().device(training.setter()):
        with tf.device(WORKER0):
            step = one().placeholder(tf.int64, ())
            base = tf.range(64, dtype=tf.int64) * 7919
        logits = []
        for field in range(8):
            table = one().get_variable(
                f"table{field}", (40, 4), initializer=one().random_uniform_initializer(-1, 1, seed=field + 1), partitioner=one().fixed_size_partitioner(2), use_resource=bool(field % 2)
            )
            with tf.device(WORKER0):
                ids = (base * (field + 1) + step) % 40
            logits.append(tf.reduce_sum(one().nn.embedding_lookup(table, ids, partition_strategy="div"), 1))
        weights = one().get_variable("weights", initializer=np.linspace(-1, 1, 8).astype(np.float32), use_resource=True)
        half = one().get_variable("half", initializer=tf.cast(tf.linspace(0.0, 1.0, 8), tf.bfloat16), trainable=False)
        keep = one().get_variable("keep", initializer=np.arange(8) % 3 != 0, trainable=False)
        words = one().get_variable("words", initializer=np.array([b"a", b"", b"ccc"] * 4), trainable=False)
        with tf.device(WORKER0):
            scale = tf.where(keep, tf.cast(half, tf.float32), tf.ones([8])) * weights
            loss = tf.reduce_mean(tf.square(tf.stack(logits, 1) * scale - 0.5))
            length = tf.strings.length(words)
        train_op = one().train.AdagradOptimizer(0.1).minimize(loss, global_step=one().train.get_or_create_global_step())
    with tf.device(WORKER0):
        with tf.control_dependencies([train_op]):
            return [tf.identity(loss), tf.identity(length)], lambda number: {step: number}


def conditional():
    """tf.cond whose branches each pull several variables: only those of the taken branch are alive."""
    import numpy as np

    with tf.device(PS0):
        count = one().get_variable("count", initializer=np.int32(0))
        turn = one().assign_add(count, 1)
        here = [one().get_variable(f"here{i}", initializer=np.arange(10 * i + 1, dtype=np.float32)) for i in range(5)]
    with tf.device(PS1):
        there = [one().get_variable(f"there{i}", initializer=np.arange(10 * i + 1, dtype=np.float32) * 3) for i in range(5)]

    def sums(variables, task, factor):
        def branch():
            with tf.device(task):
                return tf.add_n([tf.reduce_sum(tf.identity(v) * factor) for v in variables])

        return branch

    with tf.device(WORKER0):
        flag = tf.equal(turn % 2, 0)
        chosen = tf.cond(flag, sums(here, WORKER0, 2.0), sums(there, WORKER0, 5.0))
        nested = tf.cond(flag, lambda: tf.cond(chosen > 1e9, sums(here, WORKER0, 1.0), sums(there, WORKER0, 7.0)), sums(here, WORKER0, 9.0))
    return [tf.identity(chosen), tf.identity(nested)], None


def loop():
    """Several values cross in each iteration of a loop."""
    import numpy as np

    with tf.device(PS0):
        weights = [one().get_variable(f"weight{i}", initializer=np.linspace(0, 1, 50 + i).astype(np.float32)) for i in range(4)]

    def body(i, total):
        with tf.device(PS0):
            steps = [weight * tf.cast(i, tf.float32) for weight in weights]
        with tf.device(WORKER0):
            return i + 1, total + tf.add_n([tf.reduce_sum(step) for step in steps])

    with tf.device(WORKER0):
        _, total = tf.while_loop(lambda i, _: i < 7, body, [tf.constant(0), tf.constant(0.0)], parallel_iterations=3)
        return [tf.identity(total)], None


def dead_tensors():
    """One tensor of each pair is dead; pairs of different predicates must not be fused, or live values would be lost."""
    import numpy as np

    with tf.device(PS0):
        turn = one().assign_add(one().get_variable("turn", initializer=np.int32(0)), 1)
        flags = [tf.equal(turn % 2, 0), tf.equal(turn % 3, 0)]
        sides = [tf.raw_ops.Switch(data=tf.range(float(i + 5)) + tf.cast(turn, tf.float32), pred=flags[i % 2]) for i in range(8)]
    with tf.device(WORKER0):
        merged = []
        for off, on in sides:
            merged.append(tf.raw_ops.Merge(inputs=[tf.reduce_sum(off) * 10.0, tf.reduce_sum(on)]))
        return [m.output + 0.0 for m in merged] + [m.value_index + 0 for m in merged], None


def ping_pong():
    """A naive fusion of everything between two tasks hangs: the second tensor in each direction needs the first."""
    import numpy as np

    with tf.device(PS0):
        values = [one().get_variable(f"v{i}", initializer=np.full(9, float(i + 1), np.float32)) for i in range(4)]
    out = []
    for _ in range(3):
        with tf.device(WORKER0):
            values = [value * 1.5 for value in values]
        with tf.device(PS0):
            values = [value + total for value, total in zip(values, [tf.add_n(values)] * 4)]
    with tf.device(WORKER0):
        out = [value + 1.0 for value in values]
    return out, None


def late_company():
    """The other hang: of two tensors that could be fused, one depends on the other through a third task."""
    import numpy as np

    with tf.device(PS0):
        early = tf.identity(one().get_variable("early", initializer=np.ones(5, np.float32)))
        other = tf.identity(one().get_variable("other", initializer=np.ones(5, np.float32) * 3))
    with tf.device(WORKER0):
        first = early + other
    with tf.device(WORKER1):
        way = first * 2.0
    with tf.device(PS1):
        way = way - 1.0
    with tf.device(PS0):
        late = way + early
        later = way * early
    with tf.device(WORKER0):
        return [first + late, later + first], None


def control_edges():
    """Control edges cross, beside tensors."""
    import numpy as np

    with tf.device(PS0):
        counters = [one().get_variable(f"c{i}", initializer=np.float32(i)) for i in range(6)]
        bumps = [one().assign_add(c, 1.0) for c in counters]
    with tf.device(WORKER0):
        with tf.control_dependencies([b.op for b in bumps]):
            gate = tf.random.uniform((), seed=3) * 0.0
    with tf.device(PS0):
        with tf.control_dependencies([gate]):
            after = [c.read_value() * 1.0 for c in counters]
    with tf.device(WORKER0):
        return [tf.add_n(after), *[a + 1.0 for a in after]], None


def read_after_update():
    """A variable read after its update has the new value, although the parameter server could send the old one at once."""
    import numpy as np

    with tf.device(PS0):
        variables = [one().get_variable(f"w{i}", initializer=np.full(3, float(i), np.float32), use_resource=False) for i in range(5)]
    with tf.device(WORKER0):
        pulled = [v * 2.0 for v in variables]
        with tf.control_dependencies(pulled):
            gate = tf.random.uniform((), seed=1) * 0.0 + 1.0
    with tf.device(PS0):
        updates = [one().assign_add(v, p + gate) for v, p in zip(variables, pulled)]
    with tf.device(WORKER0), tf.control_dependencies(updates):
        return [v.read_value() for v in variables], None


def optimised_constants():
    """Each task folds its constants: a group of constants becomes a constant, and stays correct."""
    with tf.device(PS0):
        values = [tf.constant([float(i)] * (3 + i)) for i in range(6)] + [tf.constant(["a", "bc"])]
    with tf.device(WORKER0):
        return [tf.add_n([tf.reduce_sum(tf.cumsum(v)) for v in values[:-1]]), tf.strings.join([values[-1], "x"])], None


PLAIN = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "half", "bfloat16", "float32", "float64", "complex64", "complex128", "string")

EXOTIC = tuple(name for name in differential.DTYPES if name not in PLAIN)

CASES = {
    "types": relay(PLAIN),
    "exotic_types": relay(EXOTIC),
    "dense_model": dense_model,
    "ctr_model": ctr_model,
    "conditional_v1": conditional,
    "conditional_v2": conditional,
    "loop_v1": loop,
    "loop_v2": loop,
    "dead_tensors": dead_tensors,
    "ping_pong": ping_pong,
    "late_company": late_company,
    "control_edges": control_edges,
    "read_after_update": read_after_update,
    "dense_model_optimised": dense_model,
    "optimised_constants": optimised_constants,
}

# Upper limits for (messages with fusion) / (messages without).
SHARE = {"types": 0.3, "exotic_types": 0.3, "dense_model": 0.2, "ctr_model": 0.45, "conditional_v1": 0.7, "conditional_v2": 0.7, "ping_pong": 0.3, "late_company": 0.85, "control_edges": 0.4}


@pytest.mark.ours
@pytest.mark.parametrize("name", CASES)
def test_same_bits_in_fewer_messages(clusters, name):
    (want, (plain, none)) = chief(clusters("grpc", library=False), run_case, name, b"")
    assert none == [] and plain > 1
    for protocol in PROTOCOLS:
        cluster = clusters(protocol, **EAGER)
        values, (messages, fused) = chief(cluster, run_case, name, ON)
        assert values == want, protocol
        if name == "optimised_constants":  # nothing is left to fuse
            assert messages < plain
            continue
        assert fused, "nothing was fused"
        assert messages <= plain * SHARE.get(name, 0.95), (plain, messages, fused)
        assert messages + sum(fused) - len(fused) <= plain
        values, unfused = chief(cluster, run_case, name, OFF)
        assert (values, unfused) == (want, (plain, [])), protocol


# Other kinds of sessions. ---------------------------------------------------------------------------------------------


def partial_run(target, fuse):
    """The client holds one feed back until it has the result of the other; everything else crosses fused."""
    import numpy as np

    with tf.Graph().as_default():
        with tf.device(PS0):
            variables = [one().get_variable(f"v{i}", initializer=np.full(3, float(i), np.float32)) for i in range(4)]
            first, second = one().placeholder(tf.float32, ()), one().placeholder(tf.float32, ())
            doubled, tripled = first * 2.0, second * 3.0
        with tf.device(WORKER0):
            base = tf.add_n([tf.reduce_sum(v) for v in variables])
            early, late = base + doubled, base + tripled
        with one().Session(target, config=session_config(fuse)) as sess:
            sess.run(one().global_variables_initializer())
            out = []
            for turn in range(2):
                handle = sess.partial_run_setup([early, late], [first, second])
                value = sess.partial_run(handle, early, {first: turn})
                out += [float(value), float(sess.partial_run(handle, late, {second: value}))]
            return out


@pytest.mark.ours
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_partial_run_may_hold_a_feed_back(clusters, protocol):
    cluster = clusters(protocol, **EAGER)
    start = cluster["worker", 0].log_size()
    assert chief(cluster, partial_run, ON, timeout=30) == [18.0, 72.0, 20.0, 78.0]
    assert "4 of them in 1 groups: 5 messages per step instead of 8" in cluster["worker", 0].full_log()[start:]


@pytest.mark.ours
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sync_replicas(clusters, tmp_path, protocol):
    """Accumulators and token queues: both workers wait for each other in every step. Fusion is on through the environment."""
    cluster = clusters(protocol, STARWIRE_TENSOR_FUSE="1", **EAGER)
    directory = str(tmp_path / "sync")
    starts = [cluster["worker", i].log_size() for i in range(2)]
    for i in range(2):
        cluster["worker", i].begin(training.synchronous, cluster.target("worker", i), i, directory if i == 0 else None, 10, str(tmp_path))
        training.wait_for_checkpoint(directory)
    for i in range(2):
        losses, step = cluster["worker", i].result(60)
        assert (len(losses), step) == (10, 10)
        groups = [int(n) for n in re.findall(r"of them in (\d+) groups", cluster["worker", i].full_log()[starts[i]:])]
        assert max(groups) >= 3, groups


def monitored(target, directory, fuse):
    """MonitoredTrainingSession with fusion in its configuration; returns its results before and after a restore."""
    out = []
    for last in (6, 9):
        with tf.Graph().as_default():
            with one().device(training.setter()):
                step = one().train.get_or_create_global_step()
                ids, x, loss = training.regression(True)
                train_op = one().train.AdamOptimizer(0.01).minimize(loss, global_step=step)
            config = one().ConfigProto(operation_timeout_in_ms=60000)
            config.MergeFromString(fuse)
            hooks = [one().train.StopAtStepHook(last_step=last)]
            with one().train.MonitoredTrainingSession(target, checkpoint_dir=directory, config=config, hooks=hooks, save_summaries_steps=None, save_summaries_secs=None) as sess:
                while not sess.should_stop():
                    i, xs = training.batch(len(out))
                    out.append(sess.run([loss, train_op], {ids: i, x: xs})[0].tobytes())
    return out


@pytest.mark.ours
def test_monitored_session_with_a_configuration(clusters, tmp_path):
    want = chief(clusters("grpc", library=False), monitored, str(tmp_path / "stock"), b"")
    assert len(want) == 9
    for protocol in PROTOCOLS:
        cluster = clusters(protocol, **EAGER)
        start = cluster["worker", 0].log_size()
        assert chief(cluster, monitored, str(tmp_path / protocol), ON) == want
        assert re.search(r"tensor_fuse: \d+ edges between tasks, [1-9]", cluster["worker", 0].full_log()[start:])


# Switches. ------------------------------------------------------------------------------------------------------------


def groups_of(target, fuse=b""):
    """The number of fused messages in a step that could have two."""
    return len(run_case(target, "ping_pong", fuse, steps=1)[1][1])


@pytest.mark.ours
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_switches(runner, clusters, protocol):
    """Off by default; in order of precedence: the session's setting, the server's, the environment's."""
    assert chief(clusters(protocol, **EAGER), groups_of) == 0
    assert chief(clusters(protocol, **EAGER), groups_of, ON) > 0
    by_environment = clusters(protocol, STARWIRE_TENSOR_FUSE="1", **EAGER)
    assert chief(by_environment, groups_of) > 0
    assert chief(by_environment, groups_of, OFF) == 0
    shape = {"ps": 2, "worker": 2}
    with start_cluster(runner, protocol, shape, environment=EAGER, config=ON) as by_server:
        # In the server's process and in another one, as TensorFlow merges the configurations differently.
        for client in (0, 1):
            assert by_server["worker", client].call(groups_of, by_server.target("worker", 0)) > 0
            assert by_server["worker", client].call(groups_of, by_server.target("worker", 0), OFF) == 0


def config_of(**arguments):
    import sys

    from cluster import ROOT

    sys.path.insert(0, str(ROOT / "python"))
    import starwire

    base = one().ConfigProto(allow_soft_placement=True, device_count={"CPU": 300})
    before = base.SerializeToString()
    made = starwire.config(starwire.config(base, tensor_fuse=arguments.get("first")), tensor_fuse=arguments.get("tensor_fuse"))
    assert made.allow_soft_placement and made.device_count["CPU"] == 300 and base.SerializeToString() == before
    made.allow_soft_placement = False
    made.device_count.clear()
    return made.SerializeToString()


@pytest.mark.ours
def test_config_of_the_package(clusters):
    worker = clusters("grpc++", **EAGER)["worker", 0]
    assert worker.call(config_of, tensor_fuse=True) == ON
    assert worker.call(config_of, tensor_fuse=False) == OFF
    assert worker.call(config_of, first=True, tensor_fuse=False) == OFF
    assert worker.call(config_of, first=False) == OFF
    assert worker.call(config_of) == b""


@pytest.mark.ours
def test_nonsense_in_the_environment_is_named(clusters):
    cluster = clusters("grpc", STARWIRE_TENSOR_FUSE="perhaps")
    with pytest.raises(RemoteError) as caught:
        chief(cluster, groups_of)
    assert 'STARWIRE_TENSOR_FUSE="perhaps" is invalid: it must be true, false, 1 or 0' in caught.value.message
    assert chief(cluster, groups_of, OFF) == 0


@pytest.mark.ours
def test_a_process_without_the_library_is_an_error(runner):
    with start_cluster(runner, "grpc", {"ps": 2, "worker": 2}, environment=EAGER, without=[("ps", 1)]) as cluster:
        assert chief(cluster, groups_of, ON, timeout=30) > 0, "ps 1 has no part in this graph"
        with pytest.raises(RemoteError) as caught:
            chief(cluster, run_case, "dense_model", ON, timeout=30)
        assert caught.value.type == "NotFoundError"
        assert "StarwireFuse" in caught.value.message or "StarwireUnfuse" in caught.value.message
        assert "not registered" in caught.value.message


# Visibility. ----------------------------------------------------------------------------------------------------------


def trace(target):
    """A timeline of one step of the dense model: the names of transfers, and the labels of the fuse operations."""
    from tensorflow.python.client import timeline

    with tf.Graph().as_default():
        fetches, _ = dense_model()
        with one().Session(target, config=session_config(ON)) as sess:
            sess.run(one().global_variables_initializer())
            metadata = one().RunMetadata()
            sess.run(fetches, options=one().RunOptions(trace_level=one().RunOptions.FULL_TRACE), run_metadata=metadata)
        events = json.loads(timeline.Timeline(metadata.step_stats).generate_chrome_trace_format())["traceEvents"]
    transfers = [node.timeline_label for device in metadata.step_stats.dev_stats for node in device.node_stats if node.node_name == "RecvTensor"]
    return transfers, [event["args"] for event in events if event.get("args", {}).get("op") == "StarwireFuse"]


@pytest.mark.ours
def test_timeline_shows_fused_transfers_and_their_members(clusters):
    transfers, fusing = chief(clusters("grpc++", **EAGER), trace)
    fused = [label for label in transfers if re.search(r"edge_\d+_starwire_fuse_\d+_of_\d+", label)]
    assert fused and len(transfers) < 20, transfers
    members = [value for arguments in fusing for key, value in arguments.items() if key.startswith("input")]
    assert any(member.startswith("v0") for member in members) and len(members) >= 60, fusing


def data_address(task):
    return re.findall(r"data port (\S+),", task.full_log())[-1]


def fused_counters(task):
    from urllib.request import urlopen

    with urlopen(f"http://{data_address(task)}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {name: int(value) for name, value in re.findall(r"^starwire_(fused_\w+)_total\{.*\} (\d+)$", text, re.MULTILINE)}


@pytest.mark.ours
def test_counters(fresh_cluster):
    cluster = fresh_cluster((("ps", 2), ("worker", 2)), protocol="grpc++", environment={"STARWIRE_TENSOR_FUSE": "1", **EAGER})
    assert set(fused_counters(cluster["ps", 0]).values()) == {0}
    _, (_, fused) = chief(cluster, run_case, "ping_pong", ON, steps=5)
    sent, received = fused_counters(cluster["ps", 0]), fused_counters(cluster["worker", 0])
    assert sent["fused_messages_sent"] == received["fused_messages_received"] and sent["fused_messages_received"] == received["fused_messages_sent"]
    assert sent["fused_messages_sent"] + sent["fused_messages_received"] == 5 * len(fused)
    assert sent["fused_tensors_sent"] + sent["fused_tensors_received"] == 5 * sum(fused)
