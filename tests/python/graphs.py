"""Graphs for the differential tests. CASES: functions that build a graph and return (fetches, feed_dict of step); ERRORS: graphs that fail."""

import contextlib
import pickle

from cluster import tf
from tensors import digest

HOPS = ("/job:ps/task:0/device:CPU:0", "/job:worker/task:0/device:CPU:0", "/job:ps/task:1/device:CPU:0", "/job:worker/task:1/device:CPU:0")
PS0, WORKER0, PS1, WORKER1 = HOPS


def many_small():
    """Between two of the tasks, more than the engine hands over at a time (256)."""
    import numpy as np

    feeds, out = [], []
    for i in range(320):
        device, other = ((PS1, WORKER0), (PS0, WORKER1), (PS1, WORKER1))[i % 3] if i % 8 == 0 else (PS0, WORKER0)
        with tf.device(device):
            feed = tf.compat.v1.placeholder(tf.float32, (i % 50,))
            value = tf.identity(feed)
        with tf.device(other):
            value = value * 2.0 + float(i)
        with tf.device(device):
            out.append(value + 1.0)
        feeds.append(feed)
    return out, lambda step: {feed: np.full(feed.shape, step + 0.1 * i, np.float32) for i, feed in enumerate(feeds)}


def fetch_everywhere():
    """Feeds and fetches nodes of every task, including a variable, and runs an unfetched target."""
    import numpy as np

    out, feeds = [], []
    for i, device in enumerate(HOPS):
        with tf.device(device):
            variable = tf.compat.v1.get_variable(f"v{i}", initializer=np.arange(5, dtype=np.float32) * i, use_resource=bool(i % 2))
            feed = tf.compat.v1.placeholder(tf.float32, (5,))
            added = tf.compat.v1.assign_add(variable, feed)
        feeds.append(feed)
        out += [added, tf.identity(added) if i % 2 else variable.op.outputs[0] if False else tf.identity(added)]
    return out, lambda step: {feed: np.full(5, step + i, np.float32) for i, feed in enumerate(feeds)}


def conditional(use_tensor_size):
    def build():
        import numpy as np

        with tf.device(PS0):
            flag = tf.compat.v1.placeholder(tf.bool, ())
            big = tf.compat.v1.get_variable("big", initializer=np.arange(use_tensor_size, dtype=np.float32))
            flag_there = tf.logical_not(tf.logical_not(flag))
        with tf.device(PS1):
            other = tf.compat.v1.get_variable("other", initializer=np.arange(use_tensor_size, dtype=np.float32) * 3)

        def yes():
            with tf.device(WORKER0):
                here = tf.identity(big) + 1.0
            with tf.device(PS1):
                return here * other

        def no():
            with tf.device(WORKER1):
                here = tf.identity(other) - 1.0
            with tf.device(PS0):
                return here * big

        with tf.device(WORKER0):
            chosen = tf.cond(flag_there, yes, no)
            nested = tf.cond(flag_there, lambda: tf.cond(chosen[0] > 0, yes, no), no)
        return [chosen, nested], lambda step: {flag: step % 2 == 0}

    return build


def dead_branches():
    """Switch outputs, one of them dead, cross every edge; Merge takes the live one."""
    import numpy as np

    with tf.device(PS0):
        flag = tf.compat.v1.placeholder(tf.bool, ())
        data = tf.compat.v1.placeholder(tf.float32, (3000,))
        off, on = tf.raw_ops.Switch(data=data, pred=flag)
    with tf.device(WORKER0):
        on_here, off_here = tf.identity(on) + 1.0, tf.identity(off) - 1.0
        small_on, small_off = tf.reduce_sum(on), tf.reduce_sum(off)
    with tf.device(PS1):
        on_there, off_there = tf.identity(on_here) * 2.0, tf.identity(off_here) * 3.0
        merged = tf.raw_ops.Merge(inputs=[off_there, on_there])
    with tf.device(WORKER1):
        small = tf.raw_ops.Merge(inputs=[small_off, small_on])
        out = [merged.output + 0.0, merged.value_index + 0, small.output + 0.0]
    return out, lambda step: {flag: step % 2 == 1, data: np.arange(3000, dtype=np.float32) + step}


