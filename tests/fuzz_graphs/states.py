"""State other than variables, and the table of all kinds."""

import values
from kinds import Kind, final, record_in, small
from program import lit
from variables import RefVariable, ResourceVariable


class Outside(Kind):
    """Kinds whose operations may block: used only where their number of runs is known."""

    @staticmethod
    def inside(g, state):
        return len(g.scopes) == 1


def of_kernel(g):
    """With rests, more state lives only as long as its kernel does."""
    return {"shared_name": ""} if "pause" in g.features and g.sessions == 1 else {}


class Queue(Outside):
    """Filled well before the first step, so that no dequeue blocks."""

    @classmethod
    def make(cls, g):
        dev, dtype = cls.place(g), g.rng.choice(("float32", "int32", "int64", "string"))
        shape = g.rng.choice(((), (2,)))
        op = g.rng.choice(("FIFOQueueV2", "RandomShuffleQueueV2", "PaddingFIFOQueueV2", "PriorityQueueV2", "FIFOQueue"))
        kinds = [dtype]
        attr = {"component_types": [dtype], "shapes": [list(shape)], **of_kernel(g)}
        if op == "RandomShuffleQueueV2":
            attr |= {"seed": 5, "seed2": 7, "min_after_dequeue": 2}
        if op == "PriorityQueueV2":
            kinds = ["int64", dtype]
        suffix = "" if op == "FIFOQueue" else "V2"
        number = record_in(g, g.init, op, dev, attr=attr, out=[("string" if not suffix else "resource", ())])
        many = []
        for place, kind in enumerate(kinds):
            full = (40,) + (shape if place == len(kinds) - 1 else ())
            many.append(record_in(g, g.init, "Fill", dev, {"dims": lit("int32", list(full)), "value": small(g, kind)}, out=[(kind, full)]))
        record_in(g, g.init, "QueueEnqueueMany" + suffix, dev, {"handle": f"{number}:0", "components": [f"{one}:0" for one in many]}, target=True)
        return cls.new(g, number, dev, dtype, shape, kinds=kinds, suffix=suffix, left=40)

    @classmethod
    def act(cls, g, state):
        dev, kinds, suffix = state.dev, state.extra["kinds"], state.extra["suffix"]
        types = [(kind, state.shape if kind is kinds[-1] else ()) for kind in kinds]
        op = g.rng.choice(("QueueEnqueue", "QueueEnqueue", "QueueDequeue", "QueueSize"))
        if op == "QueueEnqueue":
            ins = {"handle": state.handle, "components": [g.want(dtype, shape, dev) for dtype, shape in types]}
            g.emit(op + suffix, dev, ins, writes=[state])
        elif op == "QueueDequeue":
            if state.extra["left"] <= 20:
                return
            state.extra["left"] -= 8  # one for each run
            g.emit(op + suffix, dev, {"handle": state.handle}, {"component_types": kinds}, out=types, writes=[state])
        else:
            g.emit(op + suffix, dev, {"handle": state.handle}, out=[("int32", ())], reads=[state])

    @staticmethod
    def finish(g, state):
        final(g, record_in(g, g.final, "QueueSize" + state.extra["suffix"], state.dev, {"handle": state.handle}, out=[("int32", ())]))


class Staging(Outside):
    """A staging area: Unstage waits for Stage although no edge orders them."""

    @classmethod
    def make(cls, g):
        dev, dtype, shape = cls.place(g), g.rng.choice(g.dtypes), g.rng.choice(g.shapes)
        kind = g.rng.choice(("", "Map", "OrderedMap"))
        number = g.new_id()
        return cls.new(g, number, dev, dtype, shape, kind=kind, attr={"dtypes": [dtype], "shared_name": f"s{number}"}, pairs=0)

    @classmethod
    def act(cls, g, state):
        guard, g.guard = g.guard, ()
        kind, attr, dev = state.extra["kind"], state.extra["attr"], state.dev
        type_ = (state.dtype, state.shape)
        value = g.want(*type_, dev)
        if value.guard or value.alias or state.extra["pairs"] >= (1 if not kind else 3):
            g.guard = guard
            return
        state.extra["pairs"] += 1
        key = lit("int64", state.extra["pairs"])
        if kind:
            ins = {"key": key, "indices": lit("int32", [0]), "values": [value]}
            g.emit(f"{kind}Stage", dev, ins, attr)
        else:
            g.emit("Stage", dev, {"values": [value]}, {"shared_name": attr["shared_name"]})
        put = g.scope.records[-1]["id"]
        if g.chance(0.3):
            g.fill(1)
            g.guard = ()
        ctl = [put] if g.chance(0.2) else []
        if g.chance(0.5):
            # Unstage starts after an operation that is unrelated to Stage.
            other = g.pick(dev, lambda v: not v.guard and not v.alias)
            if other is not None:
                ctl.append(int(other.ref.split(":")[0]))
        if kind:
            g.emit(f"{kind}Unstage", dev, {"key": key, "indices": lit("int32", [0])}, attr, out=[type_], ctl=ctl, needs=[put])
        else:
            g.emit("Unstage", dev, {}, attr, out=[type_], ctl=ctl, needs=[put])
        g.guard = guard

    @staticmethod
    def finish(g, state):
        op = state.extra["kind"] + ("StageSize" if not state.extra["kind"] else "Size")
        final(g, record_in(g, g.final, op, state.dev, {}, state.extra["attr"], out=[("int32", ())]))


