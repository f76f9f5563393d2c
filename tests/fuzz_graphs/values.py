"""Stateless operations."""

import functools
import operator

from program import COMPLEX, FLOATS, INTS, NUMBERS, REAL, lit, odd_numbers

DTYPES = ("float32", "float64", "int32", "int64", "int8", "uint8", "int16", "bool", "complex64", "float16", "bfloat16", "string")
SIGNED = FLOATS + ("int8", "int16", "int32", "int64")
# Operations whose output may be the buffer of an input.
MAY_ALIAS = {"Identity", "StopGradient", "Reshape", "ExpandDims", "Squeeze", "Switch", "Merge", "Slice", "Sum", "Max", "Pack", "Tile", "Transpose", "ReverseV2", "Cast", "Concat", "IdentityN", "Split", "BroadcastTo"}


def constant(g, dtype, shape, dev):
    count = 1
    for n in shape:
        count *= n
    if count > 100 or not count:
        return g.emit("Fill", dev, {"dims": lit("int32", list(shape)), "value": lit(dtype, literal(g, dtype))}, out=[(dtype, shape)])[0]
    flat = [literal(g, dtype) for _ in range(count)]
    return g.emit("Const", dev, attr={"value": [dtype, nest(flat, list(shape))]}, out=[(dtype, shape)])[0]


