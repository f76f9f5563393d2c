"""Shrinks a program that shows a difference, as long as it still shows it.

Removing a record keeps the order of the others: a record that waited for a removed one waits for that one's predecessors instead. So a determined
program stays determined."""

import copy
import time

import optimizers
import program as programs
from program import CONTROLS, OUTS, is_lit, lit, node_of, walk

PARTS = ("init", "body", "final")
# Operations that return their reference input.
PASS_ON = {op: "ref" for op in ("Assign", "AssignAdd", "AssignSub", "ScatterAdd", "ScatterSub", "ScatterMul", "ScatterUpdate", "StridedSliceAssign")}
PASS_ON.update({f"Scatter{what}": "ref" for what in ("Min", "Max", "Div", "NdUpdate", "NdAdd", "NdSub", "NdMin", "NdMax")})
PASS_ON.update({op: "var" for op in ("ApplyGradientDescent", *optimizers.DENSE_UPDATES, *optimizers.SPARSE_UPDATES, *optimizers.MORE_SPARSE_UPDATES)})
PASS_ON.update(RefIdentity="input")
REFERENCES = {"VariableV2", "RefSwitch", "RefMerge", "RefSelect", "Barrier", "ConditionalAccumulator", "FIFOQueue"}
OPAQUE = ("resource", "variant")


def all_records(program):
    for part in PARTS:
        yield from walk(program[part])


def default(dtype, shape):
    value = {"bool": True, "string": "s"}.get(dtype, 1)
    return lit(dtype, value) if not shape else lit(dtype, value, [max(n, 0) for n in shape])


def without(program, ids):
    """Returns the program without these records and those that depend on them, or None if nothing is left."""
    gone = set(ids)
    by_id = {record["id"]: record for record in all_records(program)}
    inside = {}  # record -> the records of its bodies
    for record in by_id.values():
        inside[record["id"]] = {inner["id"] for inner in walk([record])} - {record["id"]}
    while True:
        before = len(gone)
        for record in by_id.values():
            number = record["id"]
            if number in gone:
                gone |= inside[number]
                continue
            if any(one in gone for key in ("needs", "waits") for one in record.get(key, ())):
                gone.add(number)
            for ref in programs.each_input(record):
                if is_lit(ref) or node_of(ref) not in gone:
                    continue
                source = by_id[node_of(ref)]
                dtype = source["out"][int(ref.split(":")[1])][0]
                if record["op"] in ("Merge", "RefMerge") or dtype in OPAQUE or source["op"] in REFERENCES or record["op"].startswith("TensorArray"):
                    gone.add(number)
        if len(gone) == before:
            break

    def follow(ref):
        """Returns the replacement of an output: itself, the reference it forwarded, or a literal."""
        while not is_lit(ref) and node_of(ref) in gone:
            source = by_id[node_of(ref)]
            if source["op"] in PASS_ON:
                ref = source["in"][PASS_ON[source["op"]]]
            else:
                ref = default(*source["out"][int(ref.split(":")[1])])
        return ref

    def expand(number, seen):
        if number in seen:
            return set()
        seen.add(number)
        if number not in gone:
            return {number}
        found = set()
        for one in programs.dependencies(by_id[number], needs=False):
            found |= expand(one, seen)
        return found

    def rewrite(records, visible):
        out = []
        visible = visible | {r["id"] for r in records}
        for record in records:
            if record["id"] in gone:
                continue
            record = dict(record)
            ctl = set()
            for ref in programs.each_input(record):
                if not is_lit(ref) and node_of(ref) in gone:
                    ctl |= expand(node_of(ref), set())
            for one in record.get("ctl", ()):
                ctl |= expand(one, set())
            ctl = sorted(one for one in ctl if one in visible)
            record.pop("ctl", None)
            if ctl:
                record["ctl"] = ctl
            record["in"] = {name: [follow(one) for one in ref] if isinstance(ref, list) else follow(ref) for name, ref in record["in"].items()}
            for body in programs.BODIES:
                if body in record:
                    record[body] = rewrite(record[body], visible | set(record.get("vars", ())))
                    inner = {r["id"] for r in record[body]} | set(record.get("vars", ()))
                    wanted = set()
                    for one in record[f"{body}_ctl"]:
                        wanted |= expand(one, set())
                    for ref in record[f"{body}_out"]:
                        if not is_lit(ref) and node_of(ref) in gone:
                            wanted |= expand(node_of(ref), set())
                    record[f"{body}_ctl"] = sorted(wanted & inner)
                    record[f"{body}_out"] = [follow(ref) for ref in record[f"{body}_out"]]
            out.append(record)
        return out

    made = dict(program)
    for part in PARTS:
        made[part] = rewrite(program[part], {r["id"] for p in PARTS for r in program[p]})
    left = {record["id"] for part in PARTS for record in made[part]}
    feeds = {record["id"] for record in made["body"] if record["op"] == "@feed"}
    runs = []
    for run in program["runs"]:
        run = dict(run, fetch=[f for f in run["fetch"] if node_of(f) in left])
        targets = set()
        for one in run["targets"]:
            targets |= expand(one, set()) & left
        run["targets"] = sorted(targets)
        run["feed"] = sorted(set(run["feed"]) & feeds)
        if "feed_inner" in run:
            run["feed_inner"] = [f for f in run["feed_inner"] if node_of(f[0]) in left]
        if "first" in run:
            first = run["first"]
            run["first"] = {"feed": [f for f in first["feed"] if f in feeds], "fetch": [f for f in first["fetch"] if node_of(f) in left]}
            if not run["feed"]:
                run.pop("first")
                run["mode"] = "run"
        runs.append(run)
    made["runs"] = runs
    return made if left else None


