"""Runs one program over one cluster, in the worker processes."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from cluster import tf
from program import array, feed_value, walk

burning = {}
under_way = {}  # the Execution that resume() goes on with


def digest(value, nan_signs=True):
    """Represents a fetched value, bit for bit; without `nan_signs`, all NaN are the same."""
    if value is None:
        return None
    value = np.array(value, dtype=object) if isinstance(value, bytes) else np.asarray(value)
    if value.dtype == object:
        flat = [v if isinstance(v, bytes) else str(v).encode() for v in value.reshape(-1)]
        return "object", value.shape, b"".join(b"%d:%s," % (len(v), v) for v in flat)
    if not nan_signs and value.dtype.kind in "fV":  # V: bfloat16
        value = np.where(np.isnan(value), value.dtype.type(np.nan), value)
    return str(value.dtype), value.shape, value.tobytes()


def session_config(options, fuse, timeout):
    config = tf.compat.v1.ConfigProto(operation_timeout_in_ms=int(timeout * 1000))
    config.graph_options.rewrite_options.disable_meta_optimizer = not options.get("grappler", True)
    if options.get("grappler", True):
        config.graph_options.rewrite_options.min_graph_nodes = -1
    else:
        config.graph_options.optimizer_options.opt_level = tf.compat.v1.OptimizerOptions.L0
    config.experimental.share_session_state_in_clusterspec_propagation = False
    if fuse is None:
        return config
    import starwire  # loads the library, which stock gRPC's tasks do without

    starwire.config(pipeline=1)  # as if another session's steps overlapped
    return starwire.config(config, tensor_fuse=fuse, pipeline=0)


class Execution:
    """A program that runs. Its sessions stay open while the caller restarts a server."""

    def __init__(self, built, program, targets, container, fuse, timeout):
        self.built, self.program, self.targets, self.container, self.fuse, self.timeout = built, program, targets, container, fuse, timeout
        self.sessions = []
        # starwire's kernels leave NaN of other signs with FTRL, and where two NaN meet (docs/executor.md).
        self.nan_signs = not any("SparseApply" in record["op"] for record in walk(program["body"]))

    def open(self):
        for (graph_def, *names), target in zip(self.built, self.targets):
            graph = tf.Graph()
            with graph.as_default():
                tf.graph_util.import_graph_def(tf.compat.v1.GraphDef.FromString(graph_def.replace(b"C0000000", self.container.encode())), name="")
            config = session_config(self.program["options"], self.fuse, self.timeout)
            self.sessions.append((tf.compat.v1.Session(target, graph=graph, config=config), names))

    def close(self):
        for session, _ in self.sessions:
            session.close()
        self.sessions = []

    def renew(self):
        """Begins again, with state of its own: what a failed step has left differs."""
        with contextlib.suppress(tf.errors.OpError):
            self.close()
        self.sessions = []
        self.container = chr(ord(self.container[0]) + 1) + self.container[1:]
        self.open()

    def go(self, number):
        """Returns, for each run from this one to the next restart, ("ok", [digests]) or ("error", type, code, message)."""
        out, runs = [], self.program["runs"]
        while number < len(runs) and runs[number].get("mode") != "restart":
            try:
                out.append(("ok", [digest(v, self.nan_signs) for v in self.run(runs[number], number)]))
            except tf.errors.OpError as error:
                out.append(("error", type(error).__name__, error.error_code, error.message[:2000]))
                if error.error_code == 4 or runs[number].get("mode") == "renew":
                    number = len(runs)  # the remaining runs would hang as well
            number += 1
        # After a hang, closing a session would hang too.
        if number >= len(runs) and not (out and out[-1][:3] == ("error", "DeadlineExceededError", 4)):
            self.close()
        return out

    def run(self, run, number):
        mode = run.get("mode")
        if mode == "together":
            return together(self.sessions, self.program, run, number, self.timeout)
        if mode == "pause":
            time.sleep(run["seconds"])
            return []
        if mode == "renew":
            self.renew()
            return []
        return one_run(*self.sessions[run.get("session", 0)], self.program, run, number, self.timeout)


def execute(built, *arguments):
    """Returns the results of the runs up to the first restart. `built`: (graph, tensors, operations, feeds) of each session."""
    under_way["it"] = Execution(built, *arguments)
    return resume(0)


def resume(number):
    """Goes on with this run."""
    it = under_way["it"]
    try:
        if number == 0:
            it.open()
        return it.go(number)
    except Exception:
        it.close()
        raise


def execute_and_read(built, program, targets, container, fuse, timeout, reads):
    """Runs a program and leaves its sessions open. Returns each of `reads`, outputs of the first session's graph; None if steps may still run."""
    it = under_way["it"] = Execution(built, program, targets, container, fuse, timeout)
    it.open()
    close, it.close = it.close, lambda: None
    done = it.go(0)
    it.close = close
    if any(run[0] == "error" and run[2] in (1, 4) for run in done):
        it.close()
        return None
    expect_other_types(it)
    return [read(it, one) for one in reads]


