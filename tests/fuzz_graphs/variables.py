"""Variables, of references and of resources, and their updates."""

import optimizers
import scatters
import values
from kinds import Kind, final, record_in, small
from program import COMPLEX, FLOATS, NUMBERS, lit


class RefVariable(Kind):
    @classmethod
    def make(cls, g):
        return cls.made(g, cls.place(g), g.rng.choice(g.dtypes), g.rng.choice(g.shapes))

    @classmethod
    def made(cls, g, dev, dtype, shape):
        number = record_in(g, g.init, "VariableV2", dev, attr={"dtype": dtype, "shape": list(shape)}, out=[(dtype, shape)])
        start = record_in(g, g.init, "Fill", dev, {"dims": lit("int32", list(shape)) if shape else {"lit": ["int32", 0, [0]]}, "value": small(g, dtype)}, out=[(dtype, shape)])
        record_in(g, g.init, "Assign", dev, {"ref": f"{number}:0", "value": f"{start}:0"}, out=[(dtype, shape)], target=True)
        return cls.new(g, number, dev, dtype, shape)

    @staticmethod
    def inside(g, state):
        return not g.scope.functional

    @staticmethod
    def reference(g, state):
        from generate import Ref

        return Ref(state.handle, state.dtype, state.shape, state.dev, (), [state])

    @classmethod
    def add(cls, g, state, value, ctl=()):
        out = [(state.dtype, state.shape)]
        return g.emit("AssignAdd", state.dev, {"ref": cls.reference(g, state), "value": value}, {"use_locking": g.chance(0.5)}, out=out, writes=[state], ctl=ctl, pool=False)

    @classmethod
    def look_up(cls, g, state, ids, out):
        ref = cls.reference(g, state)
        if g.chance(0.5):
            ref = g.emit("Identity", state.dev, {"input": ref}, out=[(state.dtype, state.shape)], alias=False, pool=False)[0]
            ref.alias = {state: state.epoch}
        return g.emit("GatherV2", state.dev, {"params": ref, "indices": ids, "axis": lit("int32", 0)}, out=out)[0]

    @classmethod
    def update_rows(cls, g, state, ids, grad, ref=None):
        return cls.optimize(g, optimizers.sparse_updates(g, True), state, {"grad": grad, "indices": ids}, ref)

    @classmethod
    def optimize(cls, g, known, state, gradient, ref=None):
        op, slots, ins, attr = optimizers.update(g, known, state, gradient)
        if op is None:
            return None
        ins.update({"var": ref or cls.reference(g, state), **{name: cls.reference(g, one) for name, one in slots.items()}})
        return g.emit(op, state.dev, ins, attr, out=[(state.dtype, state.shape)], writes=[state, *slots.values()], pool=False)

    @classmethod
    def act(cls, g, state):
        use_reference(g, cls.reference(g, state))

    @staticmethod
    def finish(g, state):
        final(g, record_in(g, g.final, "Identity", state.dev, {"input": state.handle}, out=[(state.dtype, state.shape)]))


def copied(g):
    """Returns the state of a variable that `times_one` can take."""
    usable = [s for s in g.states if s.kind is RefVariable and s.kind.inside(g, s) and g.scope.only in (None, s.dev) and s.dtype in NUMBERS]
    return g.rng.choice(usable) if usable else None


def times_one(g, state):
    """Returns the product of a variable and one. Grappler makes it a copy of the variable."""
    one = lit(state.dtype, 1, list(state.shape))
    return g.emit("Mul", state.dev, {"x": RefVariable.reference(g, state), "y": one}, out=[(state.dtype, state.shape)])[0]


def use_reference(g, ref):
    """Reads or writes the variable behind a reference."""
    how = g.rng.random()
    if how < 0.3:
        return snapshot(g, ref)
    if how < 0.5:
        return read_directly(g, ref)
    return update(g, ref)


def snapshot(g, ref):
    """Identity of the reference: within the task, its output is the buffer itself."""
    for state in ref.states:
        pass
    made = g.emit("Identity", ref.dev, {"input": ref}, out=[(ref.dtype, ref.shape)], alias=False, feedable=True)[0]
    made.alias = {state: state.epoch for state in ref.states}
    return made


