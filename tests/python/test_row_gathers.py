"""Rows of embeddings gathered by starwire's kernels: the same bits, and the same errors, as by TensorFlow's."""

import pytest

from cluster import one, tf
from row_kernels import label, unusual

pytestmark = pytest.mark.ours

# In a worker process. -------------------------------------------------------------------------------------------------

# By name: the shape of the table, the ids (None: many), the axis (tensors only), the number of batch dimensions.
GATHERS = {
    "one": ((3,), [1], 0, 0),
    "vectors of no dimension": ((40,), [3, 3, 39, 0, 17, 3], 0, 0),
    "one element each": ((40, 1), [3, 3, 39, 0, 17, 3], 0, 0),
    "two elements": ((40, 2), [3, 3, 39, 0, 17, 3], 0, 0),
    "a line": ((90, 16), list(range(89, -1, -1)), 0, 0),
    "longer than what is fetched ahead": ((50, 300), list(range(50)) * 2, 0, 0),
    "an odd width": ((9, 13), [5, 5, 5, 5, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8], 0, 0),
    "three dimensions": ((6, 2, 5), [5, 0, 1, 5], 0, 0),
    "ids of two dimensions": ((9, 4), [[0, 8], [8, 1]], 0, 0),
    "one id": ((9, 4), 7, 0, 0),
    "no ids": ((4, 4), [], 0, 0),
    "no elements": ((4, 0), [1, 2], 0, 0),
    "an empty table": ((0, 3), [], 0, 0),
    "more than eight dimensions": ((5, 1, 1, 1, 1), [[[[[4]]]]], 0, 0),
    "on several threads": ((5000, 33), None, 0, 0),
    "along another dimension": ((5, 6), [4, 0, 3], 1, 0),
    "along the last dimension": ((5, 6), [4, 0, 3], -1, 0),
    "in batches": ((2, 6), [[5, 0, 3], [1, 1, 2]], 1, 1),
    # Errors.
    "an id too large": ((4, 3), [1, 4], 0, 0),
    "an id below zero": ((4, 3), [-1, 1], 0, 0),
    "an id in an empty table": ((0, 3), [0], 0, 0),
    "a table of no dimension": ((), [0], 0, 0),
    "more batch dimensions than ids have": ((2, 6), [1], 1, 2),
}
ERRORS = ("an id too large", "an id below zero", "an id in an empty table", "a table of no dimension", "more batch dimensions than ids have")


def gather(labelled, is_variable, dtype, table, ids, axis, batch_dims):
    types = {"dtype": dtype} if is_variable else {"Tparams": dtype, "Taxis": tf.int32}
    attrs = {name: one().AttrValue(type=tf.as_dtype(kind).as_datatype_enum) for name, kind in {**types, "Tindices": ids.dtype}.items()}
    attrs = {**attrs, "batch_dims": one().AttrValue(i=batch_dims), **label(labelled)}
    inputs = [table, ids] if is_variable else [table, ids, tf.constant(axis)]
    return one().get_default_graph().create_op("ResourceGather" if is_variable else "GatherV2", inputs, [dtype], name="gather", attrs=attrs).outputs[0]


def gathered(labelled, is_variable, dtype, ids_dtype, shape, ids, axis, batch_dims, initialised=True):
    """What two gathers return, as bytes, or the error. The first one of a variable is always TensorFlow's."""
    import numpy as np

    rng = np.random.default_rng(5)
    some = rng.integers(0, shape[0], 4500) if ids is None else ids
    values = unusual(rng, shape, dtype)
    with tf.Graph().as_default():
        feed_ids = one().placeholder(ids_dtype)
        if is_variable:
            variable = one().Variable(values, use_resource=True, validate_shape=False)
            table, feeds = variable.handle, {feed_ids: some}
        else:
            table = one().placeholder(dtype)
            feeds = {feed_ids: some, table: values}
        try:
            rows = gather(labelled, is_variable, tf.as_dtype(dtype), table, feed_ids, axis, batch_dims)
        except ValueError as error:
            return str(error).replace(', _kernel="starwire"', "")  # found before anything runs
        with one().Session() as sess:
            if initialised:
                sess.run(one().global_variables_initializer())
            try:
                return [(value.shape, value.tobytes()) for value in (sess.run(rows, feeds) for _ in range(2))]
            except tf.errors.OpError as error:
                return error.message


def differences(is_variable, dtype, ids_dtype):
    """The gathers with another outcome, and those that fail."""
    differ, failed = [], []
    for name, how in GATHERS.items():
        theirs, ours = (gathered(labelled, is_variable, dtype, ids_dtype, *how) for labelled in (False, True))
        differ += [name] if ours != theirs else []
        failed += [name] if isinstance(theirs, str) else []
    return differ, failed


def without_value():
    return [gathered(labelled, True, "float32", "int32", (4, 3), [1], 0, 0, False) for labelled in (False, True)]


# Tests. ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worker(make_cluster):
    return make_cluster((("worker", 1),), protocol="grpc++")["worker", 0]


@pytest.mark.parametrize("ids_dtype", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("is_variable", [True, False], ids=["variable", "tensor"])
def test_gathers_have_the_same_bits_and_errors(worker, is_variable, dtype, ids_dtype):
    differ, failed = worker.call(differences, is_variable, dtype, ids_dtype, timeout=120)
    assert differ == []
    assert set(failed) <= set(ERRORS) and {"an id too large", "an id below zero"} <= set(failed)


def test_a_variable_without_a_value_is_the_same_error(worker):
    theirs, ours = worker.call(without_value, timeout=60)
    assert ours == theirs and isinstance(theirs, str)
