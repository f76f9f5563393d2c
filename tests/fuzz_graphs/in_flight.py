"""Several steps of different kinds in flight: threads run them over the same session at once, each with feeds of its own.

What a step fetches depends on its feeds only. What it changes ends the same in every order: sums of whole numbers, and the number of values in a queue.
"""

import values
from kinds import final, record_in
from program import closure, lit, node_of
from variables import RefVariable, ResourceVariable, counters

WHOLE = ("int32", "int64")


def run(g, records):
    """Returns the run. Its `steps` are what its threads do, and each of them is part of the run."""
    looked_up = [look_up(g) for _ in range(g.rng.choice((0, 1, 2)))]
    found = pure(g, records)
    steps = [step(g, records, *counters(g, WHOLE))]
    for _ in range(g.rng.choice((1, 1, 2, 3))):
        fetch = g.rng.sample(found, min(len(found), g.rng.choice((1, 2, 4)))) + [value.ref for value in looked_up if g.chance(0.6)]
        if fetch:
            steps.append(step(g, records, [], fetch))
    if g.chance(0.4):
        # In front: the shrinker keeps the first two lanes.
        steps = [*(step(g, records, *one) for one in queue(g)), *steps]
    lanes = [number % g.sessions for number in range(len(steps) * g.rng.choice((1, 2) if len(steps) < 4 else (1,)))]
    both = {key: sorted({one for each in steps for one in each[key]}) for key in ("fetch", "targets", "feed")}
    return {**both, "mode": "together", "lanes": lanes, "times": g.rng.choice((2, 5, 10)), "steps": steps}


def step(g, records, targets, fetch):
    needed = closure(records, targets + [node_of(ref) for ref in fetch])
    made = {"fetch": fetch, "targets": targets, "feed": sorted(needed & {r["id"] for r in records if r["op"] == "@feed"})}
    return {**made, "mode": "callable"} if g.chance(0.25) else made


def pure(g, records):
    """Returns values that depend on what the client feeds, and on no state."""
    feeds = {r["id"] for r in records if r["op"] == "@feed"}
    long = {r["id"] for r in records if r["out"] and (r["out"][0][1] == [800, 800] or len(r["out"]) > 100)}  # values.slow, values.wide
    found = []
    for value in g.fetchable():
        needed = closure(records, [node_of(value.ref)])
        if value.dtype not in ("resource", "variant") and needed & feeds and not needed & (g.users | long):
            found.append(value.ref)
    return found


def look_up(g):
    """Rows of a variable that nothing writes, by ids that the client feeds, and what the worker makes of them."""
    kind, me = g.rng.choice((RefVariable, ResourceVariable)), "me" if "me" in g.devices else g.device()
    count, width = g.rng.choice((1, 5, 40)), g.rng.choice((1, 3, 300))
    state = kind.made(g, g.rng.choice(("ps0", "ps1")), "float32", (7, width))
    ids = g.emit("FloorMod", me, {"x": values.fed(g, "int32", (count,), me), "y": lit("int32", 7)}, out=[("int32", (count,))], pool=False)[0]
    rows = kind.look_up(g, state, ids, [("float32", (count, width))])
    return g.emit("Mul", me, {"x": rows, "y": values.fed(g, "float32", (count, width), me)}, out=[("float32", (count, width))], pool=False)[0]


def queue(g):
    """Returns two steps: one puts values into a queue, the other one waits for as many, and adds them up."""
    dev, dtype, shape = g.rng.choice(("ps0", "ps1")), g.rng.choice(WHOLE), g.rng.choice(((), (3,), (2000,)))
    made = record_in(g, g.init, "FIFOQueueV2", dev, attr={"component_types": [dtype], "shapes": [list(shape)]}, out=[("resource", ())])
    value = g.emit("AddV2", g.device(), {"x": values.fed(g, dtype, shape, g.device()), "y": lit(dtype, 1)}, out=[(dtype, shape)], pool=False)[0]
    put = g.record("QueueEnqueueV2", dev, {"handle": f"{made}:0", "components": [value]})
    taken = g.record("QueueDequeueV2", dev, {"handle": f"{made}:0"}, {"component_types": [dtype]}, out=[(dtype, shape)])
    there = g.record("Neg", g.device(), {"x": f"{taken}:0"}, out=[(dtype, shape)])
    total = ResourceVariable.made(g, g.rng.choice(("ps0", "ps1")), dtype, shape)
    added = g.record("AssignAddVariableOp", total.dev, {"resource": total.handle, "value": f"{there}:0"})
    final(g, record_in(g, g.final, "QueueSizeV2", dev, {"handle": f"{made}:0"}, out=[("int32", ())]))
    return ([put], [value.ref]), ([added], [])