def loop_across_tasks():
    """A loop whose body visits several tasks per iteration, so that rendezvous keys have frame and iteration ids."""
    import numpy as np

    with tf.device(PS0):
        count = tf.compat.v1.placeholder(tf.int32, ())
        weight = tf.compat.v1.get_variable("weight", initializer=np.linspace(0, 1, 2500).astype(np.float32))

    def body(i, total):
        with tf.device(PS0):
            step = weight * tf.cast(i, tf.float32)
        with tf.device(WORKER1):
            step = step + 1.0
        with tf.device(WORKER0):
            return i + 1, total + step

    with tf.device(WORKER0):
        i, total = tf.while_loop(lambda i, _: i < count, body, [tf.constant(0), tf.zeros(2500)], parallel_iterations=4)
    return [i, total], lambda step: {count: 3 + 5 * step}


def nested_loops():
    with tf.device(PS0):
        count = tf.compat.v1.placeholder(tf.int32, ())

    def inner(j, x):
        with tf.device(PS1):
            y = x * 1.5
        with tf.device(WORKER0):
            return j + 1, y + tf.cast(j, tf.float32)

    def outer(i, x):
        with tf.device(WORKER0):
            _, y = tf.while_loop(lambda j, _: j < i, inner, [tf.constant(0), x])
        with tf.device(PS0):
            return i + 1, y + 0.25

    with tf.device(WORKER0):
        out = tf.while_loop(lambda i, _: i < count, outer, [tf.constant(0), tf.constant(1.0)])
    return out, lambda step: {count: 2 + step}


def gradient_of_loop():
    """Back-propagation through a loop on another task: stacks, TensorLists (v2), and their variants."""
    import numpy as np

    with tf.device(PS0):
        weight = tf.compat.v1.get_variable("weight", initializer=np.linspace(0.1, 1, 40).astype(np.float32).reshape(4, 10), use_resource=True)
    with tf.device(WORKER0):
        x = tf.compat.v1.placeholder(tf.float32, (3, 4))

        pulled = tf.identity(weight)

        def body(i, h):
            return i + 1, tf.tanh(tf.matmul(h, tf.matmul(pulled, pulled, transpose_b=True)))

    with tf.device(PS1):
        _, h = tf.while_loop(lambda i, _: i < 4, body, [tf.constant(0), x])
    with tf.device(WORKER0):
        loss = tf.reduce_sum(h * h)
    grad = tf.gradients(loss, [pulled])[0]
    with tf.device(PS1):
        on_ps = grad * 1.0
    return [loss, on_ps], lambda step: {x: np.linspace(-1, 1, 12).astype(np.float32).reshape(3, 4) + step}


def variants():
    """TensorLists (DT_VARIANT) across tasks: empty, of numbers, of strings, nested."""
    import numpy as np

    out = []
    with tf.device(PS0):
        feed = tf.compat.v1.placeholder(tf.float32, (4, 3000))
        words = tf.compat.v1.placeholder(tf.string, (3,))
        numbers = tf.raw_ops.TensorListFromTensor(tensor=feed, element_shape=[3000])
        strings = tf.raw_ops.TensorListFromTensor(tensor=words, element_shape=tf.constant([], tf.int32))
        empty = tf.raw_ops.EmptyTensorList(element_shape=[2], max_num_elements=5, element_dtype=tf.float32)
        nested = tf.raw_ops.TensorListPushBack(
            input_handle=tf.raw_ops.EmptyTensorList(element_shape=tf.constant([], tf.int32), max_num_elements=-1, element_dtype=tf.variant), tensor=numbers
        )
        stacked = tf.stack([numbers, numbers])  # a vector of variants
    for device in HOPS[1:]:
        with tf.device(device):
            numbers, strings, empty, nested, stacked = (tf.identity(v) for v in (numbers, strings, empty, nested, stacked))
    with tf.device(WORKER0):
        out.append(tf.raw_ops.TensorListStack(input_handle=numbers, element_shape=[3000], element_dtype=tf.float32))
        out.append(tf.raw_ops.TensorListStack(input_handle=strings, element_shape=tf.constant([], tf.int32), element_dtype=tf.string))
        out.append(tf.raw_ops.TensorListLength(input_handle=empty))
        _, popped = tf.raw_ops.TensorListPopBack(input_handle=nested, element_shape=tf.constant([], tf.int32), element_dtype=tf.variant)
        out.append(tf.raw_ops.TensorListStack(input_handle=popped, element_shape=[3000], element_dtype=tf.float32))
        out.append(tf.raw_ops.TensorListLength(input_handle=stacked[1]))
    return out, lambda step: {feed: np.arange(12000, dtype=np.float32).reshape(4, 3000) + step, words: [b"", b"a" * (step + 1), b"\0\xff" * 5000]}