def expect_other_types(it):
    """Another session reads and assigns the variables as if they had other types, which changes nothing. (TensorFlow may abort where a resource variable is read so.)"""
    raw, graph, tries = tf.raw_ops, tf.Graph(), []
    with graph.as_default():
        for node in it.sessions[0][0].graph.as_graph_def().node:
            is_handle = node.op == "VarHandleOp"
            name = node.attr["shared_name"].s.decode() or ("" if is_handle else node.name)
            if node.op not in ("VariableV2", "VarHandleOp") or "/job:ps" not in node.device or not name:
                continue
            dtype = tf.int32 if node.attr["dtype"].type != tf.int32.as_datatype_enum else tf.float32
            names = {"container": node.attr["container"].s.decode(), "shared_name": name, "dtype": dtype, "shape": ()}
            with tf.device(node.device):
                value = tf.zeros((), dtype)
                if is_handle:
                    handle = raw.VarHandleOp(**names)
                    # A variable that is not there would be made.
                    tries.append((raw.VarIsInitializedOp(resource=handle), [raw.AssignVariableOp(resource=handle, value=value)]))
                else:
                    variable = raw.VariableV2(**names)
                    tries.append((None, [raw.Identity(input=variable), raw.Assign(ref=variable, value=value, validate_shape=False)]))
    config = session_config(it.program["options"], it.fuse, it.timeout)
    with tf.compat.v1.Session(it.targets[0], graph=graph, config=config) as session:
        for is_made, fetches in tries:
            for fetch in fetches if is_made is None or session.run(is_made) else ():
                with contextlib.suppress(tf.errors.OpError):
                    session.run(fetch)


def read(it, output):
    session, (tensors, *_) = it.sessions[0]
    try:
        return "ok", digest(session.run(tensors[output], options=tf.compat.v1.RunOptions(timeout_in_ms=60000)))
    except tf.errors.OpError as error:
        return "error", type(error).__name__, error.message[:2000]


def read_and_close(reads):
    it = under_way.pop("it")
    try:
        return [read(it, one) for one in reads]
    finally:
        it.close()


def together(sessions, program, run, number, timeout):
    """Returns the values of all steps of all lanes, or the first error of the first lane that failed."""
    plain = {key: value for key, value in run.items() if key not in ("mode", "steps")}
    steps = [part(plain, step) for step in run.get("steps", ())]

    def lane(at, which):
        session = sessions[which % len(sessions)]
        if not steps:
            return [one_run(*session, program, plain, number, timeout) for _ in range(run["times"])]
        return [one_run(*session, program, steps[at % len(steps)], number, timeout, (at, turn)) for turn in range(run["times"])]

    with ThreadPoolExecutor(len(run["lanes"])) as pool:
        lanes = [pool.submit(lane, at, which) for at, which in enumerate(run["lanes"])]
    return [value for one in lanes for step in one.result() for value in step]


def part(run, step):
    """The step of one thread: what is left of it in the run."""
    return {**run, **step, **{key: [one for one in step[key] if one in run[key]] for key in ("fetch", "targets", "feed")}}


def one_run(session, names, program, run, number, timeout, place=()):
    """`place`: the thread and the turn of a step that has feeds of its own. They are whole numbers, whose sums are the same in every order."""
    tensors, operations, feeds = names
    fetches = [tensors[ref] for ref in run["fetch"]]
    targets = [operations[i] for i in run["targets"]]
    seed = program["seed"] or 0
    kind = {} if place else {"fine": program["options"].get("fine", False), "odd": program["options"].get("odd", False)}
    fed = {i: feed_value(*feeds[i], key=[seed % 2**32, number, i, *place], **kind) for i in run["feed"] if i in feeds}
    by_name = {tensors[f"{i}:0"]: value for i, value in fed.items()}
    for ref, dtype, shape in run.get("feed_inner", ()):
        by_name[tensors[ref]] = feed_value(dtype, shape, key=[seed % 2**32, number, 999], **kind)
    mode = run.get("mode", "run")
    if mode == "callable":
        call = session.make_callable(fetches + targets, feed_list=list(by_name))
        return call(*by_name.values())[: len(fetches)]
    if mode == "partial":
        handle = session.partial_run_setup(fetches + targets, list(by_name))
        early = [tensors[ref] for ref in run["first"]["fetch"]]
        first = {tensors[f"{i}:0"]: fed[i] for i in run["first"]["feed"] if i in fed}
        values = {}
        if early or first:
            values = dict(zip(early, session.partial_run(handle, early, first)))
        rest = [name for name in fetches if name not in values]
        later = session.partial_run(handle, rest + targets, {name: value for name, value in by_name.items() if name not in first})
        values |= dict(zip(rest, later))
        return [values[name] for name in fetches]
    options = tf.compat.v1.RunOptions(timeout_in_ms=int(timeout * 1000), trace_level=run.get("trace", 0))
    metadata = tf.compat.v1.RunMetadata() if run.get("trace") else None
    return session.run(fetches + targets, by_name, options=options, run_metadata=metadata)[: len(fetches)]


def burn(on):
    """Turns intermittent CPU load on or off, to vary thread scheduling."""
    if on and "stop" not in burning:
        burning["stop"] = threading.Event()

        def work():
            while not burning["stop"].is_set():
                end = time.monotonic() + 0.001
                while time.monotonic() < end:
                    pass
                time.sleep(0.02)

        threading.Thread(target=work, daemon=True).start()
    elif not on and "stop" in burning:
        burning.pop("stop").set()


__all__ = ["execute", "resume", "burn", "array"]
