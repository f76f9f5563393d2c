"""tensor_fuse: the same graph with and without it, over stock gRPC and over starwire, yields the same bits in fewer messages.

Every case runs unfused over stock gRPC, which defines the expected result, and fused over both. The executed partitions must show the fusion; otherwise a
test could pass because nothing was fused.
"""

import functools
import json
import re

import pytest

from cluster import RemoteError, load, one, start_server, tf, worker_call
from fuse_graphs import CASES, OFF, ON, traffic
from graphs import PS0, WORKER0, freeze, session_config, thaw
from metrics import fused_counters
from tensors import digest
from training_job import batch, regression, setter, synchronous, wait_for_checkpoint

EAGER = {"STARWIRE_TENSOR_FUSE_LIMITS": "wait_us=60000000,message_us=1000000"}  # group everything that may be grouped
PROTOCOLS = ("grpc++", "grpc")


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


# In the worker process. -----------------------------------------------------------------------------------------------


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


def freeze_case(target, name):
    return freeze(CASES, name)


def run_case(target, frozen, *fuses, optimise=False):
    """Returns for each setting: digests of a frozen case's results per step, and the last step's traffic."""
    outcomes = []
    with thaw(frozen) as (initializers, fetches, feeds):
        for fuse in fuses:
            with Session(target, fuse, optimise) as sess:
                sess.session.run(initializers)
                values = [[digest(v) for v in sess.run(tf.nest.flatten(fetches), feed)] for feed in feeds]
                outcomes.append((values, sess.seen[-1]))
    return outcomes


# Upper limits for (messages with fusion) / (messages without).
SHARE = {"types": 0.3, "exotic_types": 0.3, "dense_model": 0.2, "ctr_model": 0.45, "conditional_v1": 0.7, "conditional_v2": 0.7, "ping_pong": 0.3, "late_company": 0.85, "control_edges": 0.4}


@pytest.fixture(scope="module")
def frozen(clusters):
    """Returns a function of a case's name: its graph, which is built once."""
    return functools.lru_cache(maxsize=None)(lambda name: worker_call(clusters("grpc", library=False), freeze_case, name))


@pytest.mark.ours
@pytest.mark.quick(
    lambda of: of["name"] not in ("exotic_types", "dense_model_optimised"),
    reason="a group knows of a type only the size of its elements; grappler runs before it, and optimises optimised_constants as well",
)
@pytest.mark.parametrize("name", CASES)
def test_same_bits_in_fewer_messages(clusters, frozen, name):
    optimise = "optimised" in name
    case = frozen(name.replace("_optimised", ""))
    [(want, (plain, none))] = worker_call(clusters("grpc", library=False), run_case, case, b"", optimise=optimise)
    assert none == [] and plain > 1
    for protocol in PROTOCOLS:
        (values, (messages, fused)), unfused = worker_call(clusters(protocol, **EAGER), run_case, case, ON, OFF, optimise=optimise)
        assert values == want, protocol
        assert unfused == (want, (plain, [])), protocol
        if name == "optimised_constants":  # nothing is left to fuse
            assert messages < plain
            continue
        assert fused, "nothing was fused"
        assert messages <= plain * SHARE.get(name, 0.95), (plain, messages, fused)
        assert messages + sum(fused) - len(fused) <= plain


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
    assert worker_call(cluster, partial_run, ON, timeout=30) == [18.0, 72.0, 20.0, 78.0]
    assert "4 of them in 1 groups: 5 messages per step instead of 8" in cluster["worker", 0].full_log()[start:]


@pytest.mark.ours
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sync_replicas(clusters, tmp_path, protocol):
    """Accumulators and token queues: both workers wait for each other in every step. Fusion is on through the environment."""
    cluster = clusters(protocol, STARWIRE_TENSOR_FUSE="1", **EAGER)
    directory = str(tmp_path / "sync")
    starts = [cluster["worker", i].log_size() for i in range(2)]
    for i in range(2):
        cluster["worker", i].begin(synchronous, cluster.target("worker", i), i, directory if i == 0 else None, 10, str(tmp_path))
        wait_for_checkpoint(directory)
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
            with one().device(setter()):
                step = one().train.get_or_create_global_step()
                ids, x, loss = regression(True)
                train_op = one().train.AdamOptimizer(0.01).minimize(loss, global_step=step)
            config = one().ConfigProto(operation_timeout_in_ms=60000)
            config.MergeFromString(fuse)
            hooks = [one().train.StopAtStepHook(last_step=last)]
            with one().train.MonitoredTrainingSession(target, checkpoint_dir=directory, config=config, hooks=hooks, save_summaries_steps=None, save_summaries_secs=None) as sess:
                while not sess.should_stop():
                    i, xs = batch(len(out))
                    out.append(sess.run([loss, train_op], {ids: i, x: xs})[0].tobytes())
    return out


