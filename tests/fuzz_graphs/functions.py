"""Random functions of TensorFlow 2 (`run.py --only functions`): a ClusterCoordinator runs them over stock gRPC and over every protocol, and a session of a
worker runs the same operations as a graph. Every result and the final content of every variable must have the same bits.

A program is JSON: {"seed", "variables": [{"server", "dtype", "rows"}], "functions": [[op…]…], "schedule": [function…]}. Values are vectors of WIDTH numbers.
An op is {"op", "at": device, "in": [value…], "var": handle, "after": [op…]}, and the op "loop" has ops of its own, which it repeats; `value` is the number of
an earlier op that has one. A handle is [variable, alias]: alias 1 is a second handle of the same variable, which the function captures separately. If one of
two users of a variable writes it, `after` orders them, whatever handles they use. Some programs have more: "tables" of servers ({"server"}), which their
functions use like variables, texts, datasets that a function makes and reduces, and a "burst": a function that is scheduled many times at once, and only adds
whole numbers to variables that no other one uses. It may have copies: workers then see new functions while they run others. More are in sharded.py,
generators.py and function_steps.py.
"""

import random

import function_steps
import generators
import sharded
from cluster import free_port, state, tf

SHAPE = {"ps": 2, "worker": 2}
PLACES = ("ps0", "ps1", "worker")
AS_A_GRAPH = " as a graph"
WIDTH = 4
DEVICES = {"ps0": "/job:ps/replica:0/task:0/device:CPU:0", "ps1": "/job:ps/replica:0/task:1/device:CPU:0"}
READS = ("read", "gather")
UPDATES = ("assign", "assign_add", "assign_sub", "scatter_add", "scatter_update")
WRITES = (*UPDATES, "insert", sharded.WRITE)
PURE = ("add", "mul", "sum", "reverse", "halve")
# What only some seeds have, by name of the feature. New ones come last, so that seeds keep theirs.
MORE = {"texts": ("text", "text"), "datasets": ("dataset",), "tables": ("find", "insert", "insert"), "burst": ()}
# Of these, each is chosen apart from the others.
LATER = {
    "sharded": (sharded.READ, sharded.READ, sharded.WRITE, sharded.WRITE),
    "generators": ("generated", "generated", "argument"),
    "shapes": ("argument", "argument"),
    "made again": (),
    "turns": (),
}
FEATURES = (*MORE, *LATER)
KEYS = range(-8, 40)  # that are looked up in the end


# Seed → program. ------------------------------------------------------------------------------------------------------


