"""The training steps that are measured.

Each case builds one graph for a worker, can initialise the variables, run a step, and check afterwards that the variables hold exactly the values that numpy computes
for the same number of steps. Nothing can be optimised away: each push depends on the pulled value and differs per variable.
"""

import hashlib

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
raw = tf.raw_ops

# Variables repeat a pattern of this many values, so that numpy can cheaply follow thousands of steps over 40 MB and still compare every byte.
PATTERN = 64


# Everything in one process, without servers (set only in a dedicated process, see node.py).
local = False


def _ps(task):
    return "/device:CPU:0" if local else f"/job:ps/replica:0/task:{task}/device:CPU:0"


def _worker(task):
    return "/device:CPU:0" if local else f"/job:worker/replica:0/task:{task}/device:CPU:0"


def _digest(values):
    digest = hashlib.sha256()
    for value in map(np.asarray, values):
        # An array of strings holds pointers: hash the strings.
        digest.update(b"\0".join(value.ravel()) if value.dtype == object else value.tobytes())
    return digest.hexdigest()


class Case:
    """`name`, `title` (for tables), cluster size, traffic per step. Subclasses build the graph."""

    ps, workers = 1, 1
    # The job whose processes make the steps.
    driver = "worker"
    # The workers are servers of one process: for many that do little.
    together = False
    env = {}
    # (message count, message size, socket kinds) of the bare limit for this case.
    bare = None
    # Examples per step, if throughput is measured in examples.
    examples = 0
    # Shorter turns if steps are so short that stock TensorFlow may draw equal request ids (see run.py).
    turn_share = 1.0

    def __init__(self, name, title):
        self.name, self.title = name, title
        self.steps = 0

    def build(self, worker):
        """Adds the ops to the default graph; sets `init_op`, and `train_op` or whatever else `run` needs."""
        raise NotImplementedError

    def open(self, session):
        self.session = session
        self._run = session.make_callable(self.train_op)

    def init(self):
        self.session.run(self.init_op)

    def run(self):
        self._run()
        self.steps += 1

    def run_with(self, options, metadata):
        self.session.run(self.train_op, options=options, run_metadata=metadata)
        self.steps += 1

    def trace(self, steps):
        """Runs `steps` steps from the initial state and describes the result, which must be the same for every protocol."""
        self.init()
        self.steps = 0
        for _ in range(steps):
            self.run()
        return _digest(self.state())

    def state(self):
        return self.session.run(self.read_ops)

    def check(self, total_steps):
        """Raises AssertionError unless the variables hold the result of `total_steps` steps."""
        raise NotImplementedError


