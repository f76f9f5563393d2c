"""Graphs that run in star calls, with those of fuse_graphs.py. CASES: functions that build a graph and return (fetches, feed_dict of step)."""

import fuse_graphs
import training_job
from cluster import one, tf
from graphs import PS0, PS1, WORKER0, WORKER1


def optimizer_model(make):
    """Dense and partitioned sparse variables, ref and resource, on two ps."""

    def build():
        import numpy as np

        rng = np.random.default_rng(11)
        with one().device(training_job.setter()):
            with tf.device(WORKER0):
                step = one().placeholder(tf.int64, ())
                ids = (tf.range(48, dtype=tf.int64) * 7919 + step) % 60
            losses = []
            for i in range(6):
                table = one().get_variable(
                    f"table{i}", (60, 5), initializer=one().random_uniform_initializer(-1, 1, seed=i + 1), partitioner=one().fixed_size_partitioner(2), use_resource=i % 2 == 0
                )
                losses.append(tf.reduce_mean(tf.square(one().nn.embedding_lookup(table, ids, partition_strategy="div") - float(i))))
            for i in range(8):
                v = one().get_variable(f"v{i}", initializer=rng.normal(size=(i + 1, 9)).astype(np.float32), use_resource=i % 2 == 0)
                losses.append(tf.reduce_mean(tf.square(v - float(i))))
            loss = tf.add_n(losses)
            counter = one().train.get_or_create_global_step()
            train_op = make().minimize(loss, global_step=counter)
        with tf.device(WORKER0), tf.control_dependencies([train_op]):
            out = [tf.identity(loss), tf.identity(counter.read_value())]
            out += [tf.reduce_sum(v.read_value() if hasattr(v, "read_value") else v) for v in one().global_variables() if v.dtype.base_dtype == tf.float32]
        return out, lambda number: {step: number}

    return build


def tables():
    """Hash tables on a ps: one is filled once, the other grows."""
    import numpy as np

    with tf.device(PS0):
        keys = tf.constant(np.arange(20, dtype=np.int64))
        fixed = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, tf.cast(keys * 3, tf.float32)), -1.0)
        growing = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -7)
        filled = one().get_variable("filled", initializer=np.int32(0))
    with tf.device(WORKER0):
        step = one().placeholder(tf.int64, ())
        wanted = tf.range(8, dtype=tf.int64) * 3 + step
        name = tf.strings.as_string(wanted)
    with tf.device(PS0), tf.control_dependencies(one().get_collection(one().GraphKeys.TABLE_INITIALIZERS)):
        found = fixed.lookup(wanted)
        with tf.control_dependencies([growing.insert(name, wanted * 2), one().assign_add(filled, 1)]):
            grown, size = growing.lookup(name), growing.size()
    with tf.device(WORKER0):
        return [found + 1.0, grown + 1, size + 0], lambda number: {step: number}


def conditional_update():
    """A branch on the ps that updates, pulls and pushes, with a predicate from the ps."""
    import numpy as np

    with tf.device(PS0):
        turn = one().assign_add(one().get_variable("turn", initializer=np.int32(0)), 1)
        # Control flow v2 cannot pass references into a branch.
        resource = one().control_flow_v2_enabled()
        values = [one().get_variable(f"u{i}", initializer=np.full(4, float(i), np.float32), use_resource=resource or i % 2 == 0) for i in range(4)]
    with tf.device(PS1):
        other = one().get_variable("other", initializer=np.ones(3, np.float32), use_resource=True)

    def bump(variables, amount):
        def branch():
            done = [one().assign_add(v, tf.zeros_like(v) + amount) for v in variables]
            with tf.control_dependencies(done):
                return tf.add_n([tf.reduce_sum(d) for d in done])

        return branch

    with tf.device(WORKER0):
        odd = tf.equal(turn % 2, 1)
    with tf.device(PS0):
        first = tf.cond(odd, bump(values[:2], 1.0), bump(values[2:], 10.0))
    with tf.device(WORKER0):
        second = tf.cond(first > 6.0, lambda: tf.cond(odd, bump([other], 0.5), bump(values[:1], 100.0)), lambda: first * 2.0)
        with tf.control_dependencies([second]):
            rest = [tf.reduce_sum(v.read_value()) for v in [*values, other]]
        return [first + 0.0, second + 0.0, *rest], None


