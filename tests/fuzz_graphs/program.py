"""The format of programs, shared by generator, builder, shrinker and regressions. Plain JSON:

    {"seed": 7, "options": {…}, "init": [record…], "body": [record…], "final": [record…], "runs": [run…]}

A record is one operation:

    {"id": 12, "op": "AddV2", "dev": "ps0", "in": {"x": "3:0", "y": {"lit": ["int32", 5]}}, "attr": {}, "ctl": [4], "out": [["int32", [2]]]}

`in` names outputs of other records ("id:output", or a list of them) or literals; `ctl` names records that run before; `needs` names records that
every run of this one must include although no edge requires it (the Stage of an Unstage). `name` is the node's name (# stands for the id). `waits` names
records that the shrinker removes only together with this one. Operations whose name begins with @ are built in Python: @feed, and @cond and @while, which
hold the records of their bodies. Devices are ps0, ps1, me (the worker whose session runs the program) and other (the other worker).

A run fetches, runs and feeds records: {"fetch": ["12:0"], "targets": [9], "feed": [3]}. Its `mode` may be another than "run":

* callable, partial, together (by the threads of `lanes`, which may each have one of the `steps`, with its own feeds);
* pause, for so many `seconds`; restart, of `servers`; renew: new sessions, with new state.

After a failed run, what a run fetches is compared only if it is among `sure`, and everything from then on if the run `settles` it; and again from a run that
`begins`, because it assigns all state. Errors with one of its `codes` are alike.
"""

import json

import numpy as np

DEVICES = ("ps0", "ps1", "me", "other")
BODIES = ("then", "else", "body")  # lists of records inside a record
OUTS = ("then_out", "else_out", "body_out")
CONTROLS = ("then_ctl", "else_ctl", "body_ctl")
FLOATS = ("float32", "float64", "float16", "bfloat16")
INTS = ("int32", "int64", "int8", "uint8", "int16", "uint16")
COMPLEX = ("complex64", "complex128")
NUMBERS = FLOATS + INTS + COMPLEX
REAL = FLOATS + INTS


def lit(dtype, value, shape=None):
    """A literal input. With `shape`, a tensor filled with the scalar."""
    return {"lit": [dtype, value] if shape is None else [dtype, value, list(shape)]}


def is_lit(ref):
    return isinstance(ref, dict)


def node_of(ref):
    return int(ref.split(":")[0])


def each_input(record):
    for ref in record.get("in", {}).values():
        yield from ref if isinstance(ref, list) else [ref]


def walk(records):
    """Yields every record including those in bodies, outer ones first."""
    for record in records:
        yield record
        for body in BODIES:
            yield from walk(record.get(body, ()))


def produced(record):
    """Yields the ids that a record and its bodies define."""
    for inner in walk([record]):
        yield inner["id"]
        yield from inner.get("vars", ())


def dependencies(record, needs=True):
    """Returns the outside ids that a record or its bodies refer to."""
    found = set()
    for inner in walk([record]):
        found.update(node_of(ref) for ref in each_input(inner) if not is_lit(ref))
        found.update(inner.get("ctl", ()))
        if needs:
            found.update(inner.get("needs", ()))
        for key in OUTS:
            found.update(node_of(ref) for ref in inner.get(key, ()) if not is_lit(ref))
        for key in CONTROLS:
            found.update(inner.get(key, ()))
    return found - set(produced(record))


def closure(records, ids):
    """Returns the ids and everything that they depend on."""
    by_id = {record["id"]: record for record in records}
    seen, todo = set(), list(ids)
    while todo:
        one = todo.pop()
        if one in seen or one not in by_id:
            continue
        seen.add(one)
        todo += dependencies(by_id[one])
    return seen


def numpy_type(dtype):
    if dtype == "string":
        return np.dtype(object)
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)


# The smallest and the largest denormal number, and the largest of all.
EXTREMES = {
    "float64": (5e-324, 2.2250738585072009e-308, 1.7976931348623157e308),
    "float32": (1.401298464324817e-45, 1.1754942106924411e-38, 3.4028234663852886e38),
    "float16": (5.960464477539063e-08, 6.097555160522461e-05, 65504.0),
    "bfloat16": (9.183549615799121e-41, 1.1663108012064884e-38, 3.3895313892515355e38),
}


