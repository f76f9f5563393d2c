"""Programs may have nodes with the names that starwire gives to new nodes beside theirs."""

import pytest

from cluster import one, tf, worker_call
from sparse_training import batches, build
from tensors import digest

pytestmark = pytest.mark.ours

WORKER = "/job:worker/task:0"
# Behind the name of another node: where starwire puts such a node, None for beside the other. What is read for a reader
# that waits has the reader's name and input as well.
OURS = {
    "starwire_unique_0": WORKER,
    "starwire_rows": WORKER,
    "starwire_all": WORKER,
    "starwire_copy/0": None,
    "starwire_read/0/reader/0": None,
    "starwire_narrow": None,
    "starwire_wide": WORKER,
}


# In the worker process. -----------------------------------------------------------------------------------------------


def copied_and_read(server):
    """The memory of a variable crosses beside an update of it; a reader on the worker waits for another update."""
    with one().device(server):
        v = one().get_variable("v", initializer=tf.ones([3]), use_resource=False)
        w = one().get_variable("w", initializer=tf.zeros([3]), use_resource=False)
        r = tf.identity(v.op.outputs[0], name="r")
    with one().device(WORKER):
        g = r * 100.0
    with one().device("/job:worker/task:1"):
        h = r * 0.5
    with one().device(server):
        first = one().assign_add(v, g)
        second = one().assign_add(w, h)
    with one().device(WORKER), tf.control_dependencies([second.op]):
        reader = tf.negative(w.op.outputs[0], name="reader")
    return [first.op, reader]


def trained(target, fuse, suffixes):
    """Trains with nodes that have such names."""
    import starwire

    with tf.Graph().as_default() as graph:
        feeds, loss, train = build("Adagrad", True)
        fetches = [loss, copied_and_read("/job:ps/task:0"), train]
        others = []
        for node in graph.get_operations():
            for suffix in suffixes:
                with one().device(None), one().device(OURS[suffix] or node.device):
                    # The slash keeps the name as it is.
                    others.append(graph.create_op("NoOp", [], [], name=f"{node.name}/{suffix}/"))
        with one().Session(target, config=starwire.config(wire_dtype="bfloat16", tensor_fuse=fuse)) as sess:
            sess.run(one().global_variables_initializer())
            seen = []
            for batch in list(batches(feeds))[:3]:
                value, (_, read), *_ = sess.run([*fetches, others], batch)
                seen += [digest(value), digest(read)]
            return seen + [digest(value) for value in sess.run(one().global_variables())]


# Tests. ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=("grpc++", "star_server", "star_server_lite"))
def protocol(request):
    return request.param


@pytest.mark.quick(
    lambda of: (of["protocol"], of["fuse"]) == ("star_server", False),
    reason="star calls make such nodes, and those of fused tensors get their names from the same code (cc/graph/names.cc)",
)
@pytest.mark.parametrize("fuse", [False, True], ids=["plain", "fuse"])
def test_names_like_ours(cluster, fuse):
    assert worker_call(cluster, trained, fuse, list(OURS)) == worker_call(cluster, trained, fuse, [])