class Table(Kind):
    @classmethod
    def make(cls, g):
        dev, key, value = cls.place(g), g.rng.choice(("int64", "string")), g.rng.choice(("float32", "int64"))
        number = record_in(g, g.init, "MutableHashTableV2", dev, attr={"key_dtype": key, "value_dtype": value, **of_kernel(g)}, out=[("resource", ())])
        return cls.new(g, number, dev, value, (), key=key)

    @classmethod
    def act(cls, g, state):
        dev, key, value = state.dev, state.extra["key"], state.dtype
        op = g.rng.choice(("LookupTableInsertV2", "LookupTableFindV2", "LookupTableFindV2", "LookupTableSizeV2", "LookupTableRemoveV2"))
        count = g.rng.choice((1, 2, 3))
        if op == "LookupTableSizeV2":
            g.emit(op, dev, {"table_handle": state.handle}, out=[("int64", ())], reads=[state])
        elif op == "LookupTableRemoveV2":
            g.emit(op, dev, {"table_handle": state.handle, "keys": g.want(key, (count,), dev)}, writes=[state])
        elif op == "LookupTableFindV2":
            ins = {"table_handle": state.handle, "keys": g.want(key, (count,), dev), "default_value": small(g, value)}
            g.emit(op, dev, ins, out=[(value, (count,))], reads=[state])
        else:
            g.emit(op, dev, {"table_handle": state.handle, "keys": g.want(key, (count,), dev), "values": g.want(value, (count,), dev)}, writes=[state])

    @staticmethod
    def finish(g, state):
        size = record_in(g, g.final, "LookupTableSizeV2", state.dev, {"table_handle": state.handle}, out=[("int64", ())])
        final(g, size)


class Random(Kind):
    """A random generator: each run of the operation continues where the last one stopped."""

    @classmethod
    def make(cls, g):
        from generate import State

        g.states.append(State(cls, g.new_id(), "", cls.place(g), extra={"made": False}))

    @staticmethod
    def inside(g, state):
        return len(g.scopes) == 1 and not state.extra["made"]

    @classmethod
    def act(cls, g, state):
        state.extra["made"] = True
        dev, shape = state.dev, g.rng.choice(((), (2,), (3,)))
        op = g.rng.choice(("RandomUniform", "RandomStandardNormal", "RandomUniformInt", "Multinomial", "RandomShuffle"))
        seeds = {"seed": g.rng.randint(1, 99), "seed2": 3}
        dims = lit("int32", list(shape)) if shape else {"lit": ["int32", 0, [0]]}
        if op == "RandomShuffle":
            g.emit(op, dev, {"value": g.want("int32", (3,), dev)}, seeds, out=[("int32", (3,))], writes=[state])
        elif op == "Multinomial":
            ins = {"logits": {"lit": ["float32", [[0.1, 0.3, 0.9]]]}, "num_samples": lit("int32", 3)}
            g.emit(op, dev, ins, {**seeds, "output_dtype": "int64"}, out=[("int64", (1, 3))], writes=[state])
        elif op == "RandomUniformInt":
            g.emit(op, dev, {"shape": dims, "minval": lit("int32", 0), "maxval": lit("int32", 1000)}, seeds, out=[("int32", shape)], writes=[state])
        else:
            g.emit(op, dev, {"shape": dims}, {**seeds, "dtype": "float32"}, out=[("float32", shape)], writes=[state])


class File(Kind):
    """A file in its task's working directory, so that access from the wrong process shows."""

    devices = ("ps0", "ps1", "ps0", "ps1", "me")

    @classmethod
    def make(cls, g):
        dev = cls.place(g)
        number = g.new_id()
        state = cls.new(g, number, dev, "string", (), name=f"C0000000-f{number}")
        record_in(g, g.init, "WriteFile", dev, {"filename": lit("string", state.extra["name"]), "contents": lit("string", "first")}, target=True)
        return state

    @classmethod
    def act(cls, g, state):
        dev, name = state.dev, lit("string", state.extra["name"])
        how = g.rng.choice(("read", "read", "write", "who", "match"))
        if how == "read":
            g.emit("ReadFile", dev, {"filename": name}, out=[("string", ())], reads=[state])
        elif how == "write":
            g.emit("WriteFile", dev, {"filename": name, "contents": g.want("string", (), dev)}, writes=[state])
        elif how == "who":
            g.emit("ReadFile", dev, {"filename": lit("string", "whoami")}, out=[("string", ())], pin=g.chance(0.7))
        else:
            g.emit("MatchingFiles", dev, {"pattern": lit("string", "iam-*")}, out=[("string", (1,))], pin=g.chance(0.7))

    @staticmethod
    def finish(g, state):
        final(g, record_in(g, g.final, "ReadFile", state.dev, {"filename": lit("string", state.extra["name"])}, out=[("string", ())]))