class Function:
    """The ops of a function, or of a loop."""

    def __init__(self, rng, variables, size, depth=0, more=(), tables=0, shards=()):
        self.rng, self.variables, self.ops, self.more, self.tables, self.shards = rng, variables, [], more, tables, shards
        self.users = [[] for _ in range(len(variables) + tables + len(shards))]  # (op, writes)
        if depth:
            self.ops.append({"op": "input", "at": "worker", "in": [], "after": []})
        for _ in range(size):
            self.emit(depth)

    def values(self, ops):
        return [number for number, op in enumerate(ops) if op["op"] not in WRITES]

    def touch(self, number, variable, writes):
        """Orders a user of a variable behind those that it may not overtake."""
        after = [user for user, wrote in self.users[variable] if writes or wrote]
        self.users[variable].append((number, writes))
        return after

    def datasets_before(self):
        """Datasets of generators run one at a time: several, over stock grpc as well, may take all threads that their own functions need."""
        return [number for number, op in enumerate(self.ops) if op["op"] in ("generated", "loop")]

    def emit(self, depth):
        rng, number = self.rng, len(self.ops)
        inputs = self.values(self.ops)
        kind = rng.choice(("read", "write", "write", "pure", "pure") + (("cond", "while", "loop") if depth == 0 else ("cond",)) + self.more)
        op = {"op": "constant", "at": rng.choice(PLACES), "in": [], "after": [], "value": rng.randrange(1, 5)}
        if kind in ("read", "write"):
            variable = rng.randrange(len(self.variables))
            op["op"] = rng.choice(READS if kind == "read" or not inputs else UPDATES)
            if self.variables[variable]["rows"] == 0:
                op["op"] = {"gather": "read", "scatter_add": "assign_add", "scatter_update": "assign"}.get(op["op"], op["op"])
            op["var"] = [variable, rng.randrange(2)]
            op["row"] = [rng.randrange(max(1, self.variables[variable]["rows"])) for _ in range(2)]
            op["in"] = [rng.choice(inputs)] if op["op"] in WRITES else []
            op["after"] = self.touch(number, variable, op["op"] in WRITES)
        elif kind == "pure" and inputs:
            op["op"] = rng.choice(PURE)
            op["in"] = [rng.choice(inputs) for _ in range(2)]
        elif kind in ("text", "dataset") and inputs:
            op["op"], op["in"], op["then"] = kind, [rng.choice(inputs)], rng.choice(PLACES)
        elif kind in ("find", "insert") and inputs:
            op["op"], op["in"], op["table"] = kind, [rng.choice(inputs)], rng.randrange(self.tables)
            op["after"] = self.touch(number, len(self.variables) + op["table"], kind == "insert")
        elif kind in (sharded.READ, sharded.WRITE) and inputs:
            sharded.fill(rng, op, kind, self.shards, inputs)
            op["after"] = self.touch(number, len(self.variables) + self.tables + op["shards"], kind == sharded.WRITE)
        elif kind == "generated" and inputs:
            generators.fill(rng, op, inputs)
            op["after"] = self.datasets_before()
        elif kind == "argument":
            op["op"] = kind
        elif kind in ("cond", "while") and inputs:
            # Bodies read and update variables of their own choice, in the order of their list.
            op["op"], op["in"] = kind, [rng.choice(inputs)]
            op["bodies"] = []
            chosen = set()
            for _ in range(2 if kind == "cond" else 1):
                body = [{"update": rng.choice(("assign_add", "assign", None)), "var": [rng.randrange(len(self.variables)), rng.randrange(2)]} for _ in range(rng.randrange(1, 4))]
                chosen.update(step["var"][0] for step in body)
                op["bodies"].append(body)
            for variable in sorted(chosen):
                op["after"] += self.touch(number, variable, True)
        elif kind == "loop" and inputs:
            made = Function(rng, self.variables, rng.randrange(2, 12), depth + 1, self.more, self.tables, self.shards)
            op["op"], op["in"], op["ops"] = kind, [rng.choice(inputs)], made.ops
            op["after"] = self.datasets_before() if "generated" in self.more else []
            for variable in range(len(self.users)):
                if made.users[variable]:
                    op["after"] += self.touch(number, variable, True)
        if rng.random() < 0.2 and number:
            op["after"].append(rng.randrange(number))
        op["after"] = sorted(set(op["after"]))
        self.ops.append(op)


def generate(seed):
    rng = random.Random(seed)
    variables = [
        {"server": rng.randrange(2), "dtype": rng.choice(("float32", "float32", "int64")), "rows": rng.choice((0, 0, 3, 7))} for _ in range(rng.randrange(2, 7))
    ]
    # Chosen apart from all else: without any, a seed makes the program that it has always made.
    choice = random.Random(f"features of {seed}")
    features = [name for name in MORE if choice.random() < 0.25]
    tables = [{"server": choice.randrange(2)} for _ in range(choice.choice((1, 2)))] if "tables" in features else []
    later = {name: random.Random(f"{name} of {seed}") for name in LATER}
    features += [name for name in LATER if later[name].random() < 0.15]
    shards = [sharded.generate(later["sharded"]) for _ in range(later["sharded"].choice((1, 1, 2)))] if "sharded" in features else []
    more = tuple(kind for name in features for kind in {**MORE, **LATER}[name])
    functions = [Function(rng, variables, rng.randrange(4, 30), 0, more, len(tables), shards).ops for _ in range(rng.randrange(1, 3))]
    schedule = [rng.randrange(len(functions)) for _ in range(rng.randrange(3, 7))]
    made = {"seed": seed, "variables": variables, "functions": functions, "schedule": schedule}
    if features:
        made["features"] = features
    if tables:
        made["tables"] = tables
    if shards:
        made["sharded"] = shards
    function_steps.generate(choice, features, made)
    if "burst" in features:
        made["burst"] = {**burst(choice, variables), "copies": random.Random(f"copies of {seed}").choice((1, 4, 16))}
    return made