def nest(flat, shape):
    if not shape:
        return flat[0]
    if 0 in shape:
        # numpy keeps the trailing dimensions of nested empty lists only if they are spelled out
        return [nest([], shape[1:]) for _ in range(shape[0])] if shape[0] else []
    size = len(flat) // shape[0]
    return [nest(flat[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]


def literal(g, dtype):
    if g.odd and g.chance(0.4):
        found = odd_numbers(dtype)
        if found:
            return g.rng.choice(found)
    if dtype == "bool":
        return g.chance(0.5)
    if dtype == "string":
        return g.rng.choice(("", "a", "bc", "x" * 40, "\x00\xff"))
    if g.fine and dtype in FLOATS and g.chance(0.7):
        return g.rng.choice((1e-38, 1e-40, -3e-39)) if g.chance(0.1) else g.rng.uniform(-2, 2)
    return g.rng.randint(0 if dtype.startswith("uint") else -5, 9)


def make(g, dtype, shape, dev):
    """Creates a value of that type."""
    how = g.rng.random()
    if how < 0.3 and len(g.scopes) == 1:
        value = fed(g, dtype, shape, dev)
        g.scope.values.append(value)
        return value
    if how < 0.6 or 0 in shape:
        if 0 in shape:
            return g.emit("Fill", dev, {"dims": lit("int32", list(shape)), "value": lit(dtype, literal(g, dtype))}, out=[(dtype, shape)])[0]
        return constant(g, dtype, shape, dev)
    source = g.pick(dev, lambda v: v.dtype in REAL and v.dtype != dtype or (v.dtype in REAL and v.shape != shape))
    if source is None:
        return constant(g, dtype, shape, dev)
    return convert(g, source, dtype, shape, dev)


def fed(g, dtype, shape, dev):
    from generate import Val

    number = g.record("@feed", dev, out=[(dtype, shape)])
    return Val(f"{number}:0", dtype, tuple(shape), dev)


def convert(g, source, dtype, shape, dev):
    value = source
    if value.shape != tuple(shape):
        if value.shape:
            value = g.emit("Sum", dev, {"input": value, "axis": lit("int32", list(range(len(value.shape))))}, out=[(value.dtype, ())], alias=True)[0]
    if dtype == "string" and value.dtype in FLOATS and any("SparseApply" in record["op"] for scope in g.scopes for record in scope.records):
        value = constant(g, "string", value.shape, dev)  # the sign of a NaN: see remote.py
    elif dtype == "string":
        value = g.emit("AsString", dev, {"input": value}, out=[("string", value.shape)])[0] if value.dtype not in ("uint8", "uint16", "float16", "bfloat16") else constant(g, "string", value.shape, dev)
    elif dtype == "bool":
        value = g.emit("Less", dev, {"x": value, "y": lit(value.dtype, 3)}, out=[("bool", value.shape)])[0]
    elif dtype != value.dtype:
        value = g.emit("Cast", dev, {"x": value}, {"DstT": dtype}, out=[(dtype, value.shape)])[0]
    if value.shape != tuple(shape):
        value = g.emit("Fill", dev, {"dims": lit("int32", list(shape)), "value": value}, out=[(dtype, shape)])[0]
    return value


def predicate(g, dev):
    """Returns a boolean scalar that usually differs from step to step."""
    how = g.rng.random()
    if how < 0.3:
        found = g.pick(dev, lambda v: v.dtype == "bool" and v.shape == () and not v.alias)
        if found:
            return found
    if how < 0.6 and len(g.scopes) == 1:
        value = fed(g, "bool", (), dev)
        g.scope.values.append(value)
        return value
    source = g.pick(dev, lambda v: v.dtype in REAL)
    if source is None:
        return g.emit("Const", dev, attr={"value": ["bool", g.chance(0.5)]}, out=[("bool", ())])[0]
    small = convert(g, source, "int32", (), dev)
    rest = g.emit("FloorMod", dev, {"x": small, "y": lit("int32", g.rng.choice((2, 3)))}, out=[("int32", ())])[0]
    return g.emit("Equal", dev, {"x": rest, "y": lit("int32", 0)}, out=[("bool", ())])[0]


def index(g, limit, shape, dev, dtype="int32"):
    """Returns integers from 0 to limit - 1."""
    if g.chance(0.4):
        count = shape[0] if shape else 1
        flat = [g.rng.randrange(limit) for _ in range(count)]
        return lit(dtype, flat if shape else flat[0])
    part = len(shape) == 1 and g.chance(0.3)
    whole = (shape[0] + 1,) if part else shape
    source = g.want(dtype, whole, dev)
    found = g.emit("FloorMod", dev, {"x": source, "y": lit(dtype, limit)}, out=[(dtype, whole)], feedable=False)[0]
    if not part:
        return found
    return g.emit("Slice", dev, {"input": found, "begin": lit("int32", [1]), "size": lit("int32", list(shape))}, out=[(dtype, shape)], feedable=False)[0]


def any_value(g, dev, accept=lambda v: True):
    found = g.pick(dev, accept)
    return found or g.want(g.rng.choice(g.dtypes), g.rng.choice(g.shapes), dev, fresh=True)


def unary(g, dev, v):
    choices = ["Identity", "StopGradient", "ZerosLike"]
    if v.dtype in NUMBERS:
        choices += ["Square"]
    if v.dtype in SIGNED + COMPLEX:
        choices += ["Neg", "Neg"]
    if v.dtype in SIGNED:
        choices += ["Abs", "Sign"]
    if v.dtype == "bool":
        choices += ["LogicalNot"] * 3
    op = g.rng.choice(choices)
    name = {"Identity": "input", "StopGradient": "input"}.get(op, "x")
    return g.emit(op, dev, {name: v}, out=[(v.dtype, v.shape)], alias=op in MAY_ALIAS)


def binary(g, dev, v):
    other = g.want(v.dtype, v.shape, dev)
    if v.dtype == "bool":
        return g.emit(g.rng.choice(("LogicalAnd", "LogicalOr")), dev, {"x": v, "y": other}, out=[("bool", v.shape)])
    if v.dtype == "string":
        return g.emit("StringJoin", dev, {"inputs": [v, other]}, out=[("string", v.shape)])
    choices = ["AddV2", "Sub", "Mul"]
    if v.dtype in REAL:
        choices += ["Maximum", "Minimum"]
    if v.dtype in INTS:
        choices += ["BitwiseXor"]
    return g.emit(g.rng.choice(choices), dev, {"x": v, "y": other}, out=[(v.dtype, v.shape)])


def compare(g, dev, v):
    other = g.want(v.dtype, v.shape, dev)
    op = g.rng.choice(("Less", "GreaterEqual", "Equal", "NotEqual")) if v.dtype in REAL else "Equal"
    return g.emit(op, dev, {"x": v, "y": other}, out=[("bool", v.shape)])


def add_n(g, dev, v):
    """The order in which AddN adds depends on which of its inputs nobody else holds. Of others than these two kinds, TensorFlow does not determine it."""
    if v.dtype not in NUMBERS:
        return unary(g, dev, v)
    inputs = [g.emit("Square", dev, {"x": v}, out=[(v.dtype, v.shape)], pool=False)[0]]
    for _ in range(g.rng.choice((1, 2, 2, 2, 3, 9))):
        one = g.want(v.dtype, v.shape, dev)
        inputs.append(constant(g, v.dtype, v.shape, dev) if g.chance(0.5) else g.emit("Square", dev, {"x": one}, out=[(v.dtype, v.shape)], pool=False)[0])
    for one in inputs:
        # If it is fed, whether its buffer is free is a race.
        one.feedable = False
    g.rng.shuffle(inputs)
    return g.emit("AddN", dev, {"inputs": inputs}, out=[(v.dtype, v.shape)])


def layer(g, dev, v):
    """Operations that TensorFlow may run with kernels of oneDNN, or that round."""
    if v.dtype != "float32" or 0 in v.shape or len(v.shape) > 2:
        return unary(g, dev, v)
    op = g.rng.choice(("Softmax", "LogSoftmax", "BiasAdd", "MatMul", "MatMul", "Tanh", "Sigmoid", "Relu", "Exp", "Mean") if len(v.shape) == 2 else ("Tanh", "Sigmoid", "Relu", "Exp"))
    if op in ("Softmax", "LogSoftmax"):
        return g.emit(op, dev, {"logits": v}, out=[(v.dtype, v.shape)])
    if op == "BiasAdd":
        return g.emit(op, dev, {"value": v, "bias": g.want(v.dtype, v.shape[1:], dev)}, out=[(v.dtype, v.shape)])
    if op == "MatMul":
        other = g.want(v.dtype, v.shape, dev)
        return g.emit(op, dev, {"a": v, "b": other}, {"transpose_b": True}, out=[(v.dtype, (v.shape[0], v.shape[0]))])
    if op == "Mean":
        return g.emit(op, dev, {"input": v, "axis": lit("int32", 0)}, out=[(v.dtype, v.shape[1:])])
    name = "features" if op == "Relu" else "x"
    return g.emit(op, dev, {name: v}, out=[(v.dtype, v.shape)])


def select(g, dev, v):
    condition = g.want("bool", g.rng.choice((v.shape, ())), dev)
    other = g.want(v.dtype, v.shape, dev)
    return g.emit("SelectV2", dev, {"condition": condition, "t": v, "e": other}, out=[(v.dtype, v.shape)])


def reshape(g, dev, v):
    if not v.shape:
        return g.emit("ExpandDims", dev, {"input": v, "axis": lit("int32", 0)}, out=[(v.dtype, (1,))], alias=True)
    count = 1
    for n in v.shape:
        count *= n
    return g.emit("Reshape", dev, {"tensor": v, "shape": lit("int32", [count])}, out=[(v.dtype, (count,))], alias=True)


def gather(g, dev, v):
    if not v.shape or not v.shape[0]:
        return unary(g, dev, v)
    count = g.rng.choice((1, 2, 3, 40))
    axis = g.rng.choice((0, 0, 0, len(v.shape) - 1 if v.shape[-1] else 0))
    at = index(g, v.shape[axis], (count,), dev, g.rng.choice(("int32", "int64")))
    ins = {"params": v, "indices": at, "axis": lit(g.rng.choice(("int32", "int64")), axis)}
    return g.emit("GatherV2", dev, ins, out=[(v.dtype, v.shape[:axis] + (count,) + v.shape[axis + 1 :])])


def concat(g, dev, v):
    if not v.shape:
        return g.emit("Pack", dev, {"values": [v, g.want(v.dtype, v.shape, dev)]}, out=[(v.dtype, (2,))], alias=True)
    other = g.want(v.dtype, v.shape, dev)
    return g.emit("ConcatV2", dev, {"values": [v, other], "axis": lit("int32", 0)}, out=[(v.dtype, (v.shape[0] * 2,) + v.shape[1:])], alias=True)


def reduce(g, dev, v):
    if v.dtype not in REAL or not v.shape:
        return unary(g, dev, v)
    return g.emit(g.rng.choice(("Sum", "Max")), dev, {"input": v, "axis": lit("int32", list(range(len(v.shape))))}, out=[(v.dtype, ())], alias=True)


def several(g, dev, v):
    """Operations with several outputs."""
    if v.shape and v.shape[0] in (2, 3, 4):
        return g.emit("Split", dev, {"axis": lit("int32", 0), "value": v}, {"num_split": v.shape[0]}, out=[(v.dtype, (1,) + v.shape[1:])] * v.shape[0], alias=True)
    other = any_value(g, dev)
    return g.emit("IdentityN", dev, {"input": [v, other]}, out=[(v.dtype, v.shape), (other.dtype, other.shape)], alias=True)


def switch(g, dev, v):
    """Moves a value into the current branch."""
    if not g.guard or v.guard == g.guard or g.scope.functional:
        return unary(g, dev, v)
    pred, branch = g.guard[-1]
    if v.guard != g.guard[:-1]:
        return unary(g, dev, v)
    made = g.emit("Switch", dev, {"data": v, "pred": g.scope.preds[pred]}, out=[(v.dtype, v.shape)] * 2, alias=True, pin=False)
    for side, value in enumerate(made):
        value.guard = g.guard[:-1] + ((pred, side),)
        value.feedable = False
    return made


def lists(g, dev, v):
    """Sends a variant to another task."""
    if not v.shape or v.dtype == "bool":
        return unary(g, dev, v)
    there = g.device()
    made = g.emit("TensorListFromTensor", dev, {"tensor": v, "element_shape": _shape(v.shape[1:])}, out=[("variant", ())])[0]
    return g.emit("TensorListStack", there, {"input_handle": made, "element_shape": _shape(v.shape[1:])}, {"element_dtype": v.dtype, "num_elements": v.shape[0]}, out=[(v.dtype, v.shape)])


def wide(g):
    """Passes hundreds or thousands of tensors between tasks in one step."""
    count = g.rng.choice((40, 200, 200, 1000, 3000) if g.chance(0.9) else (9000,))
    here, there, last = g.device(), g.device(), g.device()
    numbers = g.emit("Range", here, {"start": lit("int32", 0), "limit": lit("int32", count), "delta": lit("int32", 1)}, out=[("int32", (count,))], pool=False)[0]
    whole = g.emit("AddV2", here, {"x": numbers, "y": g.want("int32", (), here)}, out=[("int32", (count,))])[0]
    pieces = g.emit("Split", here, {"axis": lit("int32", 0), "value": whole}, {"num_split": count}, out=[("int32", (1,))] * count, pool=False)
    for at in g.rng.sample(range(count), g.rng.choice((0, 1, 20, 40))):
        pieces[at] = g.emit("Neg", there, {"x": pieces[at]}, out=[("int32", (1,))], pool=False)[0]
    g.emit("ConcatV2", last, {"values": pieces, "axis": lit("int32", 0)}, out=[("int32", (count,))])


def _shape(shape):
    return lit("int32", list(shape)) if shape else {"lit": ["int32", 0, [0]]}


def dynamic(g, dev, v):
    """Sends a tensor whose shape is known only at run time, and returns its size."""
    if v.dtype not in REAL or len(v.shape) != 1:
        return unary(g, dev, v)
    mask = compare(g, dev, v)[0]
    where = g.emit("Where", dev, {"condition": mask}, out=[("int64", (-1, 1))], pool=False)[0]
    return g.emit("Sum", g.device(), {"input": where, "axis": lit("int32", [0, 1])}, out=[("int64", ())])


def looked_up(g, server, me, v, ids):
    table = g.emit("Neg", server, {"x": v}, out=[(v.dtype, v.shape)])[0]
    rows = g.emit("GatherV2", server, {"params": table, "indices": ids, "axis": lit("int32", 0)}, out=[(v.dtype, ids.shape + v.shape[1:])])[0]
    return g.emit("Square", me, {"x": rows}, out=[(v.dtype, rows.shape)])[0]


def flattened(g, me, ids):
    """As gradients of lookups do it, or by a shape that comes from elsewhere."""
    count = functools.reduce(operator.mul, ids.shape, 1)
    if g.chance(0.7):
        size = g.emit("Size", me, {"input": ids}, out=[("int32", ())], pool=False)[0]
        shape = g.emit("ExpandDims", me, {"input": size, "axis": lit("int32", 0)}, out=[("int32", (1,))], pool=False)[0]
    else:
        shape = g.emit("Abs", me, {"x": lit("int32", [count])}, out=[("int32", (1,))], pool=False)[0]
    return g.emit("Reshape", me, {"tensor": ids, "shape": shape}, out=[(ids.dtype, (count,))])[0]


def unique_rows(g, server, ids, rows):
    """Adds up the rows of equal ids, as optimizers do. Returns the different ids, the sums, and the position of each id among the different ones."""
    count = ids.shape[0]
    unique, positions = g.emit("Unique", server, {"x": ids}, {"out_idx": "int32"}, out=[(ids.dtype, (-1,)), ("int32", (count,))], pool=False)
    shape = g.emit("Shape", server, {"input": unique}, out=[("int32", (1,))], pool=False)[0]
    ends = {"begin": lit("int32", [0]), "end": lit("int32", [1]), "strides": lit("int32", [1])}
    length = g.emit("StridedSlice", server, {"input": shape, **ends}, {"shrink_axis_mask": 1}, out=[("int32", ())], pool=False)[0]
    summed = g.emit("UnsortedSegmentSum", server, {"data": rows, "segment_ids": positions, "num_segments": length}, out=[(rows.dtype, (-1,) + rows.shape[1:])], pool=False)[0]
    return unique, summed, positions


def added_up(g, server, ids, rows):
    unique, summed, positions = unique_rows(g, server, ids, rows)
    if g.chance(0.3):  # a use that the worker does not see
        g.emit("Sum", server, {"input": positions, "axis": lit("int32", [0])}, out=[("int32", ())])
    g.emit("Sum", g.device(), {"input": unique, "axis": lit("int32", [0])}, out=[(ids.dtype, ())])
    return g.emit(g.rng.choice(("Sum", "Max")), g.device(), {"input": summed, "axis": lit("int32", list(range(len(rows.shape))))}, out=[(rows.dtype, ())])


def embedding(g, dev, v):
    """Looks rows up by ids of the worker, adds up a sparse gradient's rows by them as optimizers do before they apply it, or both; returns what it makes of the result."""
    if v.dtype not in FLOATS or not v.shape or not 0 < v.shape[0] < 100:
        return unary(g, dev, v)
    me = g.scope.only or ("me" if "me" in g.devices else g.device())
    server = g.scope.only or g.rng.choice([one for one in g.devices if one.startswith("ps")])
    if not (g.usable(v, me) and g.usable(v, server)):
        return unary(g, dev, v)
    kind = g.rng.choice(("int32", "int64"))
    does = g.rng.choice(("look up", "add up", "both"))
    shape, most = ((v.shape[0],), 3) if does == "add up" else (g.rng.choice(((5,), (2, 3))), v.shape[0])
    ids = g.emit("FloorMod", me, {"x": g.want(kind, shape, me), "y": lit(kind, most)}, out=[(kind, shape)], feedable=False)[0]
    if does == "add up":
        rows = g.emit("Square", me, {"x": v}, out=[(v.dtype, v.shape)])[0]
        return added_up(g, server, ids, rows)
    rows = looked_up(g, server, me, v, ids)
    if does == "look up":
        return [rows]
    flat = flattened(g, me, ids)
    as_rows = flat.shape + v.shape[1:]
    rows = g.emit("Reshape", me, {"tensor": rows, "shape": lit("int32", list(as_rows))}, out=[(v.dtype, as_rows)])[0]
    return added_up(g, server, flat, rows)


def act(g):
    dev = g.device()
    v = any_value(g, dev)
    if v.dtype in ("resource", "variant"):
        return
    g.rng.choice((unary, unary, binary, binary, binary, compare, select, reshape, gather, concat, reduce, several, switch, switch, lists, dynamic, embedding, add_n, add_n, layer, layer))(g, dev, v)


def strings(g):
    dev = g.device()
    v = g.pick(dev, lambda v: v.dtype == "string") or g.want("string", g.rng.choice(g.shapes), dev)
    op = g.rng.choice(("StringToHashBucketFast", "StringLength", "StringJoin", "Substr", "EncodeBase64"))
    if op == "StringToHashBucketFast":
        g.emit(op, dev, {"input": v}, {"num_buckets": 97}, out=[("int64", v.shape)])
    elif op == "StringLength":
        g.emit(op, dev, {"input": v}, out=[("int32", v.shape)])
    elif op == "StringJoin":
        other = g.want("string", v.shape, dev)
        g.emit(op, dev, {"inputs": [v, other]}, {"separator": "-"}, out=[("string", v.shape)])
    elif op == "Substr":
        g.emit(op, dev, {"input": v, "pos": lit("int32", 0), "len": lit("int32", 5)}, out=[("string", v.shape)])
    else:
        g.emit(op, dev, {"input": v}, out=[("string", v.shape)])


def relay(g):
    """Passes a value through several tasks."""
    dev = g.device()
    v = any_value(g, dev)
    for _ in range(g.rng.randint(1, 3)):
        dev = g.device()
        if not g.usable(v, dev):
            return
        ctl = [slow(g, v, dev)] if dev == "me" and v.dtype in ("float32", "int32", "int64") and g.chance(0.4) else []
        v = g.emit("Identity", dev, {"input": v}, out=[(v.dtype, v.shape)], alias=True, ctl=ctl)[0]


def slow(g, v, dev):
    """Takes its time once `v` is there, so that what need not wait for it overtakes. Grappler does not fold constants that grow."""
    count = g.record("Size", dev, {"input": v}, out=[("int32", ())])
    value = g.record("Cast", dev, {"x": f"{count}:0"}, {"DstT": "float32"}, out=[("float32", ())])
    square = g.record("Fill", dev, {"dims": lit("int32", [800, 800]), "value": f"{value}:0"}, out=[("float32", (800, 800))])
    return g.record("MatMul", dev, {"a": f"{square}:0", "b": f"{square}:0"}, out=[("float32", (800, 800))])


def merge(g):
    """Ends a branch: merges two values."""
    if not g.guard:
        return
    guard = g.guard
    pred, branch = guard[-1]
    dev = g.device()
    v = g.pick(dev, lambda v: v.guard == guard)
    if v is None:
        return
    g.guard = guard[:-1] + ((pred, 1 - branch),)
    other = g.pick(dev, lambda o: o.guard == g.guard and o.dtype == v.dtype and o.shape == v.shape)
    if other is None:
        outer = guard[:-1]
        g.guard = outer
        data = g.want(v.dtype, v.shape, dev)
        if data.guard != outer:
            data_guard_ok = data.guard == outer[: len(data.guard)]
            if not data_guard_ok:
                g.guard = guard
                return
        made = g.emit("Switch", dev, {"data": data, "pred": g.scope.preds[pred]}, out=[(v.dtype, v.shape)] * 2, alias=True, pin=False)
        for side, value in enumerate(made):
            value.guard = outer + ((pred, side),)
            value.feedable = False
        other = made[1 - branch]
        # The guard of the Switch is the predicate's, which may be deeper than the data's.
    g.guard = guard[:-1]
    if not g.usable(other, dev) or not g.usable(v, dev):
        return
    pair = [None, None]
    pair[branch], pair[1 - branch] = v, other
    # Variables' buffers are not merged: a Merge takes control edges only from live nodes, so it could not wait for the users.
    states = [s for one in pair for s in one.alias]
    if states:
        return
    number = g.record("Merge", dev, {"inputs": pair}, out=[(v.dtype, v.shape), ("int32", ())])
    from generate import Val

    g.scope.values += [Val(f"{number}:0", v.dtype, v.shape, dev, g.guard), Val(f"{number}:1", "int32", (), dev, g.guard)]