def resource_handles():
    """A resource handle that travels worker <-> ps still names the same variable."""
    import numpy as np

    with tf.device(PS0):
        variable = tf.compat.v1.get_variable("shared", initializer=np.arange(6, dtype=np.float32), use_resource=True)
        read = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32)
    with tf.device(WORKER0):
        here = tf.identity(variable.handle)
    with tf.device(PS1):
        there = tf.identity(here)
    with tf.device(PS0):
        back = tf.raw_ops.ReadVariableOp(resource=tf.identity(there), dtype=tf.float32)
    return [read, back], None


def variable_kinds():
    import numpy as np

    out = []
    for i, (device, resource) in enumerate(((PS0, False), (PS0, True), (PS1, False), (PS1, True))):
        with tf.device(device):
            table = tf.compat.v1.get_variable(f"table{i}", initializer=np.arange(3000, dtype=np.float32).reshape(300, 10), use_resource=resource)
        with tf.device(WORKER0):
            rows = tf.nn.embedding_lookup(table, [0, 5, 299, 5])
            update = rows * 0.5
        with tf.device(device):
            with tf.control_dependencies([tf.compat.v1.scatter_sub(table, [0, 5, 299, 7], update)]):
                out.append(tf.identity(table))
        out.append(rows)
    return out, None


def empty_and_scalar_mix():
    import numpy as np

    with tf.device(PS0):
        n = tf.compat.v1.placeholder(tf.int32, ())
        rows = tf.range(n)
    with tf.device(WORKER0):
        doubled = rows * 2
    with tf.device(PS1):
        kept = tf.boolean_mask(doubled, tf.greater(doubled, 3))
    with tf.device(WORKER1):
        out = [tf.identity(kept), tf.size(kept), tf.reduce_sum(kept)]
    return out, lambda step: {n: np.int32(step)}


def sparse_and_ragged():
    import numpy as np

    with tf.device(PS0):
        ids = tf.compat.v1.placeholder(tf.int64, (None,))
        unique, index = tf.unique(ids)
        text = tf.strings.as_string(ids)
        split = tf.strings.bytes_split(text)
    with tf.device(WORKER0):
        joined = tf.strings.reduce_join(split.to_tensor(b"-"), axis=1)
        counted = tf.math.unsorted_segment_sum(tf.ones_like(ids), index, tf.size(unique))
    with tf.device(PS1):
        out = [tf.identity(joined), counted + 1, tf.strings.to_hash_bucket_fast(joined, 1000)]
    return out, lambda step: {ids: np.arange(step * 37, dtype=np.int64) % 11 * 1009}


def functions():
    """Functions that each run on one task (a TF1 session cannot run one on several), with arguments and results from others."""
    import numpy as np

    @tf.function
    def scale(x, w):
        return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * w + 1.0), [tf.constant(0), x])[1]

    with tf.device(PS0):
        x = tf.compat.v1.placeholder(tf.float32, (2100,))
        w = tf.compat.v1.get_variable("w", initializer=2.0, use_resource=True)
    with tf.device(WORKER0):
        y = scale(x, w.read_value())
    with tf.device(PS1):
        z = scale(y, tf.constant(3.0))
    return [y, z], lambda step: {x: np.arange(2100, dtype=np.float32) + step}


def names_of_ours():
    """Nodes of a server have the names that star calls give their arguments and results."""
    import numpy as np

    with tf.device(WORKER0):
        x = tf.compat.v1.placeholder(tf.float32, (3,))
        y = x * 2.0
    with tf.device(PS0):
        fed = tf.multiply(y, 3.0, name="starwire_feed_0")
        longer = tf.add(y, 1.0, name="starwire_feed_0_")
        fetched = tf.add(fed, longer, name="starwire_fetch_0")
        last = tf.compat.v1.assign_add(tf.compat.v1.get_variable("starwire_fetch_1", (3,), initializer=tf.zeros_initializer()), fetched)
    with tf.device(WORKER0):
        return [fed + 1.0, fetched - 1.0, last * 2.0], lambda step: {x: np.arange(3, dtype=np.float32) + step}