def large_branch():
    """A branch looks up rows of a large reference variable, which is trained and used elsewhere, too."""
    import numpy as np

    with tf.device(PS0):
        table = one().get_variable("table", initializer=np.arange(80000, dtype=np.float32).reshape(5000, 16) / 80000, use_resource=False)
    with tf.device(PS1):
        turn = one().assign_add(one().get_variable("turn", initializer=np.int32(0), use_resource=True), 1)
        bias = one().get_variable("bias", initializer=np.zeros(16, np.float32), use_resource=True)
    with tf.device(WORKER0):
        ids = tf.constant(np.arange(64) * 77 % 5000)
        rows = tf.cond(tf.equal(turn % 2, 1), lambda: one().nn.embedding_lookup(table, ids), lambda: tf.zeros((64, 16)))
        loss = tf.reduce_sum(tf.square(rows + bias)) + tf.reduce_sum(one().nn.embedding_lookup(table, ids[:4] * 3 % 5000))
        train = one().train.GradientDescentOptimizer(0.1).minimize(loss, var_list=[table, bias])
        with tf.control_dependencies([train]):
            after = [tf.reduce_sum(one().nn.embedding_lookup(table, ids)), tf.reduce_sum(bias.read_value())]
        return [loss, *after], None


def back_and_forth():
    """A value stays on a ps between two calls, travels from ps to ps, and is used by both again."""
    import numpy as np

    with tf.device(PS0):
        a = one().get_variable("a", initializer=np.arange(6, dtype=np.float32), use_resource=True)
        kept = a.read_value() * 3.0
    with tf.device(WORKER0):
        pulled = kept + 1.0
    with tf.device(PS1):
        b = one().get_variable("b", initializer=np.ones(6, np.float32))
        sent = tf.sqrt(kept) + b
    with tf.device(PS0):
        mixed = kept * pulled - sent
        update = one().assign_add(a, mixed * 0.01)
    with tf.device(PS1):
        other = one().assign(b, sent * 0.5 + tf.reduce_sum(mixed) * 1e-3)
    with tf.device(WORKER0):
        with tf.control_dependencies([update, other]):
            return [tf.identity(mixed), a.read_value() + 0.0, b.read_value() + 0.0], None


def references():
    """Assignments whose references are used again after the worker's part of the step."""
    import numpy as np

    with tf.device(PS0):
        v = one().get_variable("v", initializer=np.zeros(3, np.float32), use_resource=False)
        first = one().assign_add(v, [1.0, 2.0, 3.0])
    with tf.device(WORKER0):
        seen = first * 2.0
    with tf.device(PS0):
        with tf.control_dependencies([seen]):
            second = one().assign_sub(first, seen * 0.25)
        scattered = one().scatter_add(second, [0, 2], [10.0, 20.0])
    with tf.device(WORKER0):
        return [seen + 0.0, scattered + 0.0], None


def functions():
    """A function that is not inlined, called on a ps."""
    import numpy as np

    @tf.function
    def polynomial(x):
        return x * x - 2.0 * x

    with tf.device(PS0):
        v = one().get_variable("v", initializer=np.arange(5, dtype=np.float32), use_resource=True)
        made = polynomial(v.read_value() + 1.0)
    with tf.device(WORKER0):
        gone = made + 1.0
    with tf.device(PS0):
        with tf.control_dependencies([one().assign_add(v, gone * 0.1)]):
            after = tf.reduce_sum(v.read_value())
    with tf.device(WORKER0):
        return [gone, after + 0.0], None


