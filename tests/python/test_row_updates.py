"""Sparse updates by starwire's kernels: the same bits, and the same errors, as by TensorFlow's."""

import re

import pytest

from cluster import is_tensorflow_1, one, tf
from row_kernels import LABEL, label, unusual
from sparse_training import train_sparse
from steps import tensorflow_minor

pytestmark = pytest.mark.ours


# In a worker process. -------------------------------------------------------------------------------------------------

SLOTS, NESTEROV = ([({name: value}, {}) for value in (True, False)] for name in ("update_slots", "use_nesterov"))
SCALED = "multiply_linear_by_lr"  # since 2.2
FTRL = [
    ({}, {}),
    ({SCALED: True}, {}),
    ({SCALED: False}, {"l1": 0.0, "l2": 0.0, "l2_shrinkage": 0.0}),
    ({SCALED: True}, {"l1": 0.0, "l2": 0.0, "l2_shrinkage": 0.0}),
    ({SCALED: False}, {"l1": float("inf"), "lr": 1e-30}),
    ({SCALED: True}, {"l2": float("inf"), "l1": 1e-39, "lr": 1e-39}),
    ({SCALED: False}, {"lr_power": -0.7}),
    ({SCALED: True}, {"lr_power": 0.0}),
]
if is_tensorflow_1():
    FTRL = [({}, numbers) for attrs, numbers in FTRL if not attrs.get(SCALED)]
# By name: the number of tables, the inputs after them (rows are "grad"), and what to vary: attributes, numbers.
UPDATES = {
    "SparseApplyAdagrad": (2, ("lr", "grad", "indices"), SLOTS),
    "SparseApplyAdagradV2": (2, ("lr", "epsilon", "grad", "indices"), SLOTS),
    "SparseApplyMomentum": (2, ("lr", "grad", "indices", "momentum"), NESTEROV),
    "SparseApplyKerasMomentum": (2, ("lr", "grad", "indices", "momentum"), NESTEROV),
    "SparseApplyFtrl": (3, ("grad", "indices", "lr", "l1", "l2", "lr_power"), FTRL),
    "SparseApplyFtrlV2": (3, ("grad", "indices", "lr", "l1", "l2", "l2_shrinkage", "lr_power"), FTRL),
    "ScatterAdd": (1, ("indices", "grad"), [({}, {})]),
    "ScatterSub": (1, ("indices", "grad"), [({}, {})]),
}


NO_REFERENCES = ("SparseApplyKerasMomentum",)


def is_scatter(op):
    return op.startswith("Scatter")


def numbers_of(op):
    """The inputs that are scalars, with usual values."""
    names = [name for name in UPDATES[op][1] if name not in ("grad", "indices")]
    return {name: -0.5 if name == "lr_power" else 0.1 * (at + 1) for at, name in enumerate(names)}


# By name: the shape of the tables, the ids. The rows are as many as the ids.
SHAPES = {
    "one": ((3,), [1]),
    "one element each": ((40, 1), [3, 3, 39, 0, 17, 3]),
    "vectors of no dimension": ((40,), [3, 3, 39, 0, 17, 3]),
    "narrow": ((9, 3), [0, 8, 8, 1]),
    "a vector": ((9, 8), [0, 8, 8, 1]),
    "a vector and a rest": ((9, 13), [5, 5, 5, 5, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8]),
    "wide": ((5, 300), [4, 0, 4]),
    "three dimensions": ((6, 2, 5), [5, 0, 1, 5]),
    "no ids": ((4, 4), []),
    # On several threads, where TensorFlow's kernels may overwrite each other's updates if an id repeats: none does.
    "many": ((5000, 16), None),
    "many with a rest": ((5000, 33), None),
}


def cases_of(op):
    """Attributes, numbers, and the name of a shape. Unusual numbers are not tried on many rows, which takes long."""
    return [(attrs, numbers, name) for attrs, numbers in UPDATES[op][2] for name, (_, ids) in SHAPES.items() if ids is not None or not numbers]


def make(op, dtype, ids_dtype, use_resource, labelled, attrs, state, **given):
    """The update and its variables, with placeholders for whatever else it takes and is not given: {name: placeholder}."""
    feeds = {name: given[name] if name in given else one().placeholder(ids_dtype if name == "indices" else dtype) for name in UPDATES[op][1]}
    tables = [one().Variable(value, use_resource=use_resource, name=f"table{at}", validate_shape=False) for at, value in enumerate(state)]
    graph = one().get_default_graph()
    refs = [table.handle if use_resource else table._ref() for table in tables]
    types = {"dtype" if use_resource and is_scatter(op) else "T": dtype, "Tindices": ids_dtype}
    values = {name: one().AttrValue(type=tf.as_dtype(kind).as_datatype_enum) for name, kind in types.items()}
    values = {**values, **{name: one().AttrValue(b=value) for name, value in attrs.items()}, **label(labelled)}
    made = graph.create_op(("Resource" if use_resource else "") + op, [*refs, *feeds.values()], [] if use_resource else [refs[0].dtype], name="update", attrs=values)
    return made, tables, feeds