def read_directly(g, ref):
    """Passes the reference to an operation that takes a value."""
    dev = ref.dev
    if g.chance(0.2) and not g.scope.loop and all(state.epoch == 0 for state in ref.states) and ":0" in ref.ref and len(ref.states) == 1 and ref.ref == ref.states[0].handle:
        dev = g.device()
    v = ref
    if ref.dtype in NUMBERS:
        other = g.want(ref.dtype, ref.shape, dev)
        g.emit(g.rng.choice(("Mul", "AddV2", "Sub")), dev, {"x": v, "y": other}, out=[(ref.dtype, ref.shape)])
    elif ref.dtype == "bool":
        g.emit("LogicalNot", dev, {"x": v}, out=[("bool", ref.shape)])
    else:
        g.emit("StringLength", dev, {"input": v}, out=[("int32", ref.shape)])


def update(g, ref):
    dev, dtype, shape = ref.dev, ref.dtype, ref.shape
    choices = ["Assign"]
    if dtype in NUMBERS:
        choices += ["AssignAdd", "AssignAdd", "AssignSub"]
    if shape and shape[0] and shape[0] < 100:
        choices += ["ScatterUpdate"] + (["ScatterAdd", "ScatterSub", "ScatterMul"] if dtype in NUMBERS else [])
        choices += ["StridedSliceAssign"]
    if dtype in ("int32", "int64") and shape == ():
        choices += ["CountUpTo"]
    if dtype in FLOATS + COMPLEX:
        choices += ["ApplyGradientDescent"]
    if len(ref.states) == 1 and can_be_sparse(dtype, shape):
        choices += ["sparse update"] * 2
    op = g.rng.choice(choices)
    out = [(dtype, shape)]
    if op == "sparse update":
        made = RefVariable.update_rows(g, ref.states[0], *sparse_gradient(g, dtype, shape, dev), ref)
        if made is None:
            return snapshot(g, ref)
    elif op == "StridedSliceAssign":
        at = g.rng.randrange(shape[0])
        value = g.want(dtype, (1,) + shape[1:], dev)
        ins = {"ref": ref, "begin": lit("int32", [at]), "end": lit("int32", [at + 1]), "strides": lit("int32", [1]), "value": value}
        made = g.emit(op, dev, ins, out=out, writes=ref.states, pool=False)
    elif op.startswith("Scatter"):
        count = g.rng.choice((1, 2))
        at = values.index(g, shape[0], (count,), dev)
        if op == "ScatterUpdate" and count > 1:
            at = lit("int32", g.rng.sample(range(shape[0]), min(count, shape[0])))
            count = min(count, shape[0])
        what = g.want(dtype, (count,) + shape[1:], dev)
        made = g.emit(op, dev, {"ref": ref, "indices": at, "updates": what}, {"use_locking": g.chance(0.5)}, out=out, writes=ref.states, pool=False)
    elif op == "CountUpTo":
        return g.emit(op, dev, {"ref": ref}, {"limit": 10**9}, out=out, writes=ref.states)
    elif op == "ApplyGradientDescent":
        alpha = small(g, dtype)
        delta = g.want(dtype, shape, dev)
        made = g.emit(op, dev, {"var": ref, "alpha": alpha, "delta": delta}, out=out, writes=ref.states, pool=False)
    else:
        value = g.want(dtype, shape, dev)
        made = g.emit(op, dev, {"ref": ref, "value": value}, {"use_locking": g.chance(0.5)}, out=out, writes=ref.states, pool=False)
    from generate import Ref

    again = Ref(made[0].ref, dtype, shape, dev, made[0].guard, ref.states)
    if g.chance(0.3):
        snapshot(g, again)
    elif g.chance(0.2):
        read_directly(g, again)
    return again


def can_be_sparse(dtype, shape):
    return dtype in FLOATS and bool(shape) and 0 < shape[0] < 100 and 0 not in shape


def sparse_gradient(g, dtype, shape, dev):
    """Returns (ids, rows). Ids may repeat."""
    count = g.rng.choice((1, 2, 3, 40))
    return values.index(g, shape[0], (count,), dev, g.rng.choice(("int32", "int64"))), g.want(dtype, (count,) + shape[1:], dev)


def train_rows(g):
    """A step of embeddings: rows are looked up, the worker makes their gradients, and an optimizer applies them."""
    for _ in range(g.rng.choice((1, 1, 2, 4))):
        state = table(g)
        if state is not None:
            train_table(g, state)


