"""Reads and updates of one variable that no edge orders.

TensorFlow leaves their order open. Over `grpc`, what is ready when the step begins goes before what has to wait for a message, and starwire promises the
same (docs/star_server.md, "Reads before updates"). Each pair is made so that `grpc` usually agrees with itself: read and update differ in the number of
messages that they wait for. Each uses variables of its own, which others use later, behind both.
"""

import values
from program import FLOATS, closure, lit, node_of
from variables import RefVariable, ResourceVariable

DTYPES = ("float32", "float32", "float64", "int32", "int64")
SHAPES = ((), (), (2,), (5, 3), (3000,))
# Enough for the product of a variable to be made by several threads.
LARGE = (200_000,)


def act(g):
    for _ in range(g.rng.choice((1, 1, 2, 3))):
        g.rng.choice(PATTERNS)(g)


# ---- order


def apart(states, first, second):
    """Makes both as if the other were not there: no edge leads from one to the other for the sake of these states. All later users come after both."""
    start = {state: (state.writes, state.reads, state.epoch) for state in states}
    ends = []
    for make in (first, second):
        for state, (writes, reads, epoch) in start.items():
            state.writes, state.reads, state.epoch = list(writes), list(reads), epoch
        make()
        ends.append({state: (state.writes, state.reads, state.epoch) for state in states})
    for state in states:
        (writes, reads, epoch), (more_writes, more_reads, later) = (end[state] for end in ends)
        state.writes = list(dict.fromkeys(writes + more_writes))
        state.reads = list(dict.fromkeys(reads + more_reads))
        state.epoch = max(epoch, later)


def either_order(g, states, read, update):
    apart(states, *((read, update) if g.chance(0.5) else (update, read)))


class Names:
    """Names of the nodes: which of two comes first in the alphabet must not matter."""

    def __init__(self, g):
        self.read, self.update = g.rng.choice(((None, None), ("a_#", "z_#"), ("z_#", "a_#")))


# ---- operations


def variable(g, dev=None, dtype=None, shape=None, kind=None):
    kind = kind or g.rng.choice((RefVariable, ResourceVariable))
    shape = shape if shape is not None else LARGE if g.chance(0.06) else g.rng.choice(SHAPES)
    return kind.made(g, dev or g.rng.choice(("ps0", "ps1")), dtype or g.rng.choice(DTYPES), shape)


def of_worker(g, dtype, shape, *more):
    """Something that the worker computes of what it is fed, and of more values."""
    made = values.fed(g, dtype, shape, "me")
    made = g.emit("AddV2", "me", {"x": made, "y": lit(dtype, 3)}, out=[(dtype, shape)], feedable=False)[0]
    for one in more:
        made = g.emit(g.rng.choice(("AddV2", "Sub")), "me", {"x": made, "y": one}, out=[(dtype, shape)], feedable=False)[0]
    return made


def read(g, state, name=None):
    """Returns a value on the variable's server: of a reference variable, mostly its memory."""
    out = [(state.dtype, state.shape)]
    if state.kind is ResourceVariable:
        return g.emit("ReadVariableOp", state.dev, {"resource": state.handle}, {"dtype": state.dtype}, out=out, reads=[state], feedable=False, name=name)[0]
    ref = RefVariable.reference(g, state)
    if g.chance(0.3):
        return g.emit("Square", state.dev, {"x": ref}, out=out, feedable=False, name=name)[0]
    made = g.emit("Identity", state.dev, {"input": ref}, out=out, feedable=False, name=name)[0]
    made.alias = {state: state.epoch}
    return made


def product(g, value, name=None):
    """A new value on the same task, which is a use of the variable's memory if `value` is."""
    op, ins = g.rng.choice((("Square", {"x": value}), ("Mul", {"x": value, "y": lit(value.dtype, 2)}), ("AddV2", {"x": value, "y": lit(value.dtype, 5)})))
    return g.emit(op, value.dev, ins, out=[(value.dtype, value.shape)], feedable=False, name=name)[0]


