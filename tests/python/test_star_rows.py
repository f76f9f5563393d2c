"""Rows of embeddings that a batch uses several times cross once, and change nothing: the same bits as over stock gRPC."""

import collections
import os
import re

import pytest

from cluster import one, tf
from graphs import freeze, thaw
from sparse_training import batches, build
from steps import tensorflow_minor
from tensors import digest

pytestmark = pytest.mark.ours

OPTIMIZERS = ("Adagrad", "GradientDescent", "Adam", "Ftrl", "Momentum")


# In the worker process. -----------------------------------------------------------------------------------------------


def freeze_training(target, name, use_resource):
    def case():
        feeds, loss, train = build(name, use_resource)
        # Slots as well.
        return [[loss, train], one().global_variables()], list(batches(feeds)).__getitem__

    return freeze({name: case}, name, steps=6)


def train_frozen(target, frozen):
    with thaw(frozen) as (initializers, (step, variables), feeds), one().Session(target) as sess:
        sess.run(initializers)
        return [digest(sess.run(step, feed)[0]) for feed in feeds] + [digest(value) for value in sess.run(variables)]


def look_up(target, ids):
    with tf.Graph().as_default(), one().Session(target) as sess:
        with one().device("/job:ps/task:0"):
            table = one().get_variable("looked_up", (4, 2), initializer=one().ones_initializer(), use_resource=True)
        with one().device("/job:worker/task:0"):
            feed = one().placeholder(tf.int32, [None])
            rows = tf.nn.embedding_lookup(table, feed) * 2.0
        sess.run(table.initializer)
        try:
            return digest(sess.run(rows, {feed: ids}))
        except tf.errors.OpError as error:
            return type(error).__name__


def gathered(params, ids, **how):
    with one().device("/job:ps/task:0"):
        return tf.gather(params, ids, **how)


def summed(ids, rows, also=None, after=None, length=None):
    """The rows of equal ids, added up on the server as optimizers do; `also` is made of the positions."""
    with one().device("/job:ps/task:0"), tf.control_dependencies([after] if after is not None else []):
        unique, positions = tf.unique(ids)
        sums = tf.math.unsorted_segment_sum(rows, positions, tf.shape(unique)[0] if length is None else length)
        return [unique, sums] + ([also(positions)] if also else [])


def found_and_summed(table, ids, rows, flatten):
    """A lookup and its gradient: both have the same ids."""
    ids = tf.reshape(ids, [2, -1])
    return [gathered(table, ids)] + summed(flatten(ids), rows)


def sized(ids):
    return tf.reshape(ids, tf.expand_dims(tf.size(ids), 0))


def on_server(value):
    with one().device("/job:ps/task:0"):
        return tf.negative(-value)


# By name: what is fetched, of a table on the server and of ids and rows on the worker. Each lookup or sum differs in one thing from those that cross once.
PATTERNS = {
    "a lookup": (1, 0, lambda table, ids, rows: [gathered(table, ids)]),
    "a lookup by ids of two dimensions": (1, 0, lambda table, ids, rows: [gathered(table, tf.reshape(ids, [2, -1]))]),
    "two lookups by the same ids": (2, 0, lambda table, ids, rows: [gathered(table, ids), gathered(on_server(table), ids)]),
    "a sum": (0, 1, lambda table, ids, rows: summed(ids, rows)),
    "a lookup and its gradient": (1, 1, lambda table, ids, rows: found_and_summed(table, ids, rows, sized)),
    "a lookup and a sum over ids of a shape from elsewhere": (1, 1, lambda table, ids, rows: found_and_summed(table, ids, rows, lambda two: tf.reshape(two, tf.shape(rows)[:1]))),
    "a lookup along another axis": (0, 0, lambda table, ids, rows: [gathered(table, ids % 3, axis=1)]),
    "a lookup in batches": (0, 0, lambda table, ids, rows: [gathered(tf.reshape(table, [2, 4, 3]), tf.reshape(ids, [2, -1]) % 4, batch_dims=1)]),
    "a lookup by ids of the server": (0, 0, lambda table, ids, rows: [gathered(table, on_server(ids))]),
    "a lookup that the server uses": (0, 0, lambda table, ids, rows: (lambda found: [on_server(found), found])(gathered(table, ids))),
    "a lookup of truth values": (0, 0, lambda table, ids, rows: [gathered(table > 3.0, ids)]),
    "a sum of whole numbers": (0, 0, lambda table, ids, rows: summed(ids, tf.cast(rows, tf.int32))),
    "a sum over ids of the server": (0, 0, lambda table, ids, rows: summed(on_server(ids), rows)),
    "a sum of rows of the server": (0, 0, lambda table, ids, rows: summed(ids, on_server(rows))),
    "a sum whose positions are used": (0, 0, lambda table, ids, rows: summed(ids, rows, also=lambda positions: positions * 2)),
    "a sum that waits": (0, 0, lambda table, ids, rows: summed(ids, rows, after=on_server(rows))),
    "a sum of another length": (0, 0, lambda table, ids, rows: summed(ids, rows, length=9)),
}