CASES = {
    "many_small": many_small,
    "fetch_everywhere": fetch_everywhere,
    "cond_small_v1": conditional(4),
    "cond_small_v2": conditional(4),
    "cond_large_v1": conditional(5000),
    "cond_large_v2": conditional(5000),
    "dead_branches": dead_branches,
    "while_v1": loop_across_tasks,
    "while_v2": loop_across_tasks,
    "nested_loops_v1": nested_loops,
    "nested_loops_v2": nested_loops,
    "gradient_of_loop_v1": gradient_of_loop,
    "gradient_of_loop_v2": gradient_of_loop,
    "variants": variants,
    "resource_handles": resource_handles,
    "variable_kinds": variable_kinds,
    "empty_and_scalar_mix": empty_and_scalar_mix,
    "sparse_and_ragged": sparse_and_ragged,
    "functions": functions,
    "names_of_ours": names_of_ours,
}


def error_bad_gather():
    with tf.device(PS0):
        table = tf.compat.v1.placeholder_with_default(tf.zeros([4, 2]), (4, 2))
        rows = tf.gather(table, [1, 99])
    with tf.device(WORKER0):
        return tf.identity(rows)


def error_uninitialised(resource):
    def build():
        with tf.device(PS1):
            variable = tf.compat.v1.get_variable("never", (3,), use_resource=resource)
        with tf.device(WORKER0):
            return variable + 1.0

    return build


def error_assert():
    with tf.device(PS0):
        value = tf.compat.v1.placeholder_with_default(tf.constant([3, 4]), (2,))
        with tf.control_dependencies([tf.raw_ops.Assert(condition=tf.reduce_all(value > 100), data=["ein Satz über Zahlen", value])]):
            value = tf.identity(value)
    with tf.device(WORKER0):
        return value + 1


def error_out_of_range():
    with tf.device(PS0):
        item = tf.compat.v1.data.make_one_shot_iterator(tf.data.Dataset.range(0)).get_next()
    with tf.device(WORKER0):
        return item + 1


def error_not_found():
    with tf.device(PS1):
        content = tf.io.read_file(tf.compat.v1.placeholder_with_default("/nonexistent/file", ()))
    with tf.device(WORKER0):
        return tf.strings.length(content)


def error_check_numerics():
    with tf.device(PS0):
        bad = tf.debugging.check_numerics(tf.math.log(tf.compat.v1.placeholder_with_default(-1.0, ())), "as told")
    with tf.device(WORKER0):
        return bad + 1.0


def error_on_worker():
    with tf.device(PS0):
        value = tf.compat.v1.placeholder_with_default(tf.constant([1, 2, 3]), (3,))
    with tf.device(WORKER1):
        return tf.reshape(tf.identity(value), tf.compat.v1.placeholder_with_default([7], (1,)))


def error_divide():
    with tf.device(PS1):
        value = tf.compat.v1.placeholder_with_default(0, ())
        out = 7 // value
    with tf.device(WORKER0):
        return out + 1


def error_no_kernel():
    """Fails when the graph is registered or placed, not when it runs."""
    with tf.device(PS0):
        value = tf.raw_ops.Qr(input=tf.cast(tf.compat.v1.placeholder_with_default(tf.eye(2), (2, 2)), tf.half))
    with tf.device(WORKER0):
        return value.q + 0


def error_long_message():
    with tf.device(PS0):
        value = tf.compat.v1.placeholder_with_default(tf.constant(["x" * 3000] * 20), (20,))
        with tf.control_dependencies([tf.raw_ops.Assert(condition=tf.reduce_all(tf.equal(value, "y")), data=[value], summarize=20)]):
            value = tf.identity(value)
    with tf.device(WORKER0):
        return tf.strings.length(value)


ERRORS = {  # the graph, the error's type, and a text that its message must contain
    "gather": (error_bad_gather, "InvalidArgumentError", "indices[1] = 99 is not in [0, 4)"),
    "uninitialised_ref": (error_uninitialised(False), "FailedPreconditionError", "Attempting to use uninitialized value never"),
    "uninitialised_resource": (error_uninitialised(True), "FailedPreconditionError", "never"),
    "assert": (error_assert, "InvalidArgumentError", "assertion failed: [ein Satz über Zahlen]"),
    "out_of_range": (error_out_of_range, "OutOfRangeError", "End of sequence"),
    "not_found": (error_not_found, "NotFoundError", "/nonexistent/file; No such file or directory"),
    "check_numerics": (error_check_numerics, "InvalidArgumentError", "as told : Tensor had NaN values"),
    "on_worker": (error_on_worker, "InvalidArgumentError", "Input to reshape is a tensor with 3 values, but the requested shape has 7"),
    "divide": (error_divide, "InvalidArgumentError", "Integer division by zero"),
    "long_message": (error_long_message, "InvalidArgumentError", "assertion failed: [" + "x" * 1000),
}