def made_of(g, value):
    """The records without which whoever takes the value would not have to wait as long. The shrinker keeps them."""
    return sorted(closure(g.scope.records, [node_of(value.ref)]))


def look_up(g, state, ids=None, name=None):
    waits = made_of(g, ids) if ids is not None else ()
    ids = ids if ids is not None else lit("int32", [0, state.shape[0] - 1])
    out, more = [(state.dtype, (2,) + state.shape[1:])], {"feedable": False, "name": name, "waits": waits}
    if state.kind is ResourceVariable:
        ins, attr = {"resource": state.handle, "indices": ids}, {"dtype": state.dtype}
        return g.emit("ResourceGather", state.dev, ins, attr, out=out, reads=[state], **more)[0]
    ins = {"params": RefVariable.reference(g, state), "indices": ids, "axis": lit("int32", 0)}
    return g.emit("GatherV2", state.dev, ins, out=out, **more)[0]


def seen(g, value):
    """The worker uses the value: at once, or together with what it is fed. The result is fetched."""
    other = values.fed(g, value.dtype, value.shape, "me") if g.chance(0.6) else lit(value.dtype, 4)
    made = g.emit(g.rng.choice(("AddV2", "Sub", "Mul")), "me", {"x": value, "y": other}, out=[(value.dtype, value.shape)], feedable=False)[0]
    g.wanted.append(made)
    return made


def use(g, state, name=None):
    """One or more reads, and what is made of them."""
    for _ in range(g.rng.choice((1, 1, 2))):
        value = look_up(g, state, name=name) if state.shape and g.chance(0.3) else read(g, state, name)
        # The memory of a variable that is on its way to another task may change, over grpc as well.
        if g.chance(0.9 if value.alias else 0.3):
            value = product(g, value, name)
        if g.chance(0.8):
            seen(g, value)
        if g.chance(0.3) and not value.alias:
            keep(g, value)


def keep(g, value):
    """Another variable on the same server takes the value."""
    state = variable(g, value.dev, value.dtype, value.shape)
    add(g, state, value)


def add(g, state, value, name=None, waits_for=None):
    """An update, which the value `waits_for` keeps from running at once."""
    more = {"writes": [state], "pool": False, "name": name, "waits": made_of(g, waits_for) if waits_for else ()}
    is_ref = state.kind is RefVariable
    ops = ["AssignAdd", "AssignAdd", "AssignSub", "Assign"] + (["ApplyGradientDescent"] if state.dtype in FLOATS else [])
    ops += ["ScatterAdd", "ScatterUpdate"] if state.shape and state.shape[0] < 100 else []
    op = g.rng.choice(ops)
    out = [(state.dtype, state.shape)] if is_ref else ()
    handle = {"ref" if is_ref else "resource": RefVariable.reference(g, state) if is_ref else state.handle}
    attr = {"use_locking": g.chance(0.5)} if is_ref else None
    if op.startswith("Scatter"):
        rows = {"indices": lit("int32", list(range(state.shape[0]))), "updates": value}
        return g.emit(op if is_ref else f"Resource{op}", state.dev, {**handle, **rows}, attr, out=out, **more)
    if op == "ApplyGradientDescent":
        ins = {"var": next(iter(handle.values())), "alpha": lit(state.dtype, 1), "delta": value}
        return g.emit(op if is_ref else f"Resource{op}", state.dev, ins, attr, out=out, **more)
    return g.emit(op if is_ref else f"{op}VariableOp", state.dev, {**handle, "value": value}, attr, out=out, **more)


# ---- pairs


def counter(g):
    """The update waits for the worker, the reads for nothing."""
    state, names = variable(g), Names(g)

    def update():
        value = of_worker(g, state.dtype, state.shape)
        add(g, state, value, names.update, value)
        if g.chance(0.2):
            again = of_worker(g, state.dtype, state.shape)
            add(g, state, again, names.update, again)

    either_order(g, [state], lambda: use(g, state, names.read), update)