def run_pattern(target, name):
    import numpy as np

    config = one().ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.Graph().as_default(), one().Session(target, config=config) as sess:
        with one().device("/job:worker/task:0"):
            ids, rows = one().placeholder(tf.int32, [None]), one().placeholder(tf.float32, [None, 3])
            ids_here, rows_here = ids + 0, rows * 1.0
        with one().device("/job:ps/task:0"):
            table = one().get_variable("pattern_" + name.replace(" ", "_"), (8, 3), initializer=one().random_normal_initializer(seed=1), use_resource=True) * 1.0
        with one().device("/job:worker/task:0"):
            fetches = [value * tf.ones([], value.dtype) if value.dtype != tf.bool else ~value for value in PATTERNS[name][2](table, ids_here, rows_here)]
        sess.run(one().global_variables_initializer())
        rng = np.random.default_rng(2)
        return [digest(value) for value in sess.run(fetches, {ids: rng.integers(0, 8, 10), rows: rng.standard_normal((10, 3))})]


def sum_rows(ids, rows):
    """The sums of the kernel and of TensorFlow's own, as bytes."""
    import numpy as np

    with tf.Graph().as_default() as graph, one().Session() as sess:
        ids, rows = tf.constant(ids), tf.constant(rows)
        once, where = graph.create_op("StarwireUniqueIds", [ids], [ids.dtype, tf.int32]).outputs
        ours = graph.create_op("StarwireSumRows", [ids, rows, once, where], [rows.dtype]).outputs
        unique, positions = tf.unique(ids)
        theirs = [tf.math.unsorted_segment_sum(rows, positions, tf.shape(unique)[0])]
        copied = graph.create_op("StarwireCopyRows", [tf.gather(rows, tf.range(tf.size(once))), where], [rows.dtype]).outputs[0]
        expected = tf.gather(rows, positions)
        made = sess.run([ours, theirs, [once, where], [unique, positions], [copied], [expected]])
    return [[np.asarray(value).tobytes() for value in values] for values in made]