def burst(rng, variables):
    """Adds variables. Returns the function that changes only these, and how often it is scheduled."""
    ops = []
    for _ in range(rng.choice((1, 2, 4))):
        variables.append({"server": rng.randrange(2), "dtype": rng.choice(("float32", "int64")), "rows": rng.choice((0, 3))})
        ops.append({"op": "constant", "at": rng.choice(PLACES), "in": [], "after": [], "value": rng.randrange(1, 5)})
        op = rng.choice(("assign_add", "assign_sub") + (("scatter_add",) if variables[-1]["rows"] else ()))
        ops.append({"op": op, "at": "worker", "in": [len(ops) - 1], "after": [], "var": [len(variables) - 1, rng.randrange(2)], "row": [0, 2]})
    return {"ops": ops, "times": rng.choice((5, 20, 60))}


# In the chief's process. ----------------------------------------------------------------------------------------------


def coordinate(protocol, spec):
    from cluster import is_stock, load

    load(protocol)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer=protocol)
    state["strategy"] = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=sharded.partition)
    if is_stock(protocol):
        state["coordinator"] = tf.distribute.coordinator.ClusterCoordinator(state["strategy"])
    else:
        import starwire

        state["coordinator"] = starwire.coordinator(state["strategy"], pipeline=7)


class Body:
    """Builds one function."""

    def __init__(self, program, handles, tables, shards, worker):
        self.program, self.handles, self.tables, self.shards, self.worker, self.argument = program, handles, tables, shards, worker, None

    def dtype(self, variable):
        return tf.as_dtype(self.program["variables"][variable]["dtype"])

    def read(self, var):
        value = tf.raw_ops.ReadVariableOp(resource=self.handles[var[0]][var[1]], dtype=self.dtype(var[0]))
        return tf.cast(value if self.program["variables"][var[0]]["rows"] == 0 else value[0], tf.float32)

    def write(self, op, var, value, rows):
        handle, dtype = self.handles[var[0]][var[1]], self.dtype(var[0])
        count = self.program["variables"][var[0]]["rows"]
        value = tf.cast(tf.clip_by_value(value, -1e6, 1e6), dtype)
        if op.startswith("scatter"):
            made = tf.raw_ops.ResourceScatterAdd if op == "scatter_add" else tf.raw_ops.ResourceScatterUpdate
            # Equal rows with equal values: whichever is last.
            return made(resource=handle, indices=tf.constant(rows, tf.int32), updates=tf.stack([value, value]))
        value = value if count == 0 else tf.tile(value[tf.newaxis], [count, 1])
        made = {"assign": tf.raw_ops.AssignVariableOp, "assign_add": tf.raw_ops.AssignAddVariableOp, "assign_sub": tf.raw_ops.AssignSubVariableOp}[op]
        return made(resource=handle, value=value)

    def find(self, table, keys):
        return tf.raw_ops.LookupTableFindV2(table_handle=self.tables[table], keys=tf.cast(keys, tf.int64), default_value=tf.constant(-1.0))

    def insert(self, table, value):
        # Equal keys with equal values: whichever is last.
        keys = tf.cast(tf.clip_by_value(value, -1e6, 1e6), tf.int64)
        return tf.raw_ops.LookupTableInsertV2(table_handle=self.tables[table], keys=keys, values=tf.cast(keys, tf.float32) * 0.5 + tf.reduce_sum(value))

    def text(self, value, then):
        made = tf.strings.as_string(tf.clip_by_value(value, -1e6, 1e6))
        made = tf.strings.join([made, made], separator="/")
        with self.place(then):
            return tf.cast(tf.strings.to_hash_bucket_fast(made, 97), tf.float32)

    @staticmethod
    def dataset(value):
        numbers = tf.data.Dataset.range(3).map(lambda i: value * tf.cast(i, tf.float32) + 1.0)
        return numbers.batch(2).reduce(tf.zeros((WIDTH,)), lambda total, several: total + tf.reduce_sum(several, 0))

    def place(self, at):
        return tf.device(DEVICES.get(at, self.worker))

    def on_server(self, var):
        return self.place(f"ps{self.program['variables'][var[0]]['server']}")

    def steps(self, body, value):
        """Reads and updates in order; returns a value."""
        last = []
        for step in body:
            with tf.control_dependencies(last):
                with self.on_server(step["var"]):
                    value = value * 0.5 + self.read(step["var"])
                    last = [value]
                    if step["update"]:
                        with tf.control_dependencies([value]):
                            last = [self.write(step["update"], step["var"], value, [0, 0])]
        with tf.control_dependencies(last):
            return tf.identity(value)

    def branch(self, op, value):
        if op["op"] == "cond":
            first, second = op["bodies"]
            return tf.cond(tf.reduce_sum(value) > 3.0, lambda: self.steps(first, value), lambda: self.steps(second, value))

        def body(i, at):
            at = self.steps(op["bodies"][0], at)
            with tf.control_dependencies([at]):  # in a graph, iterations overlap otherwise
                return i + 1, at

        return tf.while_loop(lambda i, _: i < 2, body, (tf.constant(0), value))[1]

    def loop(self, op, value):
        def body(i, at):
            values, done = self.run(op["ops"], at)
            with tf.control_dependencies(done):
                return i + 1, tf.clip_by_value([value for value in values if value is not None][-1], -1e3, 1e3)

        return tf.while_loop(lambda i, _: i < 3, body, (tf.constant(0), value))[1]

    def run(self, ops, given=None):
        """Returns a value or None for each op, and what waits for its effect."""
        values, done = [], []
        for op in ops:
            inputs = [values[number] for number in op["in"]]
            device = self.on_server(op["var"]) if "var" in op else self.place(op["at"])
            if op["op"] == "generated" and self.worker:
                device = self.place("worker")  # whose process makes the graph; the coordinator's functions call their generators from anywhere
            if "table" in op:
                device = self.place(f"ps{self.program['tables'][op['table']]['server']}")
            with tf.control_dependencies([done[number] for number in op["after"]]), device:
                kind, value = op["op"], None
                if kind == "input":
                    value = tf.identity(given)
                elif kind == "loop":
                    value = self.loop(op, inputs[0])
                elif kind == "constant":
                    value = tf.fill((WIDTH,), float(op["value"]))
                elif kind == "read":
                    value = self.read(op["var"])
                elif kind == "gather":
                    rows = tf.raw_ops.ResourceGather(resource=self.handles[op["var"][0]][op["var"][1]], indices=op["row"], dtype=self.dtype(op["var"][0]))
                    value = tf.cast(tf.reduce_sum(rows, 0), tf.float32)
                elif kind == "find":
                    value = tf.clip_by_value(self.find(op["table"], inputs[0]), -1e3, 1e3)
                elif kind == "insert":
                    effect = self.insert(op["table"], inputs[0])
                elif kind == "text":
                    value = self.text(inputs[0], op["then"])
                elif kind == "dataset":
                    value = self.dataset(inputs[0])
                elif kind == sharded.READ:
                    value = sharded.read(op, self.shards[op["shards"]], self.program["sharded"][op["shards"]]["rows"], inputs[0])
                elif kind == sharded.WRITE:
                    effect = sharded.write(op, self.shards[op["shards"]], self.program["sharded"][op["shards"]]["rows"], inputs[0])
                elif kind == "generated":
                    value = generators.value(op, inputs[0])
                elif kind == "argument":
                    value = tf.reduce_sum(self.argument, 0)
                elif kind in WRITES:
                    effect = self.write(kind, op["var"], inputs[0], op["row"])
                elif kind == "add":
                    value = inputs[0] + inputs[1]
                elif kind == "mul":
                    value = tf.clip_by_value(inputs[0] * inputs[1], -1e3, 1e3)
                elif kind == "sum":
                    value = tf.fill((WIDTH,), tf.reduce_sum(inputs[0]))
                elif kind == "reverse":
                    value = tf.reverse(inputs[0], [0])
                elif kind == "halve":
                    value = inputs[0] * 0.5
                else:
                    value = self.branch(op, inputs[0])
            values.append(value)
            done.append(effect if kind in WRITES else value)
        return values, done

    def build(self, ops, argument=None):
        self.argument = argument
        values, done = self.run(ops)
        with tf.control_dependencies(done):
            return [tf.identity(value) for value in values if value is not None][-6:]


