"""Random training programs for starwire.config(ahead=1): a model that reads a dataset, and a sequence of runs."""

import threading
import time

from cluster import one, tf

BATCHES, ROWS, SIZE = 9, 40, 12


def dataset(rng, delays):
    """Elements: ids, words, numbers, a sparse list of ids, and the number of the batch. With `delays`, some take longer than a step waits for them."""
    import numpy as np

    ids = rng.randint(0, ROWS, (BATCHES, SIZE)).astype(np.int64)
    numbers = rng.rand(BATCHES, SIZE, 4).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((ids, np.char.add("w", (ids * 7 % 90).astype(str)), numbers, np.arange(BATCHES)))

    def parsed(ids, words, numbers, number):
        ids, words, numbers = tf.reshape(ids, [SIZE]), tf.reshape(words, [SIZE]), tf.reshape(numbers, [SIZE, 4])
        return ids, words, numbers, tf.sparse.from_dense(tf.reshape(ids % 3 * ids % ROWS, [SIZE // 2, 2])), number

    def delayed(ids, words, numbers, number):
        return ids, words, numbers, tf.reshape(one().py_func(lambda number: (time.sleep(delays[number]), number)[1], [number], tf.int64), [])

    return (data.map(delayed) if delays else data).map(parsed)


class Program:
    """Draws the same graph and the same runs for the same seed."""

    def __init__(self, seed, setter):
        import numpy as np

        self.rng = np.random.RandomState(seed)
        self.use_resource = self.chance(0.6)
        self.repeats = self.chance(0.5)
        delays = [self.one_of(0, 0.002, 0.03) for _ in range(BATCHES)] if self.chance(0.4) else []
        data = dataset(self.rng, delays)
        iterator = one().data.make_initializable_iterator(data.repeat() if self.repeats else data)
        self.first = [iterator.initializer]
        with one().device(setter), one().variable_scope(f"program{seed}", use_resource=self.use_resource):
            self.build(iterator.get_next())
        self.first.append(one().global_variables_initializer())
        self.iterator = iterator

    def chance(self, part):
        return self.rng.rand() < part

    def one_of(self, *choices):
        return choices[self.rng.randint(len(choices))]

    def variable(self, name, shape, trainable=True):
        self.count += 1
        values = one().random_uniform_initializer(-1, 1, seed=self.count)
        parts = one().fixed_size_partitioner(2) if len(shape) == 2 and shape[0] > 8 and self.chance(0.3) else None
        return one().get_variable(f"{name}{self.count}", shape, initializer=values, partitioner=parts, trainable=trainable)

    def ids_of(self, batch):
        ids, words, _, _, number = batch
        hashed = lambda: one().strings.to_hash_bucket_fast(words, ROWS)
        made = self.one_of(lambda: ids, hashed, lambda: (ids * 3 + number) % ROWS, lambda: self.found(words), lambda: self.computed(ids), lambda: self.called(ids))()
        return tf.cast(made, tf.int32) if self.chance(0.2) else made

    def found(self, words):
        keys, values = tf.constant([f"w{n}" for n in range(60)]), tf.range(60, dtype=tf.int64) % ROWS
        table = one().lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), ROWS - 1)
        self.first.append(table.initializer)
        return table.lookup(words)

    def computed(self, ids):
        made = one().py_func(lambda ids: (ids + 1) % ROWS, [ids], tf.int64)
        made.set_shape([SIZE])
        return made

    def called(self, ids):
        from tensorflow.python.framework import function

        made = function.Defun(tf.int64, func_name="others")(lambda ids: (ids * 5 + 1) % ROWS)(ids)
        made.set_shape([SIZE])
        return made

    def features(self, batch):
        parts = [batch[2]]
        for _ in range(self.rng.randint(1, 4)):
            table = self.variable("table", [ROWS, 4])
            ids = self.ids_of(batch)
            if self.chance(0.25):
                pooled = one().nn.embedding_lookup_sparse(table, batch[3], None, combiner="sum")
                parts.append(tf.tile(tf.reduce_sum(pooled, 0, keepdims=True), [SIZE, 1]))
            else:
                parts.append(one().nn.embedding_lookup(table, ids))
        return tf.concat(parts, 1)

    def build(self, batch):
        self.count = 0
        self.number = batch[4]
        step = one().train.get_or_create_global_step()
        hidden = self.features(batch)
        updates = []
        for width in (6, 1):
            weights, bias = self.variable("weights", [int(hidden.shape[1]), width]), self.variable("bias", [width])
            hidden = tf.matmul(hidden, weights) + bias
            if width > 1:
                hidden = tf.tanh(hidden)
                if self.chance(0.4):  # as batch normalisation
                    mean = self.variable("mean", [width], trainable=False)
                    updates.append(one().assign(mean, mean * 0.9 + tf.reduce_mean(hidden, 0) * 0.1))
                    if self.chance(0.5):
                        with tf.control_dependencies(updates):
                            hidden = hidden - (mean.read_value() if self.use_resource else tf.identity(mean))
        loss = tf.reduce_mean(tf.square(hidden - tf.reduce_sum(batch[2], 1, keepdims=True)))
        if self.chance(0.4):
            loss += 1e-3 * tf.add_n([one().nn.l2_loss(variable) for variable in one().trainable_variables()])
        if self.chance(0.3):
            loss = one().cond(self.number > 3, lambda: loss * 1.0, lambda: loss * 2.0)
        if self.chance(0.3):
            late = self.variable("late", [], trainable=False)
            updates.append(one().assign_add(late, loss))
            with tf.control_dependencies(updates[-1:]):
                loss = loss + 1e-3 * (late.read_value() if self.use_resource else tf.identity(late))
        rate = self.one_of(0.05, one().train.exponential_decay(0.05, step, 2, 0.7))
        kinds = [one().train.GradientDescentOptimizer, one().train.AdagradOptimizer, one().train.FtrlOptimizer, lambda rate: one().train.MomentumOptimizer(rate, 0.9)]
        if self.repeats:  # what it does in a step that finds no batch depends on the moment
            kinds.append(one().train.AdamOptimizer)
        with tf.control_dependencies(updates if self.chance(0.7) else []):
            train = self.one_of(*kinds)(rate).minimize(loss, global_step=step)
        self.step = [train, loss, self.number] + self.one_of([], [step], updates[:1])
        some = one().trainable_variables()[-1]
        self.others = [[loss, self.number], [train, loss], [one().assign(some, some * 0.5)], [some], [step]]

    def run(self, sess, bits):
        """Runs what it has drawn. Returns all that the runs return, and at the end all variables."""
        for op in self.first:
            sess.run(op)
        seen = []
        for _ in range(self.rng.randint(4, 12)):
            if self.chance(0.15):
                self.take_together(sess, seen)
            elif self.chance(0.25):
                wanted = self.others[self.rng.randint(len(self.others))]
                self.take(sess, wanted, seen, bits)
            else:
                for _ in range(self.rng.randint(1, 5)):
                    self.take(sess, self.step, seen, bits)
        return seen, [bits(value) for value in sess.run(one().global_variables())]

    def take(self, sess, wanted, seen, bits):
        try:
            seen.append([bits(value) for value in sess.run(wanted) if value is not None])
        except tf.errors.OutOfRangeError:
            seen.append("end")
            sess.run(self.iterator.initializer)

    def take_together(self, sess, seen):
        """Makes steps in several threads. Which step gets which batch is not determined, so all begins anew afterwards."""
        threads, taken = self.rng.randint(2, 5), []
        steps = self.rng.randint(1, 4)

        def take(steps=steps):
            for _ in range(steps):
                try:
                    taken.append(int(sess.run(self.step)[2]))
                except tf.errors.OutOfRangeError:
                    taken.append(BATCHES)

        running = [threading.Thread(target=take, daemon=True) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        take(3)  # what was read, and not used
        seen.append(sorted(taken))
        for op in self.first:
            sess.run(op)