def fed_and_fetched():
    """Operations of a ps that are fed and fetched directly, without the worker."""
    with tf.device(PS0):
        x, y = one().placeholder(tf.float32, (3,)), one().placeholder_with_default([1.0, 1.0, 1.0], (3,))
        z = x * y
        text = tf.strings.as_string(z)
    with tf.device(WORKER1):
        w = z - 1.0
    with tf.device(PS1):
        far = w * w
    return [z, text, w, far], lambda number: {x: [number, 2.0, 3.0], **({y: [2.0, 2.0, 2.0]} if number % 2 else {})}


def large_model(make):
    """Variables of a megabyte on two ps, whose calls are split, and small ones that share a call; the optimizer and the counter wait for all of them."""

    def build():
        import numpy as np

        rng = np.random.default_rng(5)
        with one().device(training_job.setter()):
            with tf.device(WORKER0):
                step = one().placeholder(tf.float32, ())
            losses = []
            for i in range(12):
                shape = (500, 600) if i % 6 < 4 else (3, 5)
                v = one().get_variable(f"v{i}", initializer=rng.normal(size=shape).astype(np.float32), use_resource=i % 4 < 2)
                losses.append(tf.reduce_mean(tf.square(v - step * float(i))))
            loss = tf.add_n(losses)
            counter = one().train.get_or_create_global_step()
            train_op = make().minimize(loss, global_step=counter)
        with tf.device(WORKER0), tf.control_dependencies([train_op]):
            out = [tf.identity(loss), tf.identity(counter.read_value())]
            out += [v.read_value() * 1.0 for v in one().trainable_variables()]
        return out, lambda number: {step: float(number)}

    return build


def replicas():
    """In-graph replication: one session runs a tower on each worker, averages the gradients and applies them on two ps; one worker has its own variable."""
    import numpy as np

    rng = np.random.default_rng(3)
    with one().device(training_job.setter()):
        weights = one().get_variable("weights", initializer=rng.normal(size=(7, 4)).astype(np.float32), use_resource=True)
        bias = one().get_variable("bias", initializer=np.zeros(4, np.float32), use_resource=False)
        large = one().get_variable("large", initializer=rng.normal(size=(600, 500)).astype(np.float32), use_resource=True)
        rows = one().get_variable("rows", (50, 6), initializer=one().random_uniform_initializer(-1, 1, seed=2), partitioner=one().fixed_size_partitioner(2))
        counter = one().train.get_or_create_global_step()
    with tf.device(WORKER1):
        seen = one().get_variable("seen", initializer=np.float32(0), use_resource=True)
    with tf.device(WORKER0):
        step = one().placeholder(tf.int64, ())
        batch = tf.reshape(tf.range(42, dtype=tf.float32), (6, 7)) / 42.0 + tf.cast(step, tf.float32) * 0.1
    optimizer = one().train.AdagradOptimizer(0.1)
    towers, losses = [], []
    for number, worker in enumerate((WORKER0, WORKER1)):
        with tf.device(worker):
            layer = tf.matmul(batch[number::2], weights) + bias
            ids = (tf.range(8, dtype=tf.int64) * 13 + step + number) % 50
            embedded = one().nn.embedding_lookup(rows, ids, partition_strategy="div")
            loss = tf.reduce_mean(tf.square(layer - 1.0)) + tf.reduce_sum(tf.square(large)) * 1e-4 + tf.reduce_mean(tf.square(embedded))
            losses.append(loss)
            dense = tf.gradients(loss, [weights, bias, large])
            towers.append(dense)
            sparse = tf.gradients(loss, list(rows))
        if number == 0:
            pushed = list(zip(sparse, rows))
    with tf.device(WORKER1):
        noted = one().assign_add(seen, losses[1] - losses[0])
    with tf.device(WORKER0):
        pushed += [((a + b) / 2.0, v) for a, b, v in zip(*towers, (weights, bias, large))]
    train_op = optimizer.apply_gradients(pushed, global_step=counter)
    with tf.device(WORKER1), tf.control_dependencies([train_op, noted]):
        there = [tf.reduce_sum(weights.read_value()), seen.read_value() + 0.0]
    with tf.device(WORKER0), tf.control_dependencies([train_op]):
        here = [tf.identity(losses[0]), bias.read_value() + 0.0, tf.identity(counter.read_value()), large.read_value() * 1.0]
        here += [tf.identity(part) + 0.0 for part in rows]
    return [*there, *here], lambda number: {step: number}


