"""A variable at several moments of a step: conditions on a flag that changes in between, and references that cross after an update."""

import values
from program import NUMBERS, closure, lit, node_of
from variables import RefVariable, ResourceVariable, some_variable

TYPES = ("float32", "float64", "int32", "int64")
SHAPES = ((), (2,), (3, 2), (300,))


def alone(act):
    """Does it in the main body only, and in no branch."""

    def done(g):
        if len(g.scopes) == 1:
            outer, g.guard = g.guard, ()
            act(g)
            g.guard = outer

    return done


# ---- conditions on a flag


@alone
def flags(g):
    """Reads and updates of one variable, each in a branch of its own condition. All conditions are on one flag, which changes in between."""
    flag = some_flag(g)
    state = some_variable(g, lambda s: s.dtype in NUMBERS and s.shape in SHAPES, lambda: (g.rng.choice(TYPES), g.rng.choice(SHAPES)))
    # Where the flag is, a condition would have its memory, and see it change.
    dev = g.rng.choice([one for one in g.devices if one != flag.dev])
    branch, ctl = g.rng.randint(0, 1), []
    for number, use in enumerate(g.rng.choice(((read, add), (read, add), (read, read, add), (add, read), (add, add)))):
        if number or g.chance(0.3):
            change(g, flag, ctl)
        # Mostly in the same branch of each.
        ctl = in_branch(g, state, moment(g, flag, dev), branch if g.chance(0.8) else 1 - branch, use)


def some_flag(g):
    found = [s for s in g.states if s.kind is RefVariable and (s.dtype, s.shape) == ("bool", ())]
    return g.rng.choice(found) if found and g.chance(0.5) else RefVariable.made(g, RefVariable.place(g), "bool", ())


def change(g, flag, ctl):
    ref = RefVariable.reference(g, flag)
    if g.chance(0.7):
        value = g.emit("LogicalNot", flag.dev, {"x": ref}, out=[("bool", ())], feedable=False, pool=False)[0]
    else:
        value = values.fed(g, "bool", (), flag.dev)
    g.emit("Assign", flag.dev, {"ref": ref, "value": value}, {"use_locking": g.chance(0.5)}, out=[("bool", ())], writes=[flag], ctl=ctl, pool=False)


def moment(g, flag, dev):
    """Returns a copy of what the flag is now, on another task."""
    now = g.emit("Identity", flag.dev, {"input": RefVariable.reference(g, flag)}, out=[("bool", ())], feedable=False, pool=False)[0]
    now.alias = {flag: flag.epoch}
    return g.emit("Identity", dev, {"input": now}, out=[("bool", ())], feedable=False)[0]


def in_branch(g, state, pred, branch, use):
    """Uses the variable in this branch of a condition, or of a Switch. Returns what comes after the condition has to wait for."""
    if g.chance(0.3):
        g.scope.preds.append(pred)
        g.guard = ((len(g.scope.preds) - 1, branch),)
        g.side(g.guard)
        use(g, state)
        g.guard = ()
        return []

    def uses():
        g.fill(g.rng.choice((0, 0, 1)))
        g.guard = ()
        return [use(g, state)]

    def other():
        g.fill(g.rng.choice((0, 0, 1)))
        g.guard = ()
        return [values.constant(g, state.dtype, state.shape, g.device())]

    style = "v2" if state.kind is ResourceVariable and g.chance(0.4) else "v1"
    g.conditional(style, pred.dev, pred, [(state.dtype, state.shape)], (uses, other) if branch else (other, uses))
    g.wanted.append(g.scope.values[-1])
    return [g.scope.records[-1]["id"]]


def look(g, state):
    """Returns its reference, or what it is now, which may be the variable's memory."""
    is_ref, value = state.kind is RefVariable, RefVariable.reference(g, state)
    if not is_ref or g.chance(0.5):
        op, name, handle = ("Identity", "input", value) if is_ref else ("ReadVariableOp", "resource", state.handle)
        attr = None if is_ref else {"dtype": state.dtype}
        value = g.emit(op, state.dev, {name: handle}, attr, out=[(state.dtype, state.shape)], reads=[state], pin=True, feedable=False, pool=False)[0]
        value.alias = {state: state.epoch} if is_ref else {}
    return value


