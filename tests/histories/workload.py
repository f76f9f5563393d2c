"""A worker of the histories: random steps against all servers, each of which it writes down before and after."""

import json
import os
import random
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "python"))

from checker import SIZE, pack  # noqa: E402
from cluster import tf  # noqa: E402

OPS = 512  # elements of one client
CLIENTS = SIZE // OPS
LAST_STEPS_S = 30
VECTORS = ("dense_ref", "dense_res", "sparse_ref", "sparse_res")
REGISTERS = ("register_ref", "register_res")
COUNTERS = ("count_ref", "count_res")


def variables(servers):
    """Returns {name: server} and {name: the word for its updates}."""
    kinds = {kind: "push" for kind in VECTORS} | {kind: "write" for kind in REGISTERS} | {kind: "count" for kind in COUNTERS}
    names = {f"{kind}{server}": (server, word) for server in range(servers) for kind, word in kinds.items()}
    return {name: server for name, (server, _) in names.items()}, {name: word for name, (_, word) in names.items()}


class Graph:
    """All steps, by name: of each, the names of the variables that it updates, and what is run."""

    def __init__(self, servers, task):
        one = tf.compat.v1
        self.worker, self.servers = f"/job:worker/task:{task}", servers
        self.steps, self.reads, self.inits = {}, {}, {}
        with tf.Graph().as_default() as self.graph:
            self.element = one.placeholder(tf.int32, ())
            self.value = one.placeholder(tf.int64, ())
            with tf.device(self.worker):
                self.one_hot = tf.one_hot(self.element, SIZE)
                self.written = self.value + 0
            self.variables = {}
            for server in range(servers):
                self._add(server)
            several = [f"dense_res{server}" for server in range(servers)]
            self.steps["push", "several"] = several, tf.group(*(self._push(name, self.one_hot) for name in several))
            with tf.device("/job:ps/task:0"):
                self.saver = one.train.Saver(self.variables, max_to_keep=2)
                self.restorers = {server: one.train.Saver({name: self.variables[name] for name in reads}) for server, reads in self.reads.items()}
            self.graph.finalize()

    def _push(self, name, value):
        with tf.device(self.variables[name].device):
            return tf.compat.v1.assign_add(self.variables[name], value, use_locking=True)

    def _add(self, server):
        one = tf.compat.v1
        with tf.device(f"/job:ps/task:{server}"):
            for kind in VECTORS + REGISTERS + COUNTERS:
                shape, dtype = ((SIZE,), tf.float32) if kind in VECTORS else ((), tf.int64)
                name = f"{kind}{server}"
                variable = self.variables[name] = one.get_variable(name, shape, dtype, one.zeros_initializer(), use_resource=kind.endswith("res"))
                base = one.placeholder(dtype, shape)
                self.inits[name] = base, one.assign(variable, base), one.is_variable_initialized(variable)
                if kind.startswith("dense"):
                    self.steps["push", name] = [name], self._push(name, self.one_hot)
                    with tf.device(self.worker):
                        pulled = self.one_hot + 0.0 * tf.reduce_sum(variable)
                    self.steps["push", f"pulled {name}"] = [name], self._push(name, pulled)
                elif kind.startswith("sparse"):
                    self.steps["push", name] = [name], one.scatter_add(variable, [self.element], [1.0], use_locking=True)
                elif kind.startswith("register"):
                    with tf.control_dependencies([tf.identity(variable)]):  # only the chief gives it its first value
                        self.steps["write", name] = [name], one.assign(variable, self.written, use_locking=True)
                else:
                    self.steps["count", name] = [name], one.assign_add(variable, 1, use_locking=True)
        with tf.device(self.worker):
            self.reads[server] = {f"{kind}{server}": tf.identity(self.variables[f"{kind}{server}"]) for kind in VECTORS + REGISTERS + COUNTERS}


