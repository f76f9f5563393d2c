"""Updates of parts of a variable: by rows, with another operation than those in variables.py, or by positions."""

import values
from program import FLOATS, REAL, lit


def can(dtype, shape):
    return dtype in REAL and dtype not in ("bfloat16", "uint16") and bool(shape) and 0 < shape[0] < 100 and 0 not in shape


def act(g, handle, states, dtype, shape, dev):
    """`handle`: a reference or a resource. Returns the values of the operation."""
    is_ref = not isinstance(handle, str)
    prefix = "" if is_ref else "Resource"
    more = {"out": [(dtype, shape)] if is_ref else (), "writes": states, "pool": False}
    ordered = dtype in FLOATS + ("int32", "int64")
    if g.chance(0.5):
        # Integers are not divided: TensorFlow ends the process if one of the divisors is zero.
        op = g.rng.choice(("ScatterMul", "ScatterSub") + ("ScatterMin", "ScatterMax") * ordered + ("ScatterDiv",) * 2 * (dtype in FLOATS))
        count = g.rng.choice((1, 2, 3))
        at = values.index(g, shape[0], (count,), dev, g.rng.choice(("int32", "int64")))
        what = g.want(dtype, g.rng.choice(((count,) + shape[1:], ())), dev)
        return g.emit(prefix + op, dev, {"ref" if is_ref else "resource": handle, "indices": at, "updates": what}, {"use_locking": g.chance(0.5)} if is_ref else None, **more)
    op = g.rng.choice(("ScatterNdUpdate", "ScatterNdAdd", "ScatterNdSub") + ("ScatterNdMin", "ScatterNdMax") * ordered)
    depth = g.rng.randint(1, len(shape))
    if op == "ScatterNdUpdate" or g.chance(0.5):
        # Different positions: it is not determined which one of equal ones is last.
        rows = g.rng.sample(range(shape[0]), min(shape[0], g.rng.choice((1, 2))))
        at = lit(g.rng.choice(("int32", "int64")), [[row] + [g.rng.randrange(n) for n in shape[1:depth]] for row in rows])
        count = len(rows)
    else:
        count = g.rng.choice((1, 2, 3))
        flat = values.index(g, shape[0], (count,), dev)
        at = g.emit("ExpandDims", dev, {"input": flat, "axis": lit("int32", 1)}, out=[("int32", (count, 1))], pool=False)[0]
        depth = 1
    what = g.want(dtype, (count,) + shape[depth:], dev)
    return g.emit(prefix + op, dev, {"ref": handle, "indices": at, "updates": what}, {"use_locking": g.chance(0.5)}, **more)