@pytest.mark.ours
def test_monitored_session_with_a_configuration(clusters, tmp_path):
    want = worker_call(clusters("grpc", library=False), monitored, str(tmp_path / "stock"), b"")
    assert len(want) == 9
    for protocol in PROTOCOLS:
        cluster = clusters(protocol, **EAGER)
        start = cluster["worker", 0].log_size()
        assert worker_call(cluster, monitored, str(tmp_path / protocol), ON) == want
        assert re.search(r"tensor_fuse: \d+ edges between tasks, [1-9]", cluster["worker", 0].full_log()[start:])


# Switches. ------------------------------------------------------------------------------------------------------------


def groups_of(target, fuse=b""):
    """The number of fused messages in a step that could have two."""
    [(_, (_, fused))] = run_case(target, freeze(CASES, "ping_pong", steps=1), fuse)
    return len(fused)


@pytest.mark.ours
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_switches(runner, clusters, protocol):
    """Off by default; in order of precedence: the session's setting, the server's, the environment's."""
    assert worker_call(clusters(protocol, **EAGER), groups_of) == 0
    assert worker_call(clusters(protocol, **EAGER), groups_of, ON) > 0
    by_environment = clusters(protocol, STARWIRE_TENSOR_FUSE="1", **EAGER)
    assert worker_call(by_environment, groups_of) > 0
    assert worker_call(by_environment, groups_of, OFF) == 0
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
        worker_call(cluster, groups_of)
    assert 'STARWIRE_TENSOR_FUSE="perhaps" is invalid: it must be true, false, 1 or 0' in caught.value.message
    assert worker_call(cluster, groups_of, OFF) == 0


@pytest.mark.ours
def test_a_process_without_the_library_is_an_error(runner, frozen):
    with start_cluster(runner, "grpc", {"ps": 2, "worker": 2}, environment=EAGER, without=[("ps", 1)]) as cluster:
        assert worker_call(cluster, groups_of, ON, timeout=30) > 0, "ps 1 has no part in this graph"
        with pytest.raises(RemoteError) as caught:
            worker_call(cluster, run_case, frozen("dense_model"), ON, timeout=30)
        assert caught.value.type == "NotFoundError"
        assert "StarwireFuse" in caught.value.message or "StarwireUnfuse" in caught.value.message
        assert "not registered" in caught.value.message


# Visibility. ----------------------------------------------------------------------------------------------------------


def trace(target, frozen):
    """A timeline of one step of a frozen case: the names of transfers, and the labels of the fuse operations."""
    from tensorflow.python.client import timeline

    with thaw(frozen) as (initializers, fetches, _), one().Session(target, config=session_config(ON)) as sess:
        sess.run(initializers)
        metadata = one().RunMetadata()
        sess.run(fetches, options=one().RunOptions(trace_level=one().RunOptions.FULL_TRACE), run_metadata=metadata)
    events = json.loads(timeline.Timeline(metadata.step_stats).generate_chrome_trace_format())["traceEvents"]
    transfers = [node.timeline_label for device in metadata.step_stats.dev_stats for node in device.node_stats if node.node_name == "RecvTensor"]
    return transfers, [event["args"] for event in events if event.get("args", {}).get("op") == "StarwireFuse"]


@pytest.mark.ours
def test_timeline_shows_fused_transfers_and_their_members(clusters, frozen):
    transfers, fusing = worker_call(clusters("grpc++", **EAGER), trace, frozen("dense_model"))
    fused = [label for label in transfers if re.search(r"edge_\d+_starwire_fuse_\d+_of_\d+", label)]
    assert fused and len(transfers) < 20, transfers
    members = [value for arguments in fusing for key, value in arguments.items() if key.startswith("input")]
    assert any(member.startswith("v0") for member in members) and len(members) >= 60, fusing


@pytest.mark.ours
def test_counters(fresh_cluster, frozen):
    cluster = fresh_cluster((("ps", 2), ("worker", 2)), protocol="grpc++", environment={"STARWIRE_TENSOR_FUSE": "1", **EAGER})
    assert set(fused_counters(cluster["ps", 0]).values()) == {0}
    [(_, (_, fused))] = worker_call(cluster, run_case, frozen("ping_pong"), ON)
    sent, received = fused_counters(cluster["ps", 0]), fused_counters(cluster["worker", 0])
    assert sent["fused_messages_sent"] == received["fused_messages_received"] and sent["fused_messages_received"] == received["fused_messages_sent"]
    assert sent["fused_messages_sent"] + sent["fused_messages_received"] == 3 * len(fused)
    assert sent["fused_tensors_sent"] + sent["fused_tensors_received"] == 3 * sum(fused)
