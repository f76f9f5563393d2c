"""Variables above the size from which the planner leaves a branch to the server (LARGE_BYTES): a condition uses a part of one, or of what is made of it."""

import moments
import values
from program import lit
from variables import ResourceVariable, some_variable

SHAPES = ((70_000,), (1700, 40), (300, 16, 17))


@moments.alone
def branches(g):
    """A condition, one of whose branches uses a part of a large variable. Before and after it, the variable may change."""
    made = lambda: (g.rng.choice(moments.TYPES), g.rng.choice(SHAPES))  # noqa: E731
    state = some_variable(g, lambda s: s.shape in SHAPES and s.dtype in moments.TYPES, made)
    if g.chance(0.5):
        state.kind.act(g, state)
    pred = values.predicate(g, g.device())
    if pred.alias or pred.guard:
        return
    before = moments.read(g, state) if g.chance(0.3) else None
    op = g.rng.choice(("Max", "Slice", "GatherV2"))
    out = (state.dtype, () if op == "Max" else (2, *state.shape[1:]))

    def uses():
        g.fill(g.rng.choice((0, 0, 1)))
        g.guard = ()
        value = before or (moments.look if g.chance(0.6) else moments.read)(g, state)
        return [part(g, state, value, op, out)]

    def other():
        g.fill(g.rng.choice((0, 0, 1)))
        g.guard = ()
        return [values.constant(g, *out, g.device())]

    style = "v2" if (before or state.kind is ResourceVariable) and g.chance(0.4) else "v1"
    g.conditional(style, pred.dev, pred, [out], (uses, other) if g.chance(0.5) else (other, uses))
    g.wanted.append(g.scope.values[-1])
    if g.chance(0.3):
        state.kind.act(g, state)


def part(g, state, value, op, out):
    from generate import Ref

    dev = state.dev if isinstance(value, Ref) or g.chance(0.6) else g.device()
    rank = len(state.shape)
    if op == "Max":
        ins = {"input": value, "axis": lit("int32", list(range(rank)))}
    elif op == "Slice":
        ins = {"input": value, "begin": lit("int32", [g.rng.randrange(100)] + [0] * (rank - 1)), "size": lit("int32", list(out[1]))}
    else:
        ins = {"params": value, "indices": values.index(g, state.shape[0], (2,), dev), "axis": lit("int32", 0)}
    found = g.emit(op, dev, ins, out=[out], alias=True, feedable=False, pool=False)[0]
    return g.emit("AddV2", dev, {"x": found, "y": lit(state.dtype, 1)}, out=[out])[0]