OPTIMIZERS = {
    **training_job.OPTIMIZERS,
    "ftrl": lambda: one().train.FtrlOptimizer(0.1, l1_regularization_strength=0.01),
    "rmsprop": lambda: one().train.RMSPropOptimizer(0.01, momentum=0.5),
    "adadelta": lambda: one().train.AdadeltaOptimizer(1.0),
}


def training_loop(parallel):
    """Steps of a small model in a loop: pulls, lookups, a branch, pushes to both servers, and a counter that waits for them."""

    import numpy as np

    def make():
        def create(where, name, value):
            with tf.device(where):
                return one().get_variable(name, initializer=value, use_resource=True)

        weights = [create((PS0, PS1)[i % 2], f"weight{i}", np.linspace(-1, 1, 40 + i).astype(np.float32)) for i in range(5)]
        table = create(PS1, "table", np.arange(60, dtype=np.float32).reshape(20, 3))
        counter = create(PS0, "counter", np.int64(0))

        def body(i, total):
            with tf.device(WORKER0):
                # Each iteration begins when the one before it has ended.
                with tf.control_dependencies([i, total]):
                    ids = tf.range(3) * 5 + i
            rows = tf.gather(table, ids)
            with tf.device(WORKER0):
                values = [tf.sin(weight.read_value()) for weight in weights]
                loss = tf.add_n([tf.reduce_sum(value) for value in values]) + tf.reduce_sum(rows)
            updates = []
            for weight, value in zip(weights, values):
                with tf.control_dependencies([loss]):
                    updates.append(weight.assign_sub(value * 0.1, read_value=False))

            def ran(update):
                with tf.control_dependencies([update]):
                    return tf.constant(True)

            with tf.control_dependencies([loss]), tf.device(WORKER0):
                sparse = tf.IndexedSlices(rows * 0.25, ids)
                updates.append(tf.cond(loss > 100.0, lambda: ran(table.scatter_sub(sparse)), lambda: ran(table.assign_add(tf.ones((20, 3)), read_value=False))))
            with tf.control_dependencies(updates):
                count = counter.assign_add(1, read_value=False)
            with tf.control_dependencies([count]), tf.device(WORKER0):
                return i + 1, tf.identity(total + loss)

        with tf.device(WORKER0):
            start = tf.constant(0), tf.constant(0.0)
            _, total = tf.while_loop(lambda i, _: i < 4, body, start, parallel_iterations=parallel)
        with tf.control_dependencies([total]):
            return [total, *[variable.read_value() for variable in [*weights, table, counter]]], None

    return make


CASES = {
    **{name: case for name, case in fuse_graphs.CASES.items() if "optimised" not in name},
    **{f"optimizer_{name}": optimizer_model(make) for name, make in OPTIMIZERS.items()},
    "tables": tables,
    "conditional_update_v1": conditional_update,
    "large_branch_v1": large_branch,
    "conditional_update_v2": conditional_update,
    "back_and_forth": back_and_forth,
    "references": references,
    "functions": functions,
    **{f"training_loop_{parallel}_{style}": training_loop(parallel) for parallel in (1, 10) for style in ("v1", "v2")},
    "fed_and_fetched": fed_and_fetched,
    "large_model_sgd": large_model(OPTIMIZERS["sgd"]),
    "large_model_adam": large_model(OPTIMIZERS["adam"]),
    "replicas": replicas,
}