def plain(tensor):
    import numpy as np

    array = np.asarray(tensor)
    return str(array.dtype), list(array.shape), array.tobytes()


def first_value(program, number):
    import numpy as np

    it = program["variables"][number]
    shape = (WIDTH,) if it["rows"] == 0 else (it["rows"], WIDTH)
    return (np.arange(np.prod(shape)).reshape(shape) % 5 + number).astype(it["dtype"])


def table(program, number, whose):
    """Makes a table that is found by its name, which is new."""
    state["tables"] = state.get("tables", 0) + 1
    with tf.device(DEVICES[f"ps{program['tables'][number]['server']}"]):
        return tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.float32, shared_name=f"fuzz-{whose}-{state['tables']}")


class Eager:
    """The coordinator's state of a program, and the functions that use it."""

    def __init__(self, program):
        self.program = program
        self.variables, self.handles = ([None] * len(program["variables"]) for _ in range(2))
        self.shards = [None] * len(program.get("sharded", ()))
        tables = [table(program, number, "chief") for number in range(len(program.get("tables", ())))]
        self.body = Body(program, self.handles, tables, self.shards, worker=None)
        self.make([["variables", number] for number in range(len(self.variables))] + [["sharded", number] for number in range(len(self.shards))])

    def make(self, which):
        """Makes state, and functions that capture it."""
        for kind, number in which:
            it = self.program[kind][number]
            # The strategy puts the next variable, or the first of its shards, on this server, whatever the device.
            state["strategy"].extended._variable_count = it["server"]
            with state["strategy"].scope(), tf.device(DEVICES[f"ps{it['server']}"] if kind == "variables" else None):
                if kind == "sharded":
                    self.shards[number] = sharded.make(it, WIDTH)
                else:
                    made = self.variables[number] = tf.Variable(first_value(self.program, number))
                    self.handles[number] = made.handle, tf.identity(made.handle)
                    made = None
        self.functions = [function_steps.function(self.program, WIDTH, self.body.build, ops) for ops in self.program["functions"]]

    def make_again(self, which):
        self.functions = None
        function_steps.forget({"variables": self.variables, "sharded": self.shards}, which)
        self.make(which)

    def contents(self):
        found = [self.body.find(number, list(KEYS)) for number in range(len(self.body.tables))]
        return [plain(v.numpy()) for v in self.variables] + [plain(tf.convert_to_tensor(v)) for v in self.shards] + [plain(one) for one in found]