class InStep(Outside):
    """A stack or a TensorArray: created, used and destroyed within a step."""

    @classmethod
    def make(cls, g):
        dev = cls.place(g)
        guard, g.guard = g.guard, ()
        dtype, shape = g.rng.choice(("float32", "int32")), g.rng.choice(((), (2,)))
        if g.chance(0.5):
            handle = g.emit("StackV2", dev, {"max_size": lit("int32", 5)}, {"elem_type": dtype, "stack_name": f"k{g.next_id}"}, out=[("resource", ())])[0]
            push = g.emit("StackPushV2", dev, {"handle": handle, "elem": g.want(dtype, shape, dev)}, out=[(dtype, shape)])[0]
            number = int(push.ref.split(":")[0])
            g.emit("StackPopV2", dev, {"handle": handle}, {"elem_type": dtype}, out=[(dtype, shape)], ctl=[number])
        else:
            g.record("TensorArrayV3", dev, {"size": lit("int32", 2)}, {"dtype": dtype, "element_shape": list(shape), "tensor_array_name": f"a{g.next_id}"}, out=[("resource", ()), ("float32", ())])
            number = g.next_id - 1
            flow = f"{number}:1"
            for at in (0, 1):
                value = g.want(dtype, shape, dev)
                if value.guard:
                    value = values.constant(g, dtype, shape, dev)
                ins = {"handle": f"{number}:0", "index": lit("int32", at), "value": value, "flow_in": flow}
                flow = g.emit("TensorArrayWriteV3", dev, ins, out=[("float32", ())], pool=False)[0]
            g.emit("TensorArrayReadV3", dev, {"handle": f"{number}:0", "index": lit("int32", 1), "flow_in": flow}, {"dtype": dtype}, out=[(dtype, shape)])
        g.guard = guard

    @staticmethod
    def inside(g, state):
        return False


class Accumulator(Outside):
    @classmethod
    def make(cls, g):
        dev, shape = cls.place(g), g.rng.choice(((), (2,)))
        number = record_in(g, g.init, "ConditionalAccumulator", dev, attr={"dtype": "float32", "shape": list(shape)}, out=[("string", ())])
        return cls.new(g, number, dev, "float32", shape)

    @classmethod
    def act(cls, g, state):
        """Adds gradients, then takes their mean."""
        guard, g.guard = g.guard, ()
        count = g.rng.choice((1, 2))
        for _ in range(count):
            ins = {"handle": state.handle, "local_step": lit("int64", 1 << 40), "gradient": g.want("float32", state.shape, state.dev)}
            g.emit("AccumulatorApplyGradient", state.dev, ins, writes=[state])
        g.emit("AccumulatorTakeGradient", state.dev, {"handle": state.handle, "num_required": lit("int32", count)}, {"dtype": "float32"}, out=[("float32", state.shape)], writes=[state])
        g.guard = guard

    @staticmethod
    def finish(g, state):
        final(g, record_in(g, g.final, "AccumulatorNumAccumulated", state.dev, {"handle": state.handle}, out=[("int32", ())]))


class Barrier(Outside):
    @classmethod
    def make(cls, g):
        dev, dtype = cls.place(g), g.rng.choice(("float32", "int64"))
        number = record_in(g, g.init, "Barrier", dev, attr={"component_types": [dtype], "shapes": [[]]}, out=[("string", ())])
        return cls.new(g, number, dev, dtype, ())

    @classmethod
    def act(cls, g, state):
        guard, g.guard = g.guard, ()
        keys = [f"k{g.next_id}a", f"k{g.next_id}b"]
        ins = {"handle": state.handle, "keys": lit("string", keys), "values": g.want(state.dtype, (2,), state.dev)}
        g.emit("BarrierInsertMany", state.dev, ins, {"component_index": 0}, writes=[state])
        out = [("int64", (2,)), ("string", (2,)), (state.dtype, (2,))]
        g.emit("BarrierTakeMany", state.dev, {"handle": state.handle, "num_elements": lit("int32", 2)}, {"component_types": [state.dtype]}, out=out, writes=[state])
        g.guard = guard

    @staticmethod
    def finish(g, state):
        final(g, record_in(g, g.final, "BarrierReadySize", state.dev, {"handle": state.handle}, out=[("int32", ())]))


def error(g):
    """A kernel that fails in some runs, after everything before it and ordered before nothing else."""
    dev = g.device()
    limit = g.rng.choice((2, 5))
    number = g.record("@feed", dev, out=[("int32", (1,))])
    from generate import Val

    at = Val(f"{number}:0", "int32", (1,), dev)
    params = values.constant(g, "float32", (limit,), dev)
    g.emit("GatherV2", dev, {"params": params, "indices": at, "axis": lit("int32", 0)}, out=[("float32", (1,))], writes=list(g.states), feedable=False, ctl=[r["id"] for r in g.scope.records if r.get("needs")])


KINDS = (ResourceVariable, ResourceVariable, RefVariable, RefVariable, Queue, Staging, Staging, Table, Random, File, InStep, Accumulator, Barrier)