def unusual_numbers(ids_type, rows_type):
    """Denormals, zeros of both signs, infinities, numbers of any size; one kind of NaN, as the sum of two may have the bits of either.

    1.15 and 2.12 add in the same order, but with operands the other way round, so the sign of a NaN may differ there.
    """
    import numpy as np

    rng = np.random.default_rng(11)
    results = []
    for count, different, width in ((0, 1, 3), (1, 1, 1), (5, 2, 0), (1000, 7, 5), (1000, 10**9, 16), (40000, 300, 3)):
        info = np.finfo(rows_type)
        rows = (rng.standard_normal((count, width)) * 10.0 ** rng.integers(-20, 20, (count, width))).astype(rows_type)
        special = np.array([0.0, -0.0, np.inf, -np.inf, info.tiny / 4, -info.tiny / 8, info.max, np.nan], rows_type)
        rows = np.where(rng.random(rows.shape) < 0.05, special[rng.integers(0, len(special), rows.shape)], rows)
        ids = (rng.integers(0, different, count) - different // 2).astype(ids_type)
        ours, theirs, *others = sum_rows(ids, rows)
        results.append([one_kind_of_nan(ours, rows_type), one_kind_of_nan(theirs, rows_type), *others])
    return results


def one_kind_of_nan(sums, rows_type):
    import numpy as np

    if tensorflow_minor() >= (2, 13):
        return sums
    rows = [np.frombuffer(data, rows_type) for data in sums]
    return [np.where(np.isnan(data), np.array(np.nan, rows_type), data).tobytes() for data in rows]


def error_of(op, inputs):
    """Nothing but these operations keeps their inputs consistent, and graphs come from anywhere."""
    with tf.Graph().as_default() as graph, one().Session() as sess:
        made = graph.create_op(op, [tf.constant(value, dtype) for value, dtype in inputs], [tf.float32]).outputs[0]
        try:
            return str(sess.run(made))
        except tf.errors.OpError as error:
            return f"{type(error).__name__}: {error.message}"


def nodes_of_training(target, frozen, watched=None):
    """The worker's nodes of ours by operation, or the error of watching what one of these replaced."""
    with thaw(frozen) as (initializers, (step, _), feeds), one().Session(target) as sess:
        sess.run(initializers)
        options, metadata = one().RunOptions(output_partition_graphs=True), one().RunMetadata()
        if watched:
            node = next(op for op in sess.graph.get_operations() if op.type == watched)
            options.debug_options.debug_tensor_watch_opts.add(node_name=node.name, output_slot=0, debug_ops=["DebugNanCount"], debug_urls=[f"file://{os.getcwd()}/watched"])
        try:
            sess.run(step, feeds[0], options=options, run_metadata=metadata)
        except tf.errors.OpError as error:
            return f"{type(error).__name__}: {error.message}"
        return collections.Counter(node.op for part in metadata.partition_graphs for node in part.node if node.op.startswith("Starwire"))


# Tests. ---------------------------------------------------------------------------------------------------------------


def chief(cluster, function, *args):
    return cluster["worker", 0].call(function, cluster.target("worker", 0), *args, timeout=120)


@pytest.fixture(scope="module", params=("star_server", "star_server_lite"))
def protocol(request):
    return request.param


def is_quick(of):
    """Each optimizer with one kind of variable, and Adagrad with the other one over star_server_lite."""
    if of["protocol"] == "star_server_lite":
        return of["name"] == "Adagrad" and not of["use_resource"]
    return of["use_resource"] == (of["name"] not in ("GradientDescent", "Ftrl"))


@pytest.mark.quick(
    is_quick,
    reason="rows are made to cross once before calls are planned, for both protocols alike, whatever operation updates which kind of variable",
)
@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sparse_training_gives_the_same_bits(cluster, compared, name, use_resource):
    log = cluster["worker", 0].log_size()
    frozen = compared.stock(chief, freeze_training, name, use_resource)
    assert chief(cluster, train_frozen, frozen) == compared.stock(chief, train_frozen, frozen)
    once = re.search(r"the rows of (\d+) lookups and (\d+) gradients cross once", cluster["worker", 0].full_log()[log:])
    # Ten parts of tables. Gradient descent scatters its gradients without adding them up first.
    assert once and once.groups() == ("10", "0" if name == "GradientDescent" else "10"), cluster["worker", 0].log()


@pytest.mark.parametrize("name", PATTERNS)
def test_only_what_is_known_to_be_the_same_crosses_once(cluster, compared, name):
    log = cluster["worker", 0].log_size()
    assert chief(cluster, run_pattern, name) == compared.stock(chief, run_pattern, name)
    text = cluster["worker", 0].full_log()[log:]
    found = re.findall(r"the rows of (\d+) lookups and (\d+) gradients cross once", text)
    lookups, sums, _ = PATTERNS[name]
    assert found == ([(str(lookups), str(sums))] if lookups or sums else []), text[-3000:]


@pytest.mark.parametrize("ids", [(), (3,), (1, 1, 1), (0, 4), (-1,)], ids=str)
def test_a_lookup_gives_the_same_rows_or_error(cluster, compared, ids):
    assert chief(cluster, look_up, ids) == compared.stock(chief, look_up, ids)


@pytest.mark.parametrize("rows_type", ["float32", "float64"])
@pytest.mark.parametrize("ids_type", ["int32", "int64"])
def test_kernels_do_what_tensorflows_do(cluster, ids_type, rows_type):
    for ours, theirs, once, unique, copied, expected in cluster["worker", 0].call(unusual_numbers, ids_type, rows_type, timeout=120):
        assert ours == theirs
        assert (once, copied) == (unique, expected)


INTS, FLOATS = "int32", "float32"
WRONG = {
    "a row that is not there": ("StarwireCopyRows", [([[1.0]] * 2, FLOATS), ([1, 2], INTS)], "InternalError: .*got 2 rows, but needs row 2"),
    "rows of no dimension": ("StarwireCopyRows", [(1.0, FLOATS), ([0], INTS)], "InvalidArgumentError: .*got no rows"),
    "ids of two dimensions": ("StarwireSumRows", [([[1]], INTS), ([[1.0]], FLOATS), ([1], INTS), ([0], INTS)], "InvalidArgumentError: .*unique expects a 1D vector"),
    "fewer rows than ids": ("StarwireSumRows", [([1, 1], INTS), ([[1.0]], FLOATS), ([1], INTS), ([0, 0], INTS)], "InvalidArgumentError: .*data.shape"),
    "more positions than rows": ("StarwireSumRows", [([1], INTS), ([[1.0]], FLOATS), ([1], INTS), ([0, 0], INTS)], "InternalError: .*1 rows, but 2 positions"),
    "an id that is not there": ("StarwireSumRows", [([1], INTS), ([[1.0]], FLOATS), ([1], INTS), ([1], INTS)], "InternalError: .*got 1 ids, but needs id 1"),
    "a position below zero": ("StarwireSumRows", [([1], INTS), ([[1.0]], FLOATS), ([1], INTS), ([-1], INTS)], "InternalError: .*got 1 ids, but needs id -1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_inputs_that_do_not_fit_are_errors(cluster, name):
    op, inputs, expected = WRONG[name]
    assert re.match(f"(?s){expected}", cluster["worker", 0].call(error_of, op, inputs))


@pytest.fixture
def training(compared):
    return compared.stock(chief, freeze_training, "Adagrad", True)


def test_a_lookup_and_its_gradient_send_the_same_ids(cluster, training):
    nodes = chief(cluster, nodes_of_training, training)
    # Partitioned tables split their ids on the worker, before the lookups.
    assert nodes["StarwireUniqueIds"] == nodes["StarwireCopyRows"] == nodes["StarwireSumRows"] == 10, nodes


@pytest.mark.parametrize("op", ["Unique", "UnsortedSegmentSum", "ResourceGather"])
def test_watch_on_what_was_replaced_is_an_error(cluster, training, op):
    assert re.match(r"(?s)UnimplementedError: .*a debugger watches .*starwire\.config\(star=False\)", chief(cluster, nodes_of_training, training, op))