def session_config(fuse=b"", optimise=False):
    """Without Grappler, so that every copy of a value remains a transfer. `fuse`: the setting of tensor_fuse."""
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    if not optimise:
        config.graph_options.optimizer_options.opt_level = tf.compat.v1.OptimizerOptions.L0
    config.operation_timeout_in_ms = 60000
    config.MergeFromString(fuse)
    return config


def session(target):
    return tf.compat.v1.Session(target, config=session_config())


@contextlib.contextmanager
def control_flow_of(name):
    """In the block, control flow is v2 if the name ends with it, else v1."""
    switch = {True: tf.compat.v1.enable_control_flow_v2, False: tf.compat.v1.disable_control_flow_v2}
    before = tf.compat.v1.control_flow_v2_enabled()
    switch[name.endswith("_v2")]()
    try:
        yield
    finally:
        switch[bool(before)]()


def freeze(cases, name, steps=3, container=""):
    """Builds the graph of a case, which takes longer than to run it. Returns it and its feeds in bytes, for thaw()."""
    import numpy as np

    with control_flow_of(name), tf.Graph().as_default() as graph, graph.container(container):
        tf.compat.v1.set_random_seed(7)
        fetches, feed_of_step = cases[name]()
        initializers = [tf.compat.v1.global_variables_initializer().name, tf.compat.v1.tables_initializer().name]
        names = tf.nest.map_structure(lambda fetch: graph.as_graph_element(fetch).name, fetches)
        feeds = []
        for step in range(steps):
            arrays = {feed: np.asarray(value, feed.dtype.as_numpy_dtype) for feed, value in (feed_of_step(step) if feed_of_step else {}).items()}
            # TensorFlow's own types cannot be pickled everywhere.
            feeds.append({feed.name: array if feed.dtype == tf.string else (array.shape, array.tobytes()) for feed, array in arrays.items()})
        return pickle.dumps((graph.as_graph_def().SerializeToString(), initializers, names, feeds))


@contextlib.contextmanager
def thaw(frozen, device_of=None):
    """In the block, the graph is the default. Yields initializers, fetches, and the feeds of each step. `device_of`: gives a node another device."""
    definition, initializers, fetches, feeds = pickle.loads(frozen)
    definition = tf.compat.v1.GraphDef.FromString(definition)
    for nodes in (definition.node, *(function.node_def for function in definition.library.function)) if device_of else ():
        for node in nodes:
            node.device = device_of(node.device)
    with tf.Graph().as_default() as graph:
        tf.compat.v1.import_graph_def(definition, name="")
        yield initializers, fetches, [{name: fed_value(graph.get_tensor_by_name(name), value) for name, value in step.items()} for step in feeds]


def fed_value(feed, value):
    import numpy as np

    return np.frombuffer(value[1], feed.dtype.as_numpy_dtype).reshape(value[0]) if isinstance(value, tuple) else value


def freeze_case(target, name):
    return freeze(CASES, name)


def run_case(target, frozen):
    """The fetches of a frozen case in each step."""
    with thaw(frozen) as (initializers, fetches, feeds), session(target) as sess:
        sess.run(initializers)
        return [[digest(v) for v in sess.run(tf.nest.flatten(fetches), feed)] for feed in feeds]


def run_error(target, name):
    """Returns the error; the session must still work afterwards."""
    with tf.Graph().as_default(), session(target) as sess:
        with tf.device(PS0):
            fine = tf.compat.v1.placeholder_with_default(1.0, ())
        with tf.device(WORKER0):
            fine = fine + 1.0
        fetch = ERRORS[name][0]()
        raised = []
        for _ in range(2):
            try:
                sess.run(fetch)
            except tf.errors.OpError as error:
                raised.append((type(error).__name__, error.error_code, error.message))
            else:
                raised.append(("nothing", 0, ""))
            assert sess.run(fine) == 2.0
        return raised