def read(g, state):
    """Returns a new value, which is not the variable's memory."""
    ins = {"x": look(g, state), "y": lit(state.dtype, 3)}
    return g.emit(g.rng.choice(("Mul", "AddV2")), state.dev, ins, out=[(state.dtype, state.shape)], pin=True)[0]


def add(g, state):
    """Returns a value that has nothing to do with it."""
    is_ref, value = state.kind is RefVariable, lit(state.dtype, g.rng.choice((1, 2)), list(state.shape))
    op, out = g.rng.choice(("AssignAdd", "AssignAdd", "AssignSub")), [(state.dtype, state.shape)]
    if is_ref:
        g.emit(op, state.dev, {"ref": RefVariable.reference(g, state), "value": value}, out=out, writes=[state], pin=True, pool=False)
    else:
        g.emit(f"{op}VariableOp", state.dev, {"resource": state.handle, "value": value}, writes=[state], pin=True)
    return values.constant(g, state.dtype, state.shape, g.device())


# ---- references that cross late


@alone
def late_references(g):
    """Other tasks take a variable's reference together with a value that waits for an update: the variable is looked at when that value is there."""
    state = RefVariable.made(g, RefVariable.place(g), g.rng.choice(TYPES), g.rng.choice(SHAPES))
    # TensorFlow sends the same output to a device once: two consumers there would not look at two moments.
    others = [dev for dev in dict.fromkeys(g.devices) if dev != state.dev]
    reference = RefVariable.reference(g, state) if g.chance(0.7) else update(g, state)
    for dev in g.rng.sample(others, g.rng.randint(1, min(2, len(others)))):
        value = after_update(g, state, update(g, state))
        assert {number for number, _ in state.writes} <= closure(g.scope.records, [node_of(value.ref)])
        pair = [reference, value]
        g.rng.shuffle(pair)
        out = [(state.dtype, state.shape)]
        g.wanted += g.emit(g.rng.choice(("Mul", "AddV2", "Sub")), dev, dict(zip("xy", pair)), out=out, implied=[state])
    if g.chance(0.4):
        update(g, state)


def update(g, state):
    """Returns the reference that the operation returns."""
    from generate import Ref

    value = values.fed(g, state.dtype, state.shape, g.device()) if g.chance(0.6) else lit(state.dtype, 2, list(state.shape))
    ins, out = {"ref": RefVariable.reference(g, state), "value": value}, [(state.dtype, state.shape)]
    op, attr = g.rng.choice(("AssignAdd", "AssignAdd", "AssignSub", "Assign")), {"use_locking": g.chance(0.5)}
    made = g.emit(op, state.dev, ins, attr, out=out, writes=[state], pool=False)
    return Ref(made[0].ref, state.dtype, state.shape, state.dev, (), [state])


def after_update(g, state, updated):
    """Returns a value that is made of what the update returns, or of something else after it. It takes its time."""
    out, more = [(state.dtype, state.shape)], {"feedable": False, "pool": False}
    if g.chance(0.6):
        value = g.emit("Identity", state.dev, {"input": updated}, out=out, **more)[0]
        value.alias = {state: state.epoch}
    else:
        value = g.emit("Identity", g.device(), {"input": values.fed(g, *out[0], g.device())}, out=out, ctl=[node_of(updated.ref)], **more)[0]
    # Grappler takes Neg away, for instance two in a row. What the update returns would be left: another reference, for which none waits.
    ops = ["Square"] + g.rng.choices(("Square", "Neg"), k=g.rng.choice((0, 0, 1, 2)))
    g.rng.shuffle(ops)
    for op in ops:
        value = g.emit(op, g.device(), {"x": value}, out=out, **more)[0]
    return value