class Worker:
    """`plant`: the fault with which the program shows that the checker works."""

    def __init__(self, target, task, servers, folder, seed, patience, plant=None):
        self.target, self.task, self.folder, self.patience, self.plant = target, task, Path(folder), patience, plant
        self.random = random.Random(f"{seed} {task} {len(list(self.folder.glob(f'worker{task}-*')))}")
        (self.folder / "checkpoint").mkdir(exist_ok=True)  # Saver would blame its absence for other errors
        self.graph = Graph(servers, task)
        self.log = open(self.folder / f"worker{task}-{os.getpid()}.jsonl", "w", buffering=1)
        self.session = None
        self.snapshot = {name: numpy_of(0.0) if word == "push" else 0 for name, word in variables(servers)[1].items()}
        self.checkpoint, self.saves = None, 0
        self._next_client()

    def _next_client(self):
        """Clients have elements and values of their own."""
        for client in range(CLIENTS):
            try:
                os.close(os.open(self.folder / f"client{client}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            self.client, self.op = client, 0
            return
        self.client = None

    def record(self, event, run):
        """Writes the event down, runs it, and writes down its end. Returns its result, or None after an error."""
        event |= {"begin": time.monotonic(), "worker": self.task}
        self.log.write(json.dumps({**event, "ok": False}) + "\n")
        result, error = None, None
        try:
            if self.session is None:
                config = tf.compat.v1.ConfigProto(device_filters=["/job:ps", self.graph.worker], operation_timeout_in_ms=1000 * self.patience)
                self.session = tf.compat.v1.Session(self.target, graph=self.graph.graph, config=config)
            result = run(event)
        except tf.errors.OpError as failed:
            error = failed
        event |= {"end": time.monotonic(), "ok": error is None}
        if error is not None:
            event["error"] = f"{type(error).__name__}: {error.message[:400]}"
        self.log.write(json.dumps(event) + "\n")
        if error is not None:
            if not isinstance(error, tf.errors.FailedPreconditionError):
                self._close()
            time.sleep(0.1)
        return result

    def _close(self):
        session, self.session = self.session, None
        try:
            if session is not None:
                session.close()
        except tf.errors.OpError:
            pass

    def read(self, server):
        def run(event):
            found = self.session.run(self.graph.reads[server])
            event["values"] = {name: packed(value) for name, value in found.items()}
            return found

        return self.record({"what": "read"}, run)

    def update(self, step=None, **more):
        if self.client is None or self.op == OPS:
            self._next_client()
            if self.client is None:
                return False
        what, _ = step = step or self.random.choice(list(self.graph.steps))
        names, fetch = self.graph.steps[step]
        element = self.client * OPS + self.op
        self.op += 1
        event = {"what": what, "names": names, "element": element, "value": element + 1, **more}
        feed = {self.graph.element: element, self.graph.value: element + 1}
        planted = self.plant if what == "push" and self.op == 20 else None
        if planted:
            event["planted"] = planted
        if planted == "swap":
            feed[self.graph.element] = element + 100

        def run(_):
            for _ in range({"drop": 0, "repeat": 2}.get(planted, 1)):
                self.session.run(getattr(fetch, "op", fetch), feed)
            return True

        return bool(self.record(event, run))

    def initialise(self):
        """The chief's: what has no value gets that of the last checkpoint, a server that has lost all of them sometimes by Saver's restore."""
        lost = []
        for name, (_, _, is_initialised) in self.graph.inits.items():
            if self.record({"what": "look"}, lambda _: bool(self.session.run(is_initialised))) is False:
                lost.append(name)
        for server, reads in self.graph.reads.items():
            if self.checkpoint and set(reads) <= set(lost) and self.random.random() < 0.5:
                event = {"what": "restore", "bases": {name: packed(self.snapshot[name]) for name in reads}}
                saver = self.graph.restorers[server].saver_def
                self.record(event, lambda _: self.session.run(saver.restore_op_name, {saver.filename_tensor_name: self.checkpoint}) or True)
                lost = [name for name in lost if name not in reads]
        for name in lost:
            base, assign, _ = self.graph.inits[name]
            event = {"what": "init", "name": name, "base": packed(self.snapshot[name])}
            self.record(event, lambda _: self.session.run(assign.op, {base: self.snapshot[name]}) or True)

    def save(self):
        """The chief's. A checkpoint is a read of all variables."""
        self.saves += 1

        def run(event):
            with self.graph.graph.as_default():
                path = self.graph.saver.save(self.session, str(self.folder / "checkpoint" / "model"), global_step=self.saves, write_meta_graph=False)
            reader = tf.train.load_checkpoint(path)
            found = {name: reader.get_tensor(name) for name in self.graph.variables}
            event["values"] = {name: packed(value) for name, value in found.items()}
            return path, found

        if saved := self.record({"what": "read", "saved": True}, run):
            self.checkpoint, self.snapshot = saved

    def run(self):
        steps = 0
        while not (self.folder / "end").exists():
            if self.task == 0 and (self.session is None or steps % 50 == 0):
                self.initialise()
            choice = self.random.random()
            if choice < 0.1:
                self.read(self.random.randrange(self.graph.servers))
            elif choice < 0.11 and self.task == 0:
                self.save()
            else:
                self.update()
            steps += 1
            time.sleep(self.random.random() * 0.02)
        # Nothing is in the way any more, so each kind of step succeeds; a session may still have to be made again, and the chief to give a variable its value.
        deadline = time.monotonic() + LAST_STEPS_S
        if self.task == 0:
            self.initialise()
        for step in self.graph.steps:
            while not self.update(step, last=" ".join(step)) and time.monotonic() < deadline:
                if self.task == 0:
                    self.initialise()
        for server in range(self.graph.servers if self.task == 0 else 0):
            while self.read(server) is None and time.monotonic() < deadline:
                pass
        self._close()
        return steps


def packed(value):
    """As it is written down."""
    return pack(value) if getattr(value, "ndim", 0) else int(value)


def numpy_of(value):
    import numpy

    return numpy.full(SIZE, value, numpy.float32)


def work(*arguments):
    return Worker(*arguments).run()