class Updates:
    """The update of tables of any shape, in a session of its own."""

    def __init__(self, labelled, op, dtype, ids_dtype, use_resource, attrs):
        with tf.Graph().as_default() as graph:
            self.first = [one().placeholder(dtype) for _ in range(UPDATES[op][0])]
            self.update, self.tables, self.feeds = make(op, dtype, ids_dtype, use_resource, labelled, attrs, self.first)
            self.initializer = one().global_variables_initializer()
        self.session = one().Session(graph=graph)

    def after(self, state, steps):
        """The tables after each update, as bytes. The first update of a resource variable in a session is always TensorFlow's."""
        import numpy as np

        self.session.run(self.initializer, dict(zip(self.first, state)))
        seen = []
        for values in steps:
            self.session.run(self.update, {self.feeds[name]: values[name] for name in self.feeds})
            # Of two NaN with different signs, the result has either, as compilers order the operands.
            seen.append([np.where(np.isnan(value), value.dtype.type(np.nan), value).tobytes() for value in self.session.run(self.tables)])
        return seen


def values_of(op, dtype, numbers, shape, ids):
    """Tables, and what three updates take."""
    import numpy as np

    rng = np.random.default_rng(5)
    state = [unusual(rng, shape, dtype, positive=at == 1) for at in range(UPDATES[op][0])]
    scalars = {name: np.asarray(number, tf.as_dtype(dtype).as_numpy_dtype) for name, number in {**numbers_of(op), **numbers}.items()}
    steps = []
    for _ in range(3):
        some = rng.permutation(shape[0])[:4500] if ids is None else ids
        steps.append({"grad": unusual(rng, (len(some), *shape[1:]), dtype), "indices": some, **scalars})
    return state, steps


def differences(op, dtype, ids_dtype, use_resource):
    """The cases in which our kernel leaves other bits than TensorFlow's, and the number of cases."""
    differ, cases, made = [], cases_of(op), {}
    for at, (attrs, numbers, name) in enumerate(cases):
        if not (use_resource and is_scatter(op)):
            attrs = {**attrs, "use_locking": at % 2 == 0}
        key = str(attrs)
        if key not in made:
            made[key] = [Updates(labelled, op, dtype, ids_dtype, use_resource, attrs) for labelled in (True, False)]
        ours, theirs = (updates.after(*values_of(op, dtype, numbers, *SHAPES[name])) for updates in made[key])
        if ours != theirs:
            differ.append((name, attrs, numbers))
    for updates in [one for pair in made.values() for one in pair]:
        updates.session.close()
    return differ, len(cases)


def error_of(labelled, op, use_resource, shapes, ids, initialised=True, twice=False, numbers={}):
    """What goes wrong, by name of the input that does not fit; and the tables afterwards."""
    import numpy as np

    count = UPDATES[op][0]
    with tf.Graph().as_default():
        state = [np.ones(shapes.get(f"table{at}", (4, 3)), np.float32) for at in range(count)]
        try:
            update, tables, feeds = make(op, "float32", "int32", use_resource, labelled, {}, state)
        except ValueError as error:
            return str(error).replace(f', _kernel="{LABEL}"', "")  # found before anything runs
        with one().Session() as sess:
            if initialised:
                sess.run(one().global_variables_initializer())
            good = {"grad": np.ones((2, 3), np.float32), "indices": [0, 1], **{name: np.float32(number) for name, number in numbers_of(op).items()}}
            bad = {**good, "indices": ids, **numbers, **{name: np.ones(shape, np.float32) for name, shape in shapes.items() if name in feeds}}
            try:
                # In the mode that sparse updates leave a variable in.
                for values in ([good] if twice else []) + [bad]:
                    sess.run(update, {feeds[name]: value for name, value in values.items()})
            except tf.errors.OpError as error:
                return error.message, [value.tolist() for value in sess.run(tables)] if initialised else None
            return "no error"


def errors(*args):
    return [error_of(labelled, *args) for labelled in (False, True)]