def moving_mean(g):
    """The update is made on the server, of a read of its own and of what the worker sends."""
    state, names = variable(g), Names(g)
    out = [(state.dtype, state.shape)]

    def update():
        now, value = read(g, state, names.update), of_worker(g, state.dtype, state.shape)
        step = g.emit("Sub", state.dev, {"x": now, "y": value}, out=out, feedable=False, name=names.update)[0]
        add(g, state, step, names.update, value)

    either_order(g, [state], lambda: use(g, state, names.read), update)


def kept_product(g):
    """A product of the variable's memory is only needed later, together with what the worker makes of the same memory."""
    state, names = variable(g, kind=g.rng.choice((RefVariable, RefVariable, ResourceVariable))), Names(g)
    out = [(state.dtype, state.shape)]
    made = []

    def reads():
        value = read(g, state, names.read)
        made.append(product(g, value, names.read))
        for _ in range(2):
            made.append(g.emit("Mul", "me", {"x": value, "y": lit(state.dtype, 7)}, out=out, feedable=False)[0])

    def update():
        add(g, state, made[1], names.update, made[1])

    apart([state], reads, update)
    total = g.emit("AddV2", state.dev, {"x": made[0], "y": made[2]}, out=out, feedable=False)[0]
    keep(g, total)


def taken_twice(g):
    """Two workers take the variable's memory. The update waits for only one of them."""
    state, names = variable(g, kind=RefVariable), Names(g)
    out = [(state.dtype, state.shape)]
    made = []

    def reads():
        value = read(g, state, names.read)
        for dev in ("me", "other"):
            made.append(g.emit("Mul", dev, {"x": value, "y": lit(state.dtype, 7)}, out=out, feedable=False)[0])

    apart([state], reads, lambda: add(g, state, made[0], names.update, made[0]))
    total = g.emit("AddV2", state.dev, {"x": made[0], "y": made[1]}, out=out, feedable=False)[0]
    keep(g, total)


def crossed(g):
    """Each of two variables is updated by what the worker makes of the other one."""
    first = variable(g)
    second = variable(g, dtype=first.dtype, shape=first.shape)
    names, pulled = Names(g), {}

    def reads():
        for state in (first, second):
            value = read(g, state, names.read)
            if value.alias and g.chance(0.9):
                value = product(g, value, names.read)
            pulled[state] = of_worker(g, state.dtype, state.shape, value)
            if g.chance(0.4):
                seen(g, product(g, value, names.read))

    def updates():
        for state, other in ((first, second), (second, first)):
            add(g, state, pulled[other], names.update, pulled[other])

    apart([first, second], reads, updates)


def late_read(g):
    """The update waits for one message. The lookup waits for the same feed, and for questions of the worker that both servers have answered."""
    state, names = variable(g, shape=(5, 3)), Names(g)
    source = variable(g, dtype="int32", shape=(2,), kind=ResourceVariable)
    value = of_worker(g, state.dtype, state.shape)

    def update():
        add(g, state, value, names.update, value)

    def reads():
        total = g.emit("Sum", "me", {"input": value, "axis": lit("int32", [0, 1])}, out=[(state.dtype, ())], feedable=False)[0]
        if state.dtype != "int32":
            total = g.emit("Cast", "me", {"x": total}, {"DstT": "int32"}, out=[("int32", ())], feedable=False)[0]
        asked = g.emit("AddV2", "me", {"x": read(g, source), "y": total}, out=[("int32", (2,))], feedable=False)[0]
        for dev in ("ps0", "me", "ps1", "me"):
            asked = g.emit("Neg", dev, {"x": asked}, out=[("int32", (2,))], feedable=False)[0]
        ids = g.emit("FloorMod", "me", {"x": asked, "y": lit("int32", state.shape[0])}, out=[("int32", (2,))], feedable=False)[0]
        seen(g, look_up(g, state, ids, names.read))

    either_order(g, [state], reads, update)


PATTERNS = (counter, counter, moving_mean, kept_product, kept_product, taken_twice, crossed, late_read)