def table(g):
    usable = [s for s in g.states if s.kind in (RefVariable, ResourceVariable) and s.kind.inside(g, s) and g.scope.only in (None, s.dev) and can_be_sparse(s.dtype, s.shape)]
    if len(g.scopes) > 1 or (usable and g.chance(0.2)):
        return g.rng.choice(usable) if usable else None
    kind = g.rng.choice((RefVariable, ResourceVariable))
    shape = (g.rng.choice((1, 3, 20)),) + g.rng.choice(((), (1,), (2,), (3,), (8,), (17,), (2, 2)))
    return kind.made(g, kind.place(g), g.rng.choice(("float32", "float32", "float32", "float64", "float16")), shape)


def train_table(g, state):
    me = g.scope.only or ("me" if "me" in g.devices else g.device())
    dtype, id_type, count = state.dtype, g.rng.choice(("int32", "int64")), g.rng.choice((0, 1, 5, 40, 150))
    source = values.fed(g, id_type, (count,), me) if len(g.scopes) == 1 else g.want(id_type, (count,), me)
    ids = g.emit("FloorMod", me, {"x": source, "y": lit(id_type, state.shape[0])}, out=[(id_type, (count,))], feedable=False)[0]
    as_rows = (count,) + state.shape[1:]
    rows = state.kind.look_up(g, state, ids, [(dtype, as_rows)])
    grad = g.emit(g.rng.choice(("Mul", "Sub")), me, {"x": rows, "y": g.want(dtype, as_rows, me)}, out=[(dtype, as_rows)])[0]
    if g.chance(0.6):
        ids, grad, _ = values.unique_rows(g, g.rng.choice((state.dev, me)), ids, grad)
    state.kind.update_rows(g, state, ids, grad)


def some_variable(g, accept, make):
    """Returns a variable that the current body may use: an old one, or one from `make`, or None."""
    usable = [s for s in g.states if s.kind in (RefVariable, ResourceVariable) and s.kind.inside(g, s) and g.scope.only in (None, s.dev) and accept(s)]
    if len(g.scopes) > 1 or (usable and g.chance(0.4)):
        return g.rng.choice(usable) if usable else None
    kind = g.rng.choice((RefVariable, ResourceVariable))
    return kind.made(g, kind.place(g), *make())


def train_dense(g):
    """The worker reads a variable and makes its gradient, and an optimizer applies it."""
    shapes = ((), (3,), (2, 3), (17,), (300,))
    state = some_variable(g, lambda s: s.dtype in FLOATS, lambda: (g.rng.choice(("float32",) * 4 + FLOATS), g.rng.choice(shapes)))
    if state is None:
        return
    me = g.scope.only or ("me" if "me" in g.devices else g.device())
    out = [(state.dtype, state.shape)]
    if state.kind is RefVariable:
        value = snapshot(g, RefVariable.reference(g, state))
    else:
        value = g.emit("ReadVariableOp", state.dev, {"resource": state.handle}, {"dtype": state.dtype}, out=out, reads=[state])[0]
    grad = g.emit(g.rng.choice(("Mul", "Sub")), me, {"x": value, "y": g.want(*out[0], me)}, out=out)[0]
    state.kind.optimize(g, optimizers.dense_updates(state.kind is RefVariable), state, {"grad": grad})


def scatter(g):
    shapes = ((3,), (5, 2), (4,), (2, 2, 2), (20, 3))
    state = some_variable(g, lambda s: scatters.can(s.dtype, s.shape), lambda: (g.rng.choice(("float32", "float64", "int32", "int64", "float16", "int8")), g.rng.choice(shapes)))
    if state is not None:
        handle = RefVariable.reference(g, state) if state.kind is RefVariable else state.handle
        scatters.act(g, handle, [state], state.dtype, state.shape, state.dev)


