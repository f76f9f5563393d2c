"""Variables that change their shape, and some that are destroyed and made again."""

import values
from kinds import Kind, final, record_in, small
from program import NUMBERS, lit

SHAPES = ((), (2,), (3,), (2, 2), (0,))
ANY = (-1,)  # a shape that is known only at run time


def act(g):
    if len(g.scopes) > 1:
        return
    found = [state for state in g.states if state.kind is Reshaped]
    if not found or g.chance(0.2):
        Reshaped.make(g)
        found = [g.states[-1]]
    for _ in range(g.rng.choice((1, 2, 3))):
        Reshaped.act(g, g.rng.choice(found))


class Reshaped(Kind):
    """A variable of any shape. What is read is fetched, or reduced to a scalar."""

    @classmethod
    def make(cls, g):
        dev, dtype = cls.place(g), g.rng.choice(("float32", "int32", "int64"))
        is_ref = g.chance(0.5)
        op = "VariableV2" if is_ref else "VarHandleOp"
        number = record_in(g, g.init, op, dev, attr={"dtype": dtype, "shape": None}, out=[(dtype, ANY) if is_ref else ("resource", ())])
        shape = g.rng.choice(SHAPES)
        start = record_in(g, g.init, "Fill", dev, {"dims": values._shape(shape), "value": small(g, dtype)}, out=[(dtype, shape)])
        ins, attr = {"ref" if is_ref else "resource": f"{number}:0", "value": f"{start}:0"}, {"validate_shape": False}
        record_in(g, g.init, "Assign" if is_ref else "AssignVariableOp", dev, ins, attr if is_ref else None, out=[(dtype, ANY)] if is_ref else (), target=True)
        return cls.new(g, number, dev, dtype, None, is_ref=is_ref)

    @staticmethod
    def inside(g, state):
        return len(g.scopes) == 1

    @classmethod
    def handle(cls, state):
        from generate import Ref

        return Ref(state.handle, state.dtype, ANY, state.dev, (), [state]) if state.extra["is_ref"] else state.handle

    @classmethod
    def act(cls, g, state):
        how = g.rng.choice(("assign", "read", "read", "exists") + (() if state.extra["is_ref"] else ("destroy", "destroy")))
        dev, handle, is_ref = state.dev, cls.handle(state), state.extra["is_ref"]
        if how == "assign":
            cls.assign(g, state)
        elif how == "exists":
            op, name = ("IsVariableInitialized", "ref") if is_ref else ("VarIsInitializedOp", "resource")
            g.emit(op, dev, {name: handle}, out=[("bool", ())], reads=[state])
        elif how == "destroy":
            g.emit("DestroyResourceOp", dev, {"resource": handle}, {"ignore_lookup_error": g.chance(0.5)}, writes=[state], pin=True)
            if g.chance(0.5):
                g.emit("VarIsInitializedOp", dev, {"resource": handle}, out=[("bool", ())], reads=[state], pin=True)
            cls.assign(g, state)
        else:
            cls.read(g, state)

    @classmethod
    def assign(cls, g, state):
        handle, is_ref = cls.handle(state), state.extra["is_ref"]
        # In a branch that is not taken, nothing would make what has been destroyed again.
        guard, g.guard = g.guard, ()
        shape = g.rng.choice(SHAPES)
        value = g.want(state.dtype, shape, state.dev)
        if value.guard or value.alias:
            value = values.constant(g, state.dtype, shape, state.dev)
        ins = {"ref" if is_ref else "resource": handle, "value": value}
        g.emit("Assign" if is_ref else "AssignVariableOp", state.dev, ins, {"validate_shape": False} if is_ref else None, out=[(state.dtype, ANY)] if is_ref else (), writes=[state], pool=False)
        g.guard = guard

    @classmethod
    def read(cls, g, state):
        dev, dtype, handle = state.dev, state.dtype, cls.handle(state)
        out = [(dtype, ANY)]
        if state.extra["is_ref"]:
            value = g.emit("Neg" if dtype in NUMBERS else "Identity", dev, {"x": handle}, out=out, pool=False)[0]
        else:
            value = g.emit("ReadVariableOp", dev, {"resource": handle}, {"dtype": dtype}, out=out, reads=[state], pool=False)[0]
        there = g.device()
        flat = g.emit("Reshape", there, {"tensor": value, "shape": lit("int32", [-1])}, out=out, pool=False)[0]
        g.emit("Sum", there, {"input": flat, "axis": lit("int32", 0)}, out=[(dtype, ())])
        if not value.guard and g.chance(0.5):
            g.wanted.append(value)

    @classmethod
    def finish(cls, g, state):
        op, ins, attr = ("Identity", {"input": state.handle}, None) if state.extra["is_ref"] else ("ReadVariableOp", {"resource": state.handle}, {"dtype": state.dtype})
        final(g, record_in(g, g.final, op, state.dev, ins, attr, out=[(state.dtype, ANY)]))