def execute(program):
    """Returns the results as (dtype, shape, bytes), one list for each step and one for variables and tables."""
    it, out = Eager(program), []
    for (number, step), arguments in zip(function_steps.of(program), function_steps.given(program, WIDTH)):
        if step["again"]:
            it.make_again(step["again"])
        out.append([plain(value) for value in function_steps.run(step, it.functions[number], arguments)])
    if "burst" in program:
        copies = [tf.function(lambda: it.body.build(program["burst"]["ops"]), autograph=False) for _ in range(program["burst"]["copies"])]
        # Every second step is the first one's.
        results = [state["coordinator"].schedule(copies[number % 2 * (number // 2) % len(copies)]) for number in range(program["burst"]["times"])]
        state["coordinator"].join()
        out += [[plain(value) for value in result.fetch()] for result in results]
    out.append(it.contents())
    return out


# In worker 0, whose server runs the same as a graph. ------------------------------------------------------------------


class Graph:
    """The state of a program in a graph."""

    def __init__(self, program):
        self.handles, self.first, self.contents, self.last = [], {}, [], {}
        for number, it in enumerate(program["variables"]):
            value = first_value(program, number)
            with tf.device(DEVICES[f"ps{it['server']}"]):
                names = {"shared_name": f"fuzz-{program['seed']}-{number}", "dtype": value.dtype, "shape": value.shape}
                both = tuple(tf.raw_ops.VarHandleOp(**names) for _ in range(2))
                self.first["variables", number] = [tf.raw_ops.AssignVariableOp(resource=both[0], value=tf.constant(value))]
                self.contents.append(tf.raw_ops.ReadVariableOp(resource=both[0], dtype=value.dtype))
                self.last["variables", number] = [tf.raw_ops.DestroyResourceOp(resource=both[0])]
            self.handles.append(both)
        self.shards = []
        for number, it in enumerate(program.get("sharded", ())):
            made = sharded.make_in_graph(it, WIDTH, f"fuzz-{program['seed']}-sharded-{number}", list(DEVICES.values()))
            self.shards.append(made)
            self.first["sharded", number] = [one.initializer for one in sharded.shards_of(made)]
            self.last["sharded", number] = [tf.raw_ops.DestroyResourceOp(resource=one.handle) for one in sharded.shards_of(made)]
            self.contents.append(tf.convert_to_tensor(made))


def execute_graph(program, target):
    """Returns the same as `execute`."""
    config = tf.compat.v1.ConfigProto(device_filters=["/job:ps", "/job:worker/task:0"])
    graph = tf.Graph()
    with graph.as_default():
        it = Graph(program)
        tables = [table(program, number, "worker") for number in range(len(program.get("tables", ())))]
        body = Body(program, it.handles, tables, it.shards, worker="/job:worker/replica:0/task:0/device:CPU:0")
        argument = tf.compat.v1.placeholder(tf.float32, (None, WIDTH)) if "arguments" in program else None
        functions = [body.build(ops, argument) for ops in program["functions"]]
        burst = body.build(program["burst"]["ops"]) if "burst" in program else []
        found = []
        for number, one in enumerate(program.get("tables", ())):
            with tf.device(DEVICES[f"ps{one['server']}"]):
                found.append(body.find(number, list(KEYS)))
        with tf.compat.v1.Session(target, graph=graph, config=config) as session:
            session.run(list(it.first.values()))
            out = []
            for (number, step), array in zip(function_steps.of(program), function_steps.arguments(program, WIDTH)):
                for one in step["again"]:
                    session.run(it.last[tuple(one)])
                    session.run(it.first[tuple(one)])
                out.append([plain(value) for value in session.run(functions[number], {} if argument is None else {argument: array})])
            out += [[plain(value) for value in session.run(burst)] for _ in range(program["burst"]["times"] if "burst" in program else 0)]
            out.append([plain(value) for value in session.run(it.contents + found)])
            session.run(list(it.last.values()))
    return out


# Clusters. ------------------------------------------------------------------------------------------------------------


def start(harness, runner, name, switches):
    """Returns (cluster, chief task). A switch is the end of a name, and adds to the environment."""
    # Enough threads that kernels that block, such as those of datasets, do not starve others.
    protocol, environment = name, {"TF_CPP_MIN_LOG_LEVEL": "1", "TF_NUM_INTEROP_THREADS": "12"}
    for end, more in switches.items():
        if protocol.endswith(end):
            protocol, environment = protocol[: -len(end)], {**environment, **more}
    made = harness.Cluster(runner, protocol, SHAPE, environment=environment, start=False)
    made.spec["chief"] = [f"127.0.0.1:{free_port()}"]
    for job, count in SHAPE.items():
        for index in range(count):
            made.start(job, index)
    chief = made.process("chief", 0)
    chief.call(coordinate, protocol, made.spec, timeout=60)
    return made, chief


def some(seed, feature):
    """Yields programs, from this seed on: all, or those that have the feature."""
    while True:
        program = generate(seed)
        if feature in (None, *program.get("features", ())):
            yield program
        seed += 1


def fuzz(harness, runner, protocols, switches, source, programs, seconds, out, timeout=60):
    """Returns the seeds that differ. One program of `source` at a time, over all protocols at once."""
    import collections
    import json
    import time

    begun, clusters, wrong, count, hang = time.monotonic(), {}, [], collections.Counter(), 0

    def run(program, names):
        """The key of a graph's results is the protocol and " as a graph"."""
        running = {}
        for name in names:
            if name not in clusters:
                clusters[name] = start(harness, runner, name, switches)
            cluster, chief = clusters[name]
            chief.begin(execute, program)
            cluster["worker", 0].begin(execute_graph, program, cluster.target("worker", 0))
            running[name], running[name + AS_A_GRAPH] = chief, cluster["worker", 0]
        results, failed = {}, set()
        for key, task in running.items():
            try:
                results[key] = task.result(timeout)
            except (harness.RemoteError, harness.TaskDied, TimeoutError, AssertionError) as error:
                results[key] = f"{type(error).__name__}: {str(error)[:600]}"
                failed.add(key.replace(AS_A_GRAPH, ""))
        for name in failed:
            clusters.pop(name)[0].close()
        return results

    def hangs(result):
        return isinstance(result, str) and result.startswith(harness.TaskTimeout.__name__)

    try:
        while time.monotonic() - begun < seconds and (programs == 0 or count["programs"] < programs):
            program = next(source)
            count.update(["programs", *(f"with {one}" for one in program.get("features", ()))])
            results = run(program, ("grpc", *protocols))
            if hangs(results["grpc"]) or hangs(results["grpc" + AS_A_GRAPH]):
                # Now and then, on a busy machine. The second time counts.
                hang += 1
                print(f"seed {program['seed']}: hangs over grpc", flush=True)
                results.update(run(program, ("grpc",)))
                if hangs(results["grpc"]) or hangs(results["grpc" + AS_A_GRAPH]):
                    continue
            for name in ("grpc", "grpc" + AS_A_GRAPH):
                if isinstance(results[name], str):
                    count["fails over grpc"] += 1
                    print(f"seed {program['seed']}: fails over {name}: {results[name]}", flush=True)
            # A failure has other words in a graph.
            alike = [name for name in results if not (name.endswith(AS_A_GRAPH) and isinstance(results["grpc"], str))]
            differ = [name for name in alike if results[name] != results["grpc"]]
            if differ and not all(run(program, ("grpc",))["grpc"] == results["grpc"] for _ in range(4)):
                print(f"seed {program['seed']}: grpc does not settle it: {differ}", flush=True)
            elif differ:
                wrong.append(program["seed"])
                (out / f"functions-{program['seed']}.json").write_text(json.dumps(program, indent=1))
                for name in differ:
                    print(f"seed {program['seed']}: {name}: {show(results['grpc'], results[name])}", flush=True)
        print(f"{time.monotonic() - begun:.0f} s: {dict(count)}, {hang} hang over grpc, differences in {wrong or 'none'}", flush=True)
    finally:
        for cluster, _ in clusters.values():
            cluster.close()
    return wrong


def show(stock, other):
    if isinstance(stock, str) or isinstance(other, str):
        return f"{stock if isinstance(stock, str) else 'values'} over grpc, {other if isinstance(other, str) else 'values'} here"
    import numpy as np

    for step, (a, b) in enumerate(zip(stock, other)):
        for k, (x, y) in enumerate(zip(a, b)):
            if x != y:
                what = "variable" if step == len(stock) - 1 else f"step {step}, value"
                return f"{what} {k}: {np.frombuffer(x[2], x[0])[:8]} over grpc, {np.frombuffer(y[2], y[0])[:8]} here"
    return "another number of values"