def references(g):
    """RefSwitch, RefMerge, RefSelect, RefIdentity: references to one of two variables."""
    from generate import Ref

    found = [s for s in g.states if s.kind is RefVariable and g.scope.only in (None, s.dev)]
    if not found:
        RefVariable.make(g) if len(g.scopes) == 1 else None
        return
    first = g.rng.choice(found)
    same = [s for s in found if (s.dev, s.dtype, s.shape) == (first.dev, first.dtype, first.shape)]
    if len(same) == 1 and len(g.scopes) == 1 and g.chance(0.8):
        twin = record_in(g, g.init, "VariableV2", first.dev, attr={"dtype": first.dtype, "shape": list(first.shape)}, out=[(first.dtype, first.shape)])
        start = record_in(g, g.init, "Fill", first.dev, {"dims": lit("int32", list(first.shape)) if first.shape else {"lit": ["int32", 0, [0]]}, "value": small(g, first.dtype)}, out=[(first.dtype, first.shape)])
        record_in(g, g.init, "Assign", first.dev, {"ref": f"{twin}:0", "value": f"{start}:0"}, out=[(first.dtype, first.shape)], target=True)
        same.append(RefVariable.new(g, twin, first.dev, first.dtype, first.shape))
    second = g.rng.choice(same)
    pair = [RefVariable.reference(g, s) for s in (first, second)]
    dev, dtype, shape = first.dev, first.dtype, first.shape
    both = list(dict.fromkeys([first, second]))
    how = g.rng.choice(("identity", "select", "switch", "merge", "merge"))
    if how == "identity":
        number = g.record("RefIdentity", dev, {"input": pair[0]}, out=[(dtype, shape)])
        return use_reference(g, Ref(f"{number}:0", dtype, shape, dev, (), [first]))
    if how == "select":
        at = values.index(g, 2, (), dev)
        guard = at.guard if hasattr(at, "guard") else ()
        # `index` returns a fresh value, never a variable's buffer.
        number = g.record("RefSelect", dev, {"index": at, "inputs": pair}, out=[(dtype, shape)])
        return use_reference(g, Ref(f"{number}:0", dtype, shape, dev, guard, both))
    outer, g.guard = g.guard, ()
    pred = values.predicate(g, dev)
    if pred.alias or pred.guard:
        g.guard = outer
        return
    decides = pred
    if len(g.scopes) == 1 and len(g.init) % 6 == 1:
        # A variable itself decides.
        flag = record_in(g, g.init, "VariableV2", dev, attr={"dtype": "bool", "shape": []}, out=[("bool", ())])
        start = record_in(g, g.init, "Const", dev, attr={"value": ["bool", g.chance(0.5)]}, out=[("bool", ())])
        record_in(g, g.init, "Assign", dev, {"ref": f"{flag}:0", "value": f"{start}:0"}, out=[("bool", ())], target=True)
        decides = Ref(f"{flag}:0", "bool", (), dev, (), [])
        pred = g.emit("Identity", dev, {"input": decides}, out=[("bool", ())])[0]
    g.scope.preds.append(pred)
    at = len(g.scope.preds) - 1
    sides = []
    for one in pair:
        number = g.record("RefSwitch", dev, {"data": one, "pred": decides}, out=[(dtype, shape)] * 2)
        sides.append([Ref(f"{number}:{b}", dtype, shape, dev, ((at, b),), one.states) for b in (0, 1)])
    if g.chance(0.4):
        # Update in one branch before the references merge.
        g.guard = ((at, 1),)
        sides[1][1] = update(g, sides[1][1]) if g.chance(0.5) else sides[1][1]
        if not isinstance(sides[1][1], Ref):
            sides[1][1] = Ref(f"{number}:1", dtype, shape, dev, ((at, 1),), pair[1].states)
    if how == "switch":
        g.guard = ((at, g.rng.randint(0, 1)),)
        use_reference(g, sides[0][g.guard[-1][1]])
    else:
        g.guard = ()
        number = g.record("RefMerge", dev, {"inputs": [sides[0][0], sides[1][1]]}, out=[(dtype, shape), ("int32", ())])
        use_reference(g, Ref(f"{number}:0", dtype, shape, dev, (), both))
        if g.chance(0.5):
            use_reference(g, Ref(f"{number}:0", dtype, shape, dev, (), both))
    g.guard = outer


