"""Operations that fail in the middle of some steps.

What comes before the failed operation has run, what comes after it has not: `fail` puts it between the users of some states, which are the same after the
step wherever it ran (`Generator.sure`). How far the others got is not determined, and not compared.
"""

import values
from program import lit
from variables import RefVariable, ResourceVariable


def fail(g):
    share = g.rng.choice((0, 0.5, 1, 1))
    dev = g.device()
    g.after_failure = share
    g.sure = {state for state in g.states if g.chance(share)}
    before = g.next_id
    g.rng.choice(KINDS)(g, dev)
    # In the main runs, whether or not anybody waits for it.
    g.asked.append(max(r["id"] for r in g.scope.records if r["id"] >= before))
    g.failing = g.asked[-1]


def emit(g, op, dev, ins, attr=None, out=(), writes=()):
    """The operation that fails now and then."""
    g.sure.update(writes)
    return g.emit(op, dev, ins, attr, out=out, writes=[*writes, *(state for state in g.states if state in g.sure and state not in writes)], pool=False, fails=True)


def number(g, dev, shape=()):
    """From -7 to 7, and of the worker or the client."""
    made = values.fed(g, "int32", shape, dev)
    if g.chance(0.3):
        made = g.emit("Identity", g.device(), {"input": made}, out=[("int32", shape)], pool=False)[0]
    return made


def sometimes(g, dev):
    """A condition that mostly holds."""
    return g.emit("Less", dev, {"x": number(g, dev), "y": lit("int32", 4)}, out=[("bool", ())], pool=False)[0]


def remainder(g, dev):
    return g.emit("FloorMod", dev, {"x": number(g, dev), "y": lit("int32", 4)}, out=[("int32", ())], pool=False)[0]


def position(g, dev):
    """Row 0, and one that does not exist in some steps; there are five."""
    two = g.emit("Pack", dev, {"values": [lit("int32", 0), number(g, dev)]}, out=[("int32", (2,))], pool=False)[0]
    return g.emit("Maximum", dev, {"x": two, "y": lit("int32", g.rng.choice((0, -1)))}, out=[("int32", (2,))], pool=False)[0]


def check_numerics(g, dev):
    of = g.emit("Cast", dev, {"x": remainder(g, dev)}, {"DstT": "float32"}, out=[("float32", ())], pool=False)[0]
    inverse = g.emit("RealDiv", dev, {"x": lit("float32", 1), "y": of}, out=[("float32", ())], pool=False)[0]
    emit(g, "CheckNumerics", dev, {"tensor": inverse}, {"message": "a failure"}, [("float32", ())])


def assertion(g, dev):
    emit(g, "Assert", dev, {"condition": sometimes(g, dev), "data": [lit("string", "a failure")]})


def gather(g, dev):
    params = values.constant(g, "float32", (5,), dev)
    emit(g, "GatherV2", dev, {"params": params, "indices": position(g, dev), "axis": lit("int32", 0)}, None, [("float32", (2,))])


def division(g, dev):
    emit(g, "FloorDiv", dev, {"x": lit("int32", 9), "y": remainder(g, dev)}, None, [("int32", ())])


def reshape(g, dev):
    shape = g.emit("ExpandDims", dev, {"input": remainder(g, dev), "axis": lit("int32", 0)}, out=[("int32", (1,))], pool=False)[0]
    emit(g, "Reshape", dev, {"tensor": lit("int32", [1, 2, 3]), "shape": shape}, None, [("int32", (-1,))])


def substring(g, dev):
    emit(g, "Substr", dev, {"input": lit("string", "abc"), "pos": number(g, dev), "len": lit("int32", 1)}, None, [("string", ())])


def no_file(g, dev):
    name = g.emit("SelectV2", dev, {"condition": sometimes(g, dev), "t": lit("string", "whoami"), "e": lit("string", "nobody")}, out=[("string", ())], pool=False)[0]
    emit(g, "ReadFile", dev, {"filename": name}, None, [("string", ())])


def rows(g, dev):
    return g.rng.choice((RefVariable, ResourceVariable)).made(g, RefVariable.place(g), "float32", (5, 2))


def bad_lookup(g, dev):
    state = rows(g, dev)
    if state.kind is ResourceVariable:
        emit(g, "ResourceGather", state.dev, {"resource": state.handle, "indices": position(g, dev)}, {"dtype": "float32"}, [("float32", (2, 2))], [state])
    else:
        ins = {"params": RefVariable.reference(g, state), "indices": position(g, dev), "axis": lit("int32", 0)}
        emit(g, "GatherV2", state.dev, ins, None, [("float32", (2, 2))], [state])


def bad_update(g, dev):
    """The first row is updated, and the second one does not exist."""
    state, op = rows(g, dev), g.rng.choice(("ScatterAdd", "ScatterUpdate", "SparseApplyAdagrad"))
    # A counter of star_server_lite does not wait for updates on other servers.
    g.sure = {one for one in g.sure if one.dev == state.dev or one.shape or one.dtype not in ("int32", "int64")}
    is_ref = state.kind is RefVariable
    handle = RefVariable.reference(g, state) if is_ref else state.handle
    at, what = position(g, dev), g.emit("Square", g.device(), {"x": values.fed(g, "float32", (2, 2), dev)}, out=[("float32", (2, 2))], pool=False)[0]
    out = [("float32", (5, 2))] if is_ref else ()
    if op.startswith("Scatter"):
        ins = {"ref" if is_ref else "resource": handle, "indices": at, "updates": what}
        return emit(g, op if is_ref else f"Resource{op}", state.dev, ins, None, out, [state])
    accum = state.kind.made(g, state.dev, "float32", (5, 2))
    ins = {"var": handle, "accum": RefVariable.reference(g, accum) if is_ref else accum.handle, "lr": lit("float32", 0.5), "grad": what, "indices": at}
    return emit(g, op if is_ref else f"Resource{op}", state.dev, ins, None, out, [state, accum])


def count_up(g, dev):
    """Fails once the limit is reached."""
    kind = g.rng.choice((RefVariable, ResourceVariable))
    state = kind.made(g, kind.place(g), "int32", ())
    start = next(r for r in g.init if r["id"] == int(state.handle.split(":")[0]) + 1)["in"]["value"]["lit"][1]
    limit = {"limit": start + g.rng.choice((1, 2, 3))}
    if kind is RefVariable:
        return emit(g, "CountUpTo", state.dev, {"ref": RefVariable.reference(g, state)}, limit, [("int32", ())], [state])
    return emit(g, "ResourceCountUpTo", state.dev, {"resource": state.handle}, {**limit, "T": "int32"}, [("int32", ())], [state])


KINDS = (check_numerics, assertion, gather, division, reshape, substring, no_file, bad_lookup, bad_lookup, bad_update, bad_update, count_up)