def overlapping(labelled, op, use_resource):
    """Updates of a table by its own rows, as its own accumulator."""
    import numpy as np

    count = UPDATES[op][0]
    with tf.Graph().as_default() as graph:
        table = one().Variable(np.arange(1, 33, dtype=np.float32).reshape(4, 8), use_resource=use_resource)
        ref = table.handle if use_resource else table._ref()
        rows = tf.identity(ref)[1:3] if not use_resource else table.read_value()[1:3]
        inputs = [{"grad": rows, "indices": tf.constant([2, 2])}.get(name, tf.constant(-0.5 if name == "lr_power" else 0.5)) for name in UPDATES[op][1]]
        attrs = {"dtype" if use_resource and is_scatter(op) else "T": one().AttrValue(type=tf.float32.as_datatype_enum), "Tindices": one().AttrValue(type=tf.int32.as_datatype_enum), **label(labelled)}
        update = graph.create_op(("Resource" if use_resource else "") + op, [*[ref] * count, *inputs], [] if use_resource else [ref.dtype], attrs=attrs)
        with one().Session() as sess:
            sess.run(table.initializer)
            for _ in range(3):
                sess.run(update)
            return sess.run(table).tobytes()


def both_overlapping(*args):
    return [overlapping(labelled, *args) for labelled in (False, True)]


FAR = 2**31 - 1  # a row that lies in nobody's memory


def updates_while_ids_change(op):
    """The numbers of updates that were made and refused while another step wrote the ids."""
    import threading

    import numpy as np

    count = 50_000
    with tf.Graph().as_default():
        state = [np.ones((4, 4), np.float32)] * UPDATES[op][0]
        ids = one().Variable(np.ones(count, np.int32), use_resource=False)
        to_far, back = (change(ids, np.full(count, FAR - 1, np.int32)) for change in (one().assign_add, one().assign_sub))
        update, tables, feeds = make(op, "float32", "int32", False, True, {}, state, indices=ids._ref())
        rest = {"grad": np.ones((count, 4), np.float32), **{name: np.float32(number) for name, number in numbers_of(op).items()}}
        made = refused = 0
        with one().Session() as sess:
            sess.run(one().global_variables_initializer())
            is_over = threading.Event()

            def write():
                while not is_over.is_set():
                    sess.run(to_far.op)
                    sess.run(back.op)

            writer = threading.Thread(target=write)
            writer.start()
            try:
                while min(made, refused) < 100:
                    try:
                        sess.run(update, {feeds[name]: value for name, value in rest.items()})
                        made += 1
                    except tf.errors.InvalidArgumentError:
                        refused += 1
            finally:
                is_over.set()
                writer.join()
            return made, refused


# Tests. ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worker(make_cluster):
    return make_cluster((("worker", 1),), protocol="grpc++")["worker", 0]


# Before 2.13, TensorFlow computes some square roots otherwise; servers find that out in a trial, and leave the updates to its kernels.
OTHERS = {("SparseApplyAdagrad", "float32")} if tensorflow_minor() < (2, 13) else set()
if is_tensorflow_1():
    OTHERS |= {(op, "float32") for op in ("SparseApplyAdagradV2", "SparseApplyFtrl", "SparseApplyFtrlV2")}
PAIRS = [(op, kind) for op in UPDATES for kind in (True, False) if kind or op not in NO_REFERENCES]
OPS = pytest.mark.parametrize("op, use_resource", PAIRS)


OTHER_PAIR = pytest.mark.deep(reason="the arithmetic depends on the type of the rows, the check of ids on the type of the ids: each once")
TYPES = [("float32", "int32"), ("float64", "int64"), *(pytest.param(*types, marks=OTHER_PAIR) for types in (("float32", "int64"), ("float64", "int32")))]


@pytest.mark.quick(lambda of: of["dtype"] == "float32" or of["use_resource"], reason="a kernel finds the variable by its kind, and the rows by their type: each once")
@OPS
@pytest.mark.parametrize("dtype, ids_dtype", TYPES)
def test_updates_have_the_same_bits(worker, op, dtype, ids_dtype, use_resource):
    if (op, dtype) in OTHERS:
        pytest.skip("this TensorFlow computes square roots otherwise")
    assert worker.call(differences, op, dtype, ids_dtype, use_resource, timeout=240) == ([], len(cases_of(op)))