class ResourceVariable(Kind):
    @classmethod
    def make(cls, g):
        return cls.made(g, cls.place(g), g.rng.choice(g.dtypes), g.rng.choice(g.shapes))

    @classmethod
    def made(cls, g, dev, dtype, shape):
        number = record_in(g, g.init, "VarHandleOp", dev, attr={"dtype": dtype, "shape": list(shape)}, out=[("resource", ())])
        start = record_in(g, g.init, "Fill", dev, {"dims": lit("int32", list(shape)) if shape else {"lit": ["int32", 0, [0]]}, "value": small(g, dtype)}, out=[(dtype, shape)])
        record_in(g, g.init, "AssignVariableOp", dev, {"resource": f"{number}:0", "value": f"{start}:0"}, target=True)
        return cls.new(g, number, dev, dtype, shape)

    @staticmethod
    def add(g, state, value, ctl=()):
        g.emit("AssignAddVariableOp", state.dev, {"resource": state.handle, "value": value}, writes=[state], ctl=ctl)

    @staticmethod
    def look_up(g, state, ids, out):
        return g.emit("ResourceGather", state.dev, {"resource": state.handle, "indices": ids}, {"dtype": state.dtype}, out=out, reads=[state])[0]

    @classmethod
    def update_rows(cls, g, state, ids, grad):
        cls.optimize(g, optimizers.sparse_updates(g, False), state, {"grad": grad, "indices": ids})

    @staticmethod
    def optimize(g, known, state, gradient):
        op, slots, ins, attr = optimizers.update(g, known, state, gradient)
        if op is not None:
            ins.update({"var": state.handle, **{name: one.handle for name, one in slots.items()}})
            g.emit(op, state.dev, ins, attr, writes=[state, *slots.values()])

    @classmethod
    def act(cls, g, state):
        dev, dtype, shape, handle = state.dev, state.dtype, state.shape, state.handle
        choices = ["ReadVariableOp", "ReadVariableOp", "ReadVariableOp", "AssignVariableOp"]
        if dtype in NUMBERS:
            choices += ["AssignAddVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"]
        if shape and shape[0] and shape[0] < 100:
            choices += ["ResourceGather", "ResourceScatterUpdate"] + (["ResourceScatterAdd"] if dtype in NUMBERS else [])
        if dtype in ("int32", "int64") and shape == ():
            choices += ["ResourceCountUpTo"]
        if dtype in FLOATS + COMPLEX:
            choices += ["ResourceApplyGradientDescent"]
        if can_be_sparse(dtype, shape):
            choices += ["sparse update"] * 2
        op = g.rng.choice(choices)
        if dtype in NUMBERS and dev != "me" and g.scope.only is None and not g.guard and g.chance(0.15):
            cls.keep_old(g, state)
        elif op == "ReadVariableOp":
            g.emit(op, dev, {"resource": handle}, {"dtype": dtype}, out=[(dtype, shape)], reads=[state])
        elif op == "ResourceGather":
            count = g.rng.choice((1, 2, 40))
            at = values.index(g, shape[0], (count,), dev, g.rng.choice(("int32", "int64")))
            g.emit(op, dev, {"resource": handle, "indices": at}, {"dtype": dtype}, out=[(dtype, (count,) + shape[1:])], reads=[state])
        elif op.startswith("ResourceScatter"):
            at = values.index(g, shape[0], (1,), dev)
            what = g.want(dtype, (1,) + shape[1:], dev)
            g.emit(op, dev, {"resource": handle, "indices": at, "updates": what}, writes=[state])
        elif op == "sparse update":
            cls.update_rows(g, state, *sparse_gradient(g, dtype, shape, dev))
        elif op == "ResourceCountUpTo":
            g.emit(op, dev, {"resource": handle}, {"limit": 10**9, "T": dtype}, out=[(dtype, ())], writes=[state])
        elif op == "ResourceApplyGradientDescent":
            alpha, delta = small(g, dtype), g.want(dtype, shape, dev)
            g.emit(op, dev, {"var": handle, "alpha": alpha, "delta": delta}, writes=[state])
        else:
            value = g.want(dtype, shape, dev)
            g.emit(op, dev, {"resource": handle, "value": value}, writes=[state])

    @classmethod
    def keep_old(cls, g, state):
        """What was read before an update meets, on its server, what the worker made of the new value."""
        dev, dtype, shape = state.dev, state.dtype, state.shape
        read = lambda: g.emit("ReadVariableOp", dev, {"resource": state.handle}, {"dtype": dtype}, out=[(dtype, shape)], reads=[state])[0]
        old = read()
        cls.add(g, state, g.want(dtype, shape, dev))
        made = g.emit("Mul", "me", {"x": read(), "y": small(g, dtype)}, out=[(dtype, shape)])[0]
        g.emit("Sub", dev, {"x": old, "y": made}, out=[(dtype, shape)])

    @staticmethod
    def finish(g, state):
        final(g, record_in(g, g.final, "ReadVariableOp", state.dev, {"resource": state.handle}, {"dtype": state.dtype}, out=[(state.dtype, state.shape)]))