def odd_numbers(dtype):
    """Numbers that programs seldom meet. What JSON has no number for is a text."""
    if dtype in EXTREMES:
        return ["nan", "inf", "-inf", -0.0, *EXTREMES[dtype], *(-one for one in EXTREMES[dtype])]
    if dtype in INTS:
        limits = np.iinfo(dtype)
        return [int(limits.min), int(limits.max), int(limits.max) - 1, 0]
    return []


def array(dtype, value, shape=None):
    """Returns the array of a literal or a constant. Strings are stored as Latin-1."""
    if dtype == "string":
        made = np.array(value, dtype=object)
        made = np.array([v.encode("latin-1") for v in made.reshape(-1)], dtype=object).reshape(made.shape)
    else:
        made = np.array(value)
        made = (made.astype(np.float64) if made.dtype.kind == "U" else made).astype(numpy_type(dtype))
    return made if shape is None else np.full(shape, made if dtype != "string" else made.item(), dtype=made.dtype)


def feed_value(dtype, shape, key, spread=7, fine=False, odd=False):
    """Returns the value to feed to a placeholder in a run: small numbers that depend only on the key, whole ones unless `fine`, and with `odd` some others."""
    if odd and odd_numbers(dtype):
        plain = feed_value(dtype, shape, key, spread, fine)
        rng = np.random.default_rng([*key, 1])
        others = array(dtype, [float(one) for one in odd_numbers(dtype)] if dtype in EXTREMES else odd_numbers(dtype))
        return np.where(rng.uniform(size=shape) < 0.2, rng.choice(others, shape), plain).astype(plain.dtype)
    rng = np.random.default_rng(key)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype == "string":
        return np.array([b"f%d" % n for n in rng.integers(0, 100, int(np.prod(shape)))], dtype=object).reshape(shape)
    if fine and dtype in FLOATS:
        return np.asarray(rng.uniform(-spread, spread, shape)).astype(numpy_type(dtype))
    low = 0 if dtype.startswith("uint") else -spread
    return np.asarray(rng.integers(low, spread + 1, shape)).astype(numpy_type(dtype))


def dumps(program):
    """Serialises with one record per line."""
    out = []
    for key, value in program.items():
        if isinstance(value, list) and value:
            lines = ",\n  ".join(json.dumps(one) for one in value)
            out.append(f"{json.dumps(key)}: [\n  {lines}\n ]")
        else:
            out.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(out) + "\n}\n"


def listing(program):
    """Formats a program for reading."""

    def show(ref):
        if isinstance(ref, list):
            return "[" + ", ".join(show(one) for one in ref) + "]"
        return f"{ref['lit'][1]!r}:{ref['lit'][0]}" + (f"{ref['lit'][2]}" if len(ref["lit"]) > 2 else "") if is_lit(ref) else f"%{ref}"

    def one(record, indent):
        inputs = ", ".join(f"{name}={show(ref)}" for name, ref in record.get("in", {}).items())
        attrs = " ".join(f"{name}={value}" for name, value in record.get("attr", {}).items())
        after = " after " + ", ".join(f"%{c}" for c in record["ctl"]) if record.get("ctl") else ""
        needs = " with " + ", ".join(f"%{c}" for c in record["needs"]) if record.get("needs") else ""
        types = ", ".join(f"{dtype}{shape}" for dtype, shape in record.get("out", ()))
        yield f"{indent}%{record['id']} [{record.get('dev', '')}] {record['op']}({inputs}) {attrs} -> {types}{after}{needs}"
        for body in BODIES:
            if body in record:
                yield f"{indent}  {body} {record.get('vars', '') if body == 'body' else ''}:"
                for inner in record[body]:
                    yield from one(inner, indent + "    ")
                yield f"{indent}    = {show(record[body + '_out'])} after {record[body + '_ctl']}"

    lines = [f"seed {program.get('seed')}, options {program['options']}"]
    for part in ("init", "body", "final"):
        lines.append(f"{part}:")
        for record in program[part]:
            lines += one(record, "  ")
    lines.append("runs:")
    lines += [f"  {number}: {run}" for number, run in enumerate(program["runs"])]
    return "\n".join(lines) + "\n"
