"""STARWIRE_OPS: operations that a team adds to the op table. One of TensorFlow's that is not in it plays the team's."""

import functools

import pytest

import late_operations
from cluster import one, tf, worker_call
from fuse_graphs import traffic
from graphs import PS0, WORKER0, session
from tensors import digest

pytestmark = [pytest.mark.ours, pytest.mark.tensorflow2]

# Adds rows to a tensor, and returns a new one.
TEAMS = "ScatterNdNonAliasingAdd"
# Loaded when the servers run already: by whether it is stateful.
LATE = {False: "StarwireLate", True: "StarwireLateStateful"}


@pytest.fixture(scope="module", params=("star_server", "star_server_lite"))
def protocol(request):
    return request.param


def change(values, rows):
    return tf.raw_ops.ScatterNdNonAliasingAdd(input=values, indices=[[0], [2]], updates=rows)


def late(values, rows, stateful):
    return tf.Graph.create_op(one().get_default_graph(), LATE[stateful], [values], [tf.float32]).outputs[0]


def train(target, steps=3, teams=change):
    """Returns digests of each step's results, and the numbers of star calls, and of tensors received one by one, in the last step."""
    with tf.Graph().as_default(), one().container("ops"):
        with tf.device(PS0):
            variable = one().get_variable("v", initializer=tf.reshape(tf.range(8.0), [4, 2]), use_resource=True)
        with tf.device(WORKER0):
            rows = one().placeholder(tf.float32, [2, 2])
        with tf.device(PS0):
            changed = teams(variable.read_value(), rows)
        with tf.device(WORKER0):
            gradient = changed * 0.5
        with tf.device(PS0):
            update = variable.assign_sub(gradient, read_value=False)
        with session(target) as sess:
            sess.run(one().global_variables_initializer())
            values = []
            for step in range(steps):
                metadata = one().RunMetadata()
                options = one().RunOptions(output_partition_graphs=True)
                feed = {rows: [[step, 1.5], [2.5, step]]}
                values.append(digest(sess.run([gradient, update], feed, options=options, run_metadata=metadata)[0]))
            values.append(digest(sess.run(variable)))
            nodes = [node for graph in metadata.partition_graphs for node in graph.node]
            return values, sum(node.op == "StarwireCall" for node in nodes), traffic(metadata.partition_graphs)[0]


def table(tmp_path, text):
    path = tmp_path / "ops.txt"
    path.write_text(text)
    return {"STARWIRE_OPS": str(path)}


def test_a_teams_operation_is_part_of_a_call(stock, cluster, fresh_cluster, tmp_path):
    want, *_ = worker_call(stock, train)
    values, _, received = worker_call(cluster, train)
    assert values == want and received > 0, "without the table, the operation is left to send and receive"
    known = fresh_cluster(environment=table(tmp_path, f"# the team's\n[pure]\n{TEAMS}\n"))
    assert worker_call(known, train) == (want, 2, 0)


def test_a_server_without_the_table_runs_the_calls(stock, fresh_cluster, tmp_path):
    """What it does not know, it runs as something that may wait."""
    cluster = fresh_cluster(per_task={("worker", 0): table(tmp_path, f"[pure linear]\n{TEAMS}\n")})
    want, *_ = worker_call(stock, train)
    assert worker_call(cluster, train) == (want, 2, 0)


@pytest.mark.parametrize("stateful", (False, True))
def test_an_operation_that_is_loaded_later(stock, fresh_cluster, tmp_path, stateful):
    """It counts when it is there, if it is as the table says; else the log names the place, and it is left to send and receive."""
    name, teams = LATE[stateful], functools.partial(late, stateful=stateful)
    known = fresh_cluster(environment=table(tmp_path, f"[pure]\n{name}\n"))
    for cluster in (stock, known):
        for task in cluster.tasks.values():
            task.call(late_operations.register, name, stateful)
    want, *_ = worker_call(stock, train, teams=teams)
    values, calls, received = worker_call(known, train, teams=teams)
    assert values == want
    if stateful:
        assert received > 0
        assert f"ops.txt:2: {name} counts as unknown: TensorFlow has it as stateful, so it is not pure" in known["worker", 0].full_log()
    else:
        assert (calls, received) == (2, 0)
        assert "counts as unknown" not in known.logs()


@pytest.mark.parametrize(
    "text, error",
    [
        ("[pure]\nMatMul\n", "ops.txt:2: MatMul is in starwire's own table, which cannot be changed"),
        ("\n[quick]\nTeam>Op\n", 'ops.txt:2: "quick" is none of the words of a section'),
        (f"[updates]\n{TEAMS}\n", f"ops.txt:2: {TEAMS}: its first input is no variable"),
        ("[pure]\nTeam>NotLoaded Stage\n", "ops.txt:2: Stage: TensorFlow has it as stateful, so it is not pure"),
    ],
)
def test_a_wrong_table_is_refused_with_file_and_line(fresh_cluster, tmp_path, text, error):
    refused = fresh_cluster((("ps", 1),), start=False).start_error("ps", **table(tmp_path, text))
    assert refused.type == "InvalidArgumentError" and error in refused.message, refused