def counters(g, dtypes=("int32", "int64", "float32")):
    """Updates that concurrent steps may make in any order: locked additions and enqueues, none of which may be lost. Returns (ids to run, refs to fetch)."""
    targets, fetch = [], []
    for _ in range(g.rng.randint(1, 4)):
        dev = g.rng.choice([d for d in ("ps0", "ps1") if d in g.devices] or ["ps0"])
        dtype, shape = g.rng.choice(dtypes), g.rng.choice(((), (), (3,), (2000,)))
        delta = g.emit("AddV2", g.device(), {"x": values.fed(g, dtype, shape, g.device()), "y": lit(dtype, 1)}, out=[(dtype, shape)], pool=False)[0]
        fetch.append(delta.ref)
        kind = g.rng.choice(("reference", "reference", "resource", "queue"))
        ctl = targets[-1:] if g.chance(0.3) else []
        if kind == "queue":
            queue = record_in(g, g.init, "FIFOQueueV2", dev, attr={"component_types": [dtype], "shapes": [list(shape)]}, out=[("resource", ())])
            targets.append(g.record("QueueEnqueueV2", dev, {"handle": f"{queue}:0", "components": [delta]}, ctl=ctl))
            final(g, record_in(g, g.final, "QueueSizeV2", dev, {"handle": f"{queue}:0"}, out=[("int32", ())]))
            continue
        state = (RefVariable if kind == "reference" else ResourceVariable).made(g, dev, dtype, shape)
        if kind == "reference":
            sign = g.rng.choice(("AssignAdd", "AssignSub", "ScatterAdd", "ScatterSub") if shape == (3,) else ("AssignAdd", "AssignSub"))
            ins = {"ref": state.handle, "indices": lit("int32", [0, 1, 2]), "updates": delta} if sign.startswith("Scatter") else {"ref": state.handle, "value": delta}
            targets.append(g.record(sign, dev, ins, {"use_locking": True}, out=[(dtype, shape)], ctl=ctl))
        else:
            targets.append(g.record(g.rng.choice(("AssignAddVariableOp", "AssignSubVariableOp")), dev, {"resource": state.handle, "value": delta}, ctl=ctl))
        if g.chance(0.4):
            # A concurrent read; its value is not compared.
            seen = g.record("Identity", dev, {"input": state.handle}, out=[(dtype, shape)]) if kind == "reference" else g.record("ReadVariableOp", dev, {"resource": state.handle}, {"dtype": dtype}, out=[(dtype, shape)])
            targets.append(g.record("Neg", "me", {"x": f"{seen}:0"}, out=[(dtype, shape)]))
    return targets, fetch


def step_counter(g):
    """Counts on one server after updates on any, gathered as optimizers do it. Mostly nothing but the end of the step comes after it."""
    kind, dtype = g.rng.choice((RefVariable, ResourceVariable)), g.rng.choice(("int32", "int64"))
    found = [s for s in g.states if (s.kind, s.dtype, s.shape) == (kind, dtype, ())]
    state = g.rng.choice(found) if found and g.chance(0.6) else kind.made(g, kind.place(g), dtype, ())
    pushed = []
    if g.chance(0.7):
        for dev in [d for d in ("ps0", "ps1") if d in g.devices]:
            one = g.rng.choice((RefVariable, ResourceVariable)).made(g, dev, "float32", (2,))
            delta = g.emit("Mul", "me" if "me" in g.devices else dev, {"x": values.fed(g, "float32", (2,), dev), "y": lit("float32", 3)}, out=[("float32", (2,))])[0]
            one.kind.add(g, one, delta)
            pushed.append(one.writes[-1][0])
    awaited = [number for s in g.states if s is not state for number, guard in s.writes if not guard]
    awaited = [number for number in awaited if number in pushed or g.chance(0.3)]
    cut = g.rng.randint(0, len(awaited))
    parts = [g.record("NoOp", g.device(), ctl=part) for part in (awaited[:cut], awaited[cut:]) if part]
    gathered = [g.record("NoOp", g.device(), ctl=parts)] if parts and g.chance(0.7) else parts
    by = lit(dtype, g.rng.choice((1, 1, 5))) if g.chance(0.9) else g.want(dtype, (), state.dev)
    made = kind.add(g, state, by, gathered)
    if made and g.chance(0.15):
        from generate import Ref

        snapshot(g, Ref(made[0].ref, dtype, (), state.dev, made[0].guard, [state]))