WRONG = {
    "an id too large": ({}, [1, 4]),
    "an id below zero": ({}, [-1, 1]),
    "more ids than rows": ({}, [0, 1, 2]),
    "ids of two dimensions": ({}, [[0, 1]]),
    "rows of another width": ({"grad": (2, 4)}, [0, 1]),
    "tables of different shapes": ({"table1": (4, 2)}, [0, 1]),
    "a table of no dimension": ({"table0": (), "table1": ()}, [0, 1]),
    "rows of no elements": ({"table0": (4, 0), "table1": (4, 0), "grad": (2, 0)}, [0, 1]),
    "a rate for each row": ({"lr": (2,)}, [0, 1]),
    "a third table of another shape": ({"table2": (4, 2)}, [0, 1]),
    "a power for each row": ({"lr_power": (2,)}, [0, 1]),
    "a rate of zero": ({}, [0, 1], {"lr": 0.0}),
    "a rate that is no number": ({}, [0, 1], {"lr": float("nan")}),
    "l1 below zero": ({}, [0, 1], {"l1": -0.1}),
    "l1 that is no number": ({}, [0, 1], {"l1": float("nan")}),
    "l2 below zero": ({}, [0, 1], {"l2": -0.1}),
    "shrinkage below zero": ({}, [0, 1], {"l2_shrinkage": -0.1}),
    "a power above zero": ({}, [0, 1], {"lr_power": 0.5}),
}


def concerns(op, name):
    """Whether the operation has all inputs that do not fit."""
    tables, inputs, _ = UPDATES[op]
    shapes, _, *numbers = WRONG[name]
    has = {"table0", "table1", *(f"table{at}" for at in range(tables)), *inputs}
    return has >= {key for values in (shapes, *numbers) for key in values if key != "lr"}


ALWAYS = ("an id too large", "an id below zero", "more ids than rows")


@pytest.mark.parametrize("op, use_resource, name", [(*pair, name) for pair in PAIRS for name in WRONG if concerns(pair[0], name)])
def test_what_does_not_fit_is_the_same_error(worker, op, use_resource, name):
    shapes, ids, *numbers = WRONG[name]
    numbers = {key: value for values in numbers for key, value in values.items() if key in UPDATES[op][1]}
    twice = not any(key.startswith("table") for key in shapes)
    theirs, ours = worker.call(errors, op, use_resource, shapes, ids, True, twice, numbers, timeout=60)
    assert ours == theirs
    # Operations on resources of 1.15 do not look.
    unnoticed = is_tensorflow_1() and use_resource and op.startswith("Scatter") and name == "more ids than rows"
    assert theirs != "no error" or name not in ALWAYS or unnoticed


@OPS
def test_a_variable_without_a_value_is_the_same_error(worker, op, use_resource):
    theirs, ours = worker.call(errors, op, use_resource, {}, [0, 1], False, timeout=60)
    assert ours == theirs != "no error"


@OPS
def test_overlapping_tables_have_the_same_bits(worker, op, use_resource):
    theirs, ours = worker.call(both_overlapping, op, use_resource, timeout=60)
    assert ours == theirs


@pytest.mark.parametrize("op", ["ScatterAdd", "SparseApplyAdagrad"])
def test_ids_that_change_meanwhile_write_no_other_memory(worker, op):
    made, refused = worker.call(updates_while_ids_change, op, timeout=120)
    assert min(made, refused) >= 100


USED = {"KerasMomentum": {"ResourceSparseApplyKerasMomentum"}, "Adagrad": {"SparseApplyAdagrad"}, "Momentum": {"SparseApplyMomentum"}, "GradientDescent": {"ScatterSub"}, "Ftrl": {"SparseApplyFtrl"}}


@pytest.mark.parametrize("name, use_resource", [(name, kind) for name in USED for kind in (True, False) if kind or "Keras" not in name])
def test_servers_use_them_unless_switched_off(make_cluster, name, use_resource):
    results, used = [], []
    for switch in ("true", "false"):
        # A server logs once which updates its kernels make, of either kind of variables.
        cluster = make_cluster((("ps", 2), ("worker", 1)), protocol="star_server", environment={"STARWIRE_ROW_UPDATES": switch, "KIND": use_resource})
        servers = [cluster["ps", at] for at in range(2)]
        starts = [server.log_size() for server in servers]
        results.append(cluster["worker", 0].call(train_sparse, cluster.target("worker", 0), name, use_resource, timeout=120))
        text = "".join(server.full_log()[start:] for server, start in zip(servers, starts))
        used.append(set(re.findall(r"starwire's kernels make the sparse updates of (\w+) \((\w+)\)", text)))
    ops = {"ScatterAdd"} if name == "GradientDescent" and use_resource else USED[name]
    assert used == [{(op, kind) for op in ops for kind in ("float", "double") if (op, f"{kind}32") not in OTHERS}, set()]
    assert results[0] == results[1]