def reduce_control(program):
    """Removes control edges that others imply."""
    made = copy.deepcopy(program)
    for part in PARTS:
        ancestors = {}

        def visit(records, ancestors=ancestors):
            for record in records:
                direct = programs.dependencies(record, needs=False)
                data = {node_of(ref) for ref in programs.each_input(record) if not is_lit(ref)}
                implied = set()
                for one in direct:
                    implied |= ancestors.get(one, set())
                if "ctl" in record:
                    record["ctl"] = [c for c in record["ctl"] if c not in implied and c not in data]
                    if not record["ctl"]:
                        record.pop("ctl")
                ancestors[record["id"]] = implied | direct

        visit(made[part])
    return made


def shrink(program, shows, seconds=120.0):
    """Returns the smallest program found for which `shows(program)` holds."""
    deadline = time.monotonic() + seconds
    best = program

    def attempt(candidate):
        nonlocal best
        if candidate is None or time.monotonic() > deadline:
            return False
        if shows(candidate):
            best = candidate
            return True
        return False

    def attempt_runs():
        number = len(best["runs"]) - 2
        while number > 0:
            attempt(dict(best, runs=best["runs"][:number] + best["runs"][number + 1 :]))
            number -= 1
        if best["options"].get("sessions", 1) > 1:
            attempt(dict(best, options=dict(best["options"], sessions=1), runs=[{k: v for k, v in run.items() if k != "session"} for run in best["runs"]]))
        if "master" in best["options"]:
            attempt(dict(best, options={key: value for key, value in best["options"].items() if key != "master"}))
        for key in ("trace", "feed_inner"):
            if any(key in run for run in best["runs"]):
                attempt(dict(best, runs=[{k: v for k, v in run.items() if k != key} for run in best["runs"]]))
        for number, run in enumerate(best["runs"]):
            if len(run.get("lanes", ())) > 2:
                attempt(dict(best, runs=best["runs"][:number] + [dict(run, lanes=run["lanes"][:2])] + best["runs"][number + 1 :]))
        if any("mode" in run for run in best["runs"]):
            attempt(dict(best, runs=[{k: v for k, v in run.items() if k not in ("mode", "first", "steps")} for run in best["runs"]]))

    attempt_runs()
    size = 1 << 30
    while time.monotonic() < deadline:
        ids = [record["id"] for record in all_records(best)]
        size = min(size, max(1, len(ids) // 2))
        start, smaller = len(ids), False
        while start > 0:
            chunk = ids[max(0, start - size) : start]
            start -= size
            present = {record["id"] for record in all_records(best)}
            chunk = [one for one in chunk if one in present]
            if chunk and attempt(without(best, chunk)):
                smaller = True
        if size > 1:
            size //= 2
        elif not smaller:
            break
    attempt_runs()
    for number in range(1, len(best["runs"])):
        for fetch in list(best["runs"][number]["fetch"]):
            run = best["runs"][number]
            if len(run["fetch"]) > 1 and "first" not in run:
                attempt(dict(best, runs=best["runs"][:number] + [dict(run, fetch=[f for f in run["fetch"] if f != fetch])] + best["runs"][number + 1 :]))
    if best["options"].get("grappler", True):
        attempt(dict(best, options=dict(best["options"], grappler=False)))
    attempt(reduce_control(best))
    return best


__all__ = ["shrink", "without", "CONTROLS", "OUTS"]
