"""What TensorFlow's profiler shows: the receives and star calls of a worker, and their runs on a parameter server."""

from pathlib import Path

import pytest
from cluster import state, tf

one = lambda: tf.compat.v1  # noqa: E731


def prepare(target):
    with tf.Graph().as_default() as graph:
        with tf.device("/job:ps/task:0"):
            profiled = one().get_variable("profiled", initializer=tf.zeros([100]), use_resource=True)
        with tf.device("/job:worker/task:0"):
            doubled = profiled.read_value() * 2.0 + 1.0
        with tf.device("/job:ps/task:0"):
            state["step"] = profiled.assign(doubled).op
    state["session"] = one().Session(target, graph=graph)
    with graph.as_default():
        state["session"].run(one().global_variables_initializer())
    run()


def run(steps=3):
    for _ in range(steps):
        state["session"].run(state["step"])


def start(folder):
    tf.profiler.experimental.start(folder)


def stop(folder):
    """Returns the profile, in TensorBoard's format."""
    tf.profiler.experimental.stop()
    (path,) = Path(folder).rglob("*.xplane.pb")
    return path.read_bytes()


@pytest.mark.parametrize("protocol, by_worker, by_ps", [("grpc++", b"RecvTensor", b"RecvTensor"), ("star_server", b"StarCall", b"StarRun")])
def test_activities(fresh_cluster, tmp_path, protocol, by_worker, by_ps):
    cluster = fresh_cluster({"ps": 1, "worker": 1}, protocol=protocol)
    worker, ps = cluster["worker", 0], cluster["ps", 0]
    worker.call(prepare, cluster.target("worker", 0))
    for task, name in ((worker, "worker"), (ps, "ps")):
        task.call(start, str(tmp_path / name))
    worker.call(run)
    seen = {name: task.call(stop, str(tmp_path / name)) for task, name in ((worker, "worker"), (ps, "ps"))}
    assert by_worker in seen["worker"] and by_ps in seen["ps"], {name: len(profile) for name, profile in seen.items()}
    # The metadata say which peer.
    assert b"/job:ps/replica:0/task:0" in seen["worker"]
    # Nothing is recorded, and nothing breaks, without a profile.
    worker.call(run)