class Variables(Case):
    """`count` float variables of `size` bytes on one ps: each is pulled and turned into a gradient, which is pushed and applied."""

    def __init__(self, name, title, count, size, bare=("tcp", "unix"), env=None):
        super().__init__(name, title)
        self.count, self.size = count, size
        self.elements = size // 4
        assert self.elements % PATTERN == 0
        self.bare = (count, size, bare)
        self.env = env or {}
        self.turn_share = 0.4 if count == 1 else 1.0

    def _start(self):
        base = (np.arange(PATTERN, dtype=np.float32) + 1) / PATTERN
        return base[None, :] + np.arange(self.count, dtype=np.float32)[:, None] % 13

    def _rates(self):
        # Small, so that values stay normal numbers for 100,000 steps; different for neighbours, so that gradients differ.
        return (1 + np.arange(self.count) % 7).astype(np.float32) / np.float32(16384)

    def build(self, worker):
        start, rates = self._start(), self._rates()
        inits, pushes, self.read_ops = [], [], []
        for i in range(self.count):
            with tf.device(_ps(0)):
                handle = raw.VarHandleOp(dtype=tf.float32, shape=[self.elements], shared_name=f"v{i}")
                inits.append(raw.AssignVariableOp(resource=handle, value=tf.tile(start[i], [self.elements // PATTERN])))
                value = raw.ReadVariableOp(resource=handle, dtype=tf.float32)
            with tf.device(_worker(worker)):
                gradient = raw.Mul(x=value, y=tf.constant(rates[i]))
            with tf.device(_ps(0)):
                pushes.append(raw.AssignSubVariableOp(resource=handle, value=gradient))
            self.read_ops.append(value)
        with tf.device(_ps(0)):
            self.init_op, self.train_op = tf.group(inits), tf.group(pushes)

    def check(self, total_steps):
        want, rates = self._start(), self._rates()[:, None]
        for _ in range(total_steps):
            want -= want * rates
        for i, value in enumerate(self.state()):
            got = value.reshape(-1, PATTERN)
            assert np.array_equal(got, np.broadcast_to(want[i], got.shape)), f"variable {i} differs from numpy after {total_steps} steps: {got[0, :4]} is not {want[i, :4]}"
        return float(want.sum())


class Strings(Case):
    """`count` string variables of 1000 strings: pulled, permuted on the worker, pushed."""

    LENGTH = 1000

    def __init__(self, name, title, count):
        super().__init__(name, title)
        self.count = count

    def _start(self, i):
        return np.array([b"%d/%d:" % (i, j) + b"x" * (j % 40) for j in range(self.LENGTH)], dtype=object)

    def _order(self, i):
        return (np.arange(self.LENGTH) + 1 + i) % self.LENGTH

    def build(self, worker):
        inits, pushes, self.read_ops = [], [], []
        for i in range(self.count):
            with tf.device(_ps(0)):
                handle = raw.VarHandleOp(dtype=tf.string, shape=[self.LENGTH], shared_name=f"s{i}")
                inits.append(raw.AssignVariableOp(resource=handle, value=tf.constant(self._start(i))))
                value = raw.ReadVariableOp(resource=handle, dtype=tf.string)
            with tf.device(_worker(worker)):
                turned = tf.gather(value, self._order(i))
            with tf.device(_ps(0)):
                pushes.append(raw.AssignVariableOp(resource=handle, value=turned))
            self.read_ops.append(value)
        with tf.device(_ps(0)):
            self.init_op, self.train_op = tf.group(inits), tf.group(pushes)

    def check(self, total_steps):
        for i, got in enumerate(self.state()):
            want = np.roll(self._start(i), -(1 + i) * total_steps)
            assert np.array_equal(got, want), f"string variable {i} differs from numpy after {total_steps} steps"
        return 0.0


class OneOp(Case):
    """A step of one op on the ps: only the request to run it and its completion cross."""

    turn_share = 0.4

    def build(self, worker):
        with tf.device(_ps(0)):
            handle = raw.VarHandleOp(dtype=tf.int64, shape=[], shared_name="counter")
            self.init_op = raw.AssignVariableOp(resource=handle, value=tf.constant(0, tf.int64))
            self.train_op = raw.AssignAddVariableOp(resource=handle, value=tf.constant(1, tf.int64))
            self.read_ops = [raw.ReadVariableOp(resource=handle, dtype=tf.int64)]

    def check(self, total_steps):
        assert self.state()[0] == total_steps, f"the counter is {self.state()[0]} after {total_steps} steps"
        return float(total_steps)


class Ctr(Case):
    """A click-through-rate model: 26 embeddings and their wide weights over two ps, a small perceptron, Adagrad, two asynchronous workers.

    models.py and zoo.py have others: `deep` and `wide` fetch embeddings, `perceptron` is a stack of layers, `logits` combines them.
    """

    ps, workers = 2, 2
    FIELDS, DENSE, DIM, VOCABULARY, BATCHES = 26, 13, 16, 10_000, 8
    LAYERS = (128, 64)
    # Rows of each table.
    rows = (VOCABULARY,) * FIELDS
    reduce = staticmethod(tf.reduce_mean)
    use_resource, parts = True, None
    data_seed, first_seed = 7, 100

    def __init__(self, name, title, batch):
        super().__init__(name, title)
        self.batch = self.examples = batch

    def optimizer(self):
        return tf1.train.AdagradOptimizer(0.05)

    def variable(self, name, shape, scale):
        self.seed += 1
        return tf1.get_variable(name, shape, initializer=tf1.random_uniform_initializer(-scale, scale, seed=self.seed))

    def table(self, name, field, scale, width):
        key = f"{name}{field}"
        if key not in self.tables:
            with tf1.variable_scope("", partitioner=tf1.fixed_size_partitioner(self.parts) if self.parts else None):
                self.tables[key] = self.variable(key, [self.rows[field], width], scale)
        return self.tables[key]

    def embedding(self, name, field, scale, width):
        column = self.column(field)
        return tf.nn.embedding_lookup(self.table(name, field, scale, width), column)

    def column(self, field):
        """The ids of a field."""
        if field not in self.columns:
            self.columns[field] = self.batch_ids[:, field]
        return self.columns[field]

    def deep(self, field):
        return self.embedding("deep", field, 0.05, self.DIM)

    def wide(self, field):
        return self.embedding("wide", field, 0.01, 1)

    def perceptron(self, layer, widths, name="", activation=tf.nn.relu):
        """Layers of these widths, all but the last with an activation."""
        for index, width in enumerate(widths):
            fan_in = int(layer.shape[1])
            layer = tf.matmul(layer, self.variable(f"{name}weights{index}", [fan_in, width], fan_in**-0.5)) + self.variable(f"{name}bias{index}", [width], 1e-6)
            if index < len(widths) - 1:
                layer = activation(layer)
        return layer

    def logits(self, dense):
        deep, wide = [dense], []
        for field in range(self.FIELDS):
            deep.append(self.deep(field))
            wide.append(self.wide(field))
        return self.perceptron(tf.concat(deep, axis=1), self.LAYERS + (1,)) + tf.add_n(wide)

    def data(self, random):
        """Ids, dense features and labels of all batches."""
        ids = (random.zipf(1.3, (self.BATCHES, self.batch, self.FIELDS)) * 7919 % np.array(self.rows)).astype(np.int64)
        dense = random.rand(self.BATCHES, self.batch, self.DENSE).astype(np.float32)
        clicks = ((ids[:, :, :3].sum(axis=2) % 5 < 2) ^ (dense[:, :, 0] > 0.9)).astype(np.float32)[:, :, None]
        return ids, dense, clicks

    def objective(self, dense, labels):
        return self.reduce(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=self.logits(dense)))

    def build(self, worker):
        ids, dense, clicks = self.data(np.random.RandomState(self.data_seed + worker))
        self.seed, self.columns, self.tables = self.first_seed, {}, {}
        setter = None if local else tf1.train.replica_device_setter(ps_tasks=self.ps, worker_device=_worker(worker).rsplit("/device", 1)[0])
        with tf1.device(setter), tf1.variable_scope("", use_resource=self.use_resource):
            total = tf1.train.get_or_create_global_step()
            self.batch_index = self.source()
            self.batch_ids = tf.gather(tf.constant(ids), self.batch_index)
            batch_dense = tf.gather(tf.constant(dense), self.batch_index)
            labels = tf.gather(tf.constant(clicks), self.batch_index)
            self.loss = self.objective(batch_dense, labels)
            optimizer = self.optimizer()
            self.train_op = optimizer.minimize(self.loss, global_step=total)
            self.more(total, self.batch_ids)
            self.accumulators = [optimizer.get_slot(v, "accumulator") for v in tf1.trainable_variables()]
        self.init_op = tf1.global_variables_initializer()

    def source(self):
        """The number of a step's batch."""
        return tf1.placeholder(tf.int32, [])

    def more(self, total, batch_ids):
        """The work of a step besides training."""
        self.read_ops = [total]

    def open(self, session):
        self.session = session
        self._run = session.make_callable([self.loss, self.train_op], feed_list=[self.batch_index])
        self.losses = []

    def run(self):
        self.losses.append(float(self._run(self.steps % self.BATCHES)[0]))
        self.steps += 1

    def run_with(self, options, metadata):
        loss = self.session.run([self.loss, self.train_op], {self.batch_index: self.steps % self.BATCHES}, options=options, run_metadata=metadata)[0]
        self.losses.append(float(loss))
        self.steps += 1

    def trace(self, steps):
        # One worker alone: the losses of its first steps are the same with every transport.
        self.init()
        self.steps = 0
        for _ in range(steps):
            self.run()
        return _digest([np.array(self.losses[-steps:], np.float32)])

    def check(self, total_steps):
        got = int(self.state()[0])
        assert got == total_steps, f"the workers made {total_steps} steps, the global step says {got}"
        early, late = np.mean(self.losses[:5]), np.mean(self.losses[-20:])
        assert np.isfinite(late) and late < early, f"the loss did not fall: {early} → {late}"
        return float(late)


class FromDataset:
    """A model with batches from a dataset, and the runs of a MonitoredTrainingSession, which are no callables."""

    def source(self):
        return tf.cast(tf1.data.make_one_shot_iterator(tf.data.Dataset.range(self.BATCHES).repeat()).get_next(), tf.int32)

    def open(self, session):
        self.session, self.losses = session, []
        self._run = lambda number: session.run([self.loss, self.train_op])

    def run_with(self, options, metadata):
        self.losses.append(float(self.session.run([self.loss, self.train_op], options=options, run_metadata=metadata)[0]))
        self.steps += 1


class DatasetCtr(FromDataset, Ctr):
    pass


class CountedCtr(Ctr):
    """The same with reference variables and partitioned tables, as in older models. Each step also counts itself and its ids, on every server."""

    use_resource, parts = False, 2

    def more(self, total, batch_ids):
        counts, updates = [], [self.train_op]
        for ps in range(self.ps):
            with tf1.device(_ps(ps)):
                steps = tf1.get_variable(f"steps{ps}", [], tf.int64, initializer=tf1.zeros_initializer(), trainable=False)
                seen = tf1.get_variable(f"seen{ps}", [self.VOCABULARY, 1], tf.int64, initializer=tf1.zeros_initializer(), trainable=False)
                updates.append(tf1.assign_add(steps, 1))
                updates.append(tf1.scatter_add(seen, batch_ids[:, ps], tf.ones([self.batch, 1], tf.int64), use_locking=True))
                counts += [steps, tf.reduce_sum(seen)]
        self.train_op = tf.group(updates)
        self.read_ops = [total, *counts]

    def check(self, total_steps):
        counts = [int(value) for value in self.state()[1:]]
        expected = [total_steps, total_steps * self.batch] * self.ps
        assert counts == expected, f"after {total_steps} steps the servers counted {counts}, not {expected}"
        return super().check(total_steps)


_FORCE_TCP = {"STARWIRE_UNIX": "off"}
KB, MB = 1024, 1024 * 1024


def all_cases():
    return [
        Variables("1000x4KB", "1000 variables × 4 KB", 1000, 4 * KB),
        Variables("100x4KB", "100 variables × 4 KB", 100, 4 * KB),
        Variables("1x4KB", "1 variable × 4 KB", 1, 4 * KB),
        Variables("10x1MB", "10 variables × 1 MB", 10, 1 * MB),
        Variables("4x10MB-tcp", "4 variables × 10 MB, TCP", 4, 10 * MB, bare=("tcp", "tcp+math"), env=_FORCE_TCP),
        Variables("4x10MB-host", "4 variables × 10 MB, one host", 4, 10 * MB, bare=("unix", "unix+math", "memcpy")),
        Strings("10xstrings", "10 string tensors of 1000", 10),
        OneOp("one-op", "one op on the ps, no tensor"),
        Ctr("ctr", "CTR model, 2 ps, 2 workers, batch 512", 512),
        DatasetCtr("ctr-data", "CTR model, batches from a dataset", 512),
        CountedCtr("ctr-ref", "CTR model, reference variables in parts", 512),
    ]
