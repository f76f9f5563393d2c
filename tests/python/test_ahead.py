"""starwire.config(ahead=1): the same values as one step after the other, from fewer rounds of calls, and no batch is lost."""

import threading

import pytest

from ahead_programs import Program
from cluster import one, tf, worker_call
from metrics import star_calls
from training_job import OPTIMIZERS, batch, regression, setter
from waiting import wait_until

BATCHES = 14


# In the worker process. -----------------------------------------------------------------------------------------------


def dataset(bad=None):
    """Batches of ids and numbers. Reading number `bad` fails."""
    import numpy as np

    batches = [batch(number) for number in range(BATCHES)]
    data = tf.data.Dataset.from_tensor_slices((np.stack([ids for ids, _ in batches]), np.stack([x for _, x in batches]), np.arange(BATCHES)))
    if bad is None:
        return data
    return data.map(lambda ids, x, number: (ids, one().debugging.check_numerics(tf.where(tf.equal(number, bad), x / 0, x), "bad"), number))


def model(kind, optimizer, bad=None):
    """A model that takes its batches from a dataset."""
    iterator = one().data.make_initializable_iterator(dataset(bad))
    ids, x, number = iterator.get_next()
    _, _, loss = regression(kind == "resource", inputs=(tf.reshape(ids % 50, [16]), tf.reshape(x, [16, 8])))
    return iterator, number, loss, OPTIMIZERS[optimizer]().minimize(loss, global_step=one().train.get_or_create_global_step())


def session(target, ahead, depth=0):
    import starwire

    return one().Session(target, config=starwire.config(ahead=ahead, pipeline=depth))


def bits(value):
    import numpy as np

    return np.asarray(value).tobytes()


def until_the_end(sess, fetches, seen):
    """Runs until no batch is left; what is raised on the way is seen as well."""
    while True:
        try:
            seen.append([bits(one) for one in sess.run(fetches)[1:]])
        except tf.errors.OutOfRangeError:
            return seen.append("end")
        except tf.errors.InvalidArgumentError as error:
            seen.append("bad" in error.message)


def steps(sess, iterator, number, loss, train, seen):
    until_the_end(sess, [train, loss, number], seen)


def epochs(sess, iterator, number, loss, train, seen):
    for _ in range(3):
        until_the_end(sess, [train, loss, number], seen)
        sess.run(iterator.initializer)
    for _ in range(3):  # in the middle of one
        seen.append(bits(sess.run([train, loss])[1]))
    sess.run(iterator.initializer)
    until_the_end(sess, [train, loss, number], seen)


def mixed(sess, iterator, number, loss, train, seen):
    """Runs of other kinds take batches, change variables, or read them."""
    kernel = next(v for v in one().global_variables() if "kernel" in v.name)
    halved, doubled = kernel.assign(kernel * 0.5), number * 2
    again = [train, loss, number]
    for _ in range(3):
        seen.append(bits(sess.run(again)[1]))
    sess.run(halved.op)
    for _ in range(2):
        seen.append(bits(sess.run(again)[1]))
    seen.append([bits(one) for one in sess.run([loss, number])])  # an evaluation
    seen.append([bits(one) for one in sess.run([train, loss, number, kernel])[1:]])
    seen.append(bits(sess.run(kernel)))
    seen.append([bits(one) for one in sess.run([loss, doubled], {number: 5})])
    for _ in range(2):
        seen.append(bits(sess.run(again)[1]))
    sess.run(halved.op)
    until_the_end(sess, again, seen)


PROGRAMS = {"steps": steps, "epochs": epochs, "mixed": mixed, "bad batch": steps}


def results(target, ahead, program, kind, optimizer, depth=0):
    """What the runs of a program returned, and the variables at its end."""
    with tf.Graph().as_default():
        with one().device(setter()):
            iterator, number, loss, train = model(kind, optimizer, bad=5 if program == "bad batch" else None)
        before = set(threading.enumerate())
        with session(target, ahead, depth) as sess:
            sess.run([one().global_variables_initializer(), iterator.initializer])
            seen = []
            PROGRAMS[program](sess, iterator, number, loss, train, seen)
            variables = sess.run(one().global_variables())
        for thread in set(threading.enumerate()) - before:
            if thread.name.startswith("starwire"):
                thread.join(20)
                assert not thread.is_alive(), thread
        return seen, {v.name: bits(value) for v, value in zip(one().global_variables(), variables)}


def random_program(target, ahead, seed):
    with tf.Graph().as_default():
        program = Program(seed, setter())
        with session(target, ahead) as sess:
            return program.run(sess, bits)


def monitored(target, ahead, directory, depth=0):
    """A MonitoredTrainingSession with hooks that ask for more in some steps. Returns the losses that a hook saw, and the last checkpoint's count."""
    import starwire

    class Losses(one().train.SessionRunHook):
        def __init__(self, loss):
            self.loss, self.seen = loss, []

        def before_run(self, context):
            return one().train.SessionRunArgs(self.loss)

        def after_run(self, context, values):
            self.seen.append(bits(values.results))

    with tf.Graph().as_default():
        with one().device(setter()):
            iterator = one().data.make_one_shot_iterator(dataset().repeat())
            ids, x, _ = iterator.get_next()
            _, _, loss = regression(True, inputs=(tf.reshape(ids, [16]), tf.reshape(x, [16, 8])))
            train = one().train.AdagradOptimizer(0.1).minimize(loss, global_step=one().train.get_or_create_global_step())
            one().summary.scalar("loss", loss)
        losses = Losses(loss)
        hooks = [losses, one().train.StopAtStepHook(last_step=25), one().train.NanTensorHook(loss)]
        with one().train.MonitoredTrainingSession(
            target, checkpoint_dir=directory, hooks=hooks, save_checkpoint_steps=9, save_summaries_steps=4, save_summaries_secs=None, config=starwire.config(ahead=ahead, pipeline=depth)
        ) as sess:
            while not sess.should_stop():
                sess.run(train)
    return losses.seen, int(tf.train.load_variable(directory, "global_step"))


def sparse_steps(target, ahead, runs):
    """Runs so many steps of a model with a table."""
    with tf.Graph().as_default():
        with one().device(setter()):
            iterator = one().data.make_one_shot_iterator(dataset().repeat())
            ids, x, _ = iterator.get_next()
            _, _, loss = regression(True, inputs=(tf.reshape(ids, [16]), tf.reshape(x, [16, 8])))
            train = one().train.AdagradOptimizer(0.1).minimize(loss)
        with session(target, ahead) as sess:
            sess.run(one().global_variables_initializer())
            for _ in range(runs):
                sess.run(train)


def unable(target, name):
    """Runs a step that cannot pull ahead. Returns the count of its runs, and what is logged."""
    import logging

    lines, handler, logger = [], logging.Handler(), logging.getLogger("tensorflow")
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    try:
        with tf.Graph().as_default():
            with one().device(setter()):
                iterator = one().data.make_one_shot_iterator(dataset().repeat())
                ids, _, number = iterator.get_next()
                ids, fed = tf.reshape(ids, [16]), one().placeholder(tf.float32, [])
                with one().variable_scope("unable", use_resource=True):
                    table = one().get_variable("table", (50, 4), initializer=one().zeros_initializer())
                    count = one().get_variable("count", initializer=tf.constant(0))
                rows = one().nn.embedding_lookup(table, ids)
                if name == "an update in a condition":
                    from tensorflow.python.ops.control_flow_ops import switch

                    with tf.control_dependencies([tf.identity(switch(number, number > -1)[1], name="chosen")]):
                        given = tf.group(table.scatter_add(tf.IndexedSlices(rows, ids), name="unable/update"))
                elif name == "an update in a branch":
                    given = tf.compat.v2.cond(number > -1, lambda: tf.group(table.scatter_add(tf.IndexedSlices(rows, ids))), tf.no_op) if tf.compat.v1.control_flow_v2_enabled() else None
                elif name == "two elements":
                    given = tf.group(tf.reduce_sum(rows), iterator.get_next()[2])
                else:
                    given = {"no rows": number, "fed": tf.reduce_sum(rows) * fed, "no dataset": count.read_value()}[name]
                step = tf.group(count.assign_add(1), given)
            with session(target, 1) as sess:
                sess.run(one().global_variables_initializer())
                for _ in range(6):
                    sess.run(step, {fed: 1.0} if name == "fed" else None)
                return int(sess.run(count)), [line.split("ahead=1: ")[1] for line in lines if "ahead=1: " in line]
    finally:
        logger.removeHandler(handler)


def rows_of_steps(target, ahead, program):
    """Each step adds 1 to a variable and returns what it had read of it, and the number of its batch. Returns what all steps saw."""
    with tf.Graph().as_default():
        with one().device("/job:worker/task:0"):
            iterator = one().data.make_initializable_iterator(tf.data.Dataset.range(40))
            number = iterator.get_next()
        with one().device("/job:ps/task:0"), one().variable_scope("rows", use_resource=True):
            v = one().get_variable("v", initializer=tf.constant(0, tf.int64))
        with one().device("/job:worker/task:0"):
            row = tf.identity(v.read_value())
        case = Case(target, ahead, iterator, number, v, row)
        return program(case)


class Case:
    def __init__(self, target, ahead, iterator, number, v, row):
        self.target, self.ahead, self.iterator, self.number, self.v, self.row = target, ahead, iterator, number, v, row
        self.seen, self.step = [], None

    def begin(self, update=None):
        self.step = [update if update is not None else self.v.assign_add(1, read_value=False), self.row, self.number]
        self.sess = session(self.target, self.ahead)
        self.sess.run([self.v.initializer, self.iterator.initializer])
        return self.sess

    def take(self, count):
        for _ in range(count):
            self.seen.append(tuple(int(one) for one in self.sess.run(self.step)[1:]))


def behind_a_barrier(case):
    """Another session makes the update; the step waits until that is done."""
    with one().device("/job:ps/task:0"):
        asks, done = (tf.queue.FIFOQueue(9, [tf.int32], [()], shared_name=name + str(case.ahead)) for name in ("asks", "done"))
        taken, served, update = asks.dequeue(), done.enqueue(1), case.v.assign_add(1, read_value=False)
        with tf.control_dependencies([case.row]):
            asked = asks.enqueue(1)
        with tf.control_dependencies([asked]):
            step = tf.group(done.dequeue())
    other = one().Session(case.target)
    case.begin(step)

    def serve():
        for _ in range(10):
            other.run(taken)
            other.run(update)
            other.run(served)

    server = threading.Thread(target=serve)
    server.start()
    case.take(10)
    server.join(60)
    return case.seen


def interrupted(case):
    """Steps go on after an interrupt between them and in the middle of one."""
    case.begin()
    case.take(4)
    ahead = getattr(case.sess, "_starwire_runs", None)
    if ahead is not None:
        inner, run = ahead._ahead, ahead._ahead._run_of_base

        def interrupt(*arguments):
            inner._run_of_base = run
            raise KeyboardInterrupt

        for _ in range(2):
            inner._run_of_base = interrupt
            try:
                case.take(1)
            except KeyboardInterrupt:
                pass
            case.take(3)
    else:
        case.take(6)
    # What was read ahead is skipped, but no step sees old rows.
    return [row for row, _ in case.seen][:10]


def by_threads(case):
    case.begin()
    case.take(3)
    threads = [threading.Thread(target=case.take, args=(5,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    numbers = [number for _, number in case.seen]
    case.seen.clear()
    case.take(6)
    # Which thread took which batch is not determined.
    return [row for row, _ in case.seen], sorted(numbers + [number for _, number in case.seen])


def taken_meanwhile(case):
    """Three threads wait for a moment for another batch, while two are ready."""
    from starwire import _ahead

    opened, entered, is_read = threading.Event(), [], _ahead.Ahead._is_read
    slow = lambda number: (number < 4 or opened.wait(30), number)[1]
    with one().device("/job:worker/task:0"):
        case.iterator = one().data.make_initializable_iterator(tf.data.Dataset.range(12).map(lambda number: one().py_func(slow, [number], tf.int64)))
        case.number = tf.reshape(case.iterator.get_next(), [])
    case.begin()
    if case.ahead:
        case.sess._starwire_runs._ahead._most_ready = 3
    case.take(2)

    def after_a_moment(ahead):
        if opened.is_set():
            return is_read(ahead)
        entered.append(1)
        ahead._changed.notify_all()
        ahead._changed.wait_for(lambda: len(entered) >= 3, 30)
        return False

    _ahead.Ahead._is_read = after_a_moment
    try:
        threads = [threading.Thread(target=case.take, args=(1,), daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(case.seen) >= 4, 30, "two of the steps")
        opened.set()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads), case.seen
        case.take(7)
    finally:
        _ahead.Ahead._is_read = is_read
    # Which thread took which batch is not determined.
    return sorted(number for _, number in case.seen)


def taken_at_the_end(case):
    """A thread finds the end of the dataset while another one's step makes the last batch ready."""
    from starwire import _ahead

    begun, looked, go, oldest_read = threading.Event(), threading.Event(), threading.Event(), _ahead.Ahead._oldest_read
    with one().device("/job:worker/task:0"):
        case.iterator = one().data.make_initializable_iterator(tf.data.Dataset.range(4))
        case.number = case.iterator.get_next()
        waits = one().py_func(lambda number: bool(number == 2 and (begun.set(), go.wait(30))[1]), [case.number], tf.bool)
    with tf.control_dependencies([waits]):
        case.begin(tf.group(case.v.assign_add(1, read_value=False)))
    case.take(2)
    threads = [threading.Thread(target=case.take, args=(1,), daemon=True) for _ in range(2)]
    threads[0].start()
    assert begun.wait(30)

    def noticed(ahead):
        read = oldest_read(ahead)
        if read.is_done:
            looked.set()
        return read

    _ahead.Ahead._oldest_read = noticed
    try:
        threads[1].start()
        wait_until(lambda: looked.is_set() or not threads[1].is_alive(), 30, "the other thread")
        go.set()
        for thread in threads:
            thread.join(20)
        case.take(1)
    except tf.errors.OutOfRangeError:
        return sorted(number for _, number in case.seen)
    finally:
        _ahead.Ahead._oldest_read = oldest_read


def initialised_meanwhile(case):
    """The iterator begins again before another thread's run has taken the batch that it was given."""
    from starwire import _ahead_graph

    case.begin()
    case.take(3)
    case.sess.run(case.number)  # so that both know of it
    fetched, given, dropped = _ahead_graph.Redirected.fetched, threading.Event(), threading.Event()

    def late(self, one):
        given.set()
        dropped.wait(0.5)  # it is not, while this run may take it
        return fetched(self, one)

    _ahead_graph.Redirected.fetched = late
    try:
        thread = threading.Thread(target=lambda: case.sess.run(case.number), daemon=True)
        thread.start()
        if case.ahead:
            assert given.wait(30)
        else:
            thread.join(30)
        case.sess.run(case.iterator.initializer)
        dropped.set()
    finally:
        _ahead_graph.Redirected.fetched = fetched
    thread.join(10)
    assert not thread.is_alive()
    case.take(3)
    return case.seen


def fed_in_part(case):
    with one().device("/job:worker/task:0"):
        left, right = tf.split(tf.stack([case.number, case.number]), 2)
        both = left + right * 1000
    case.begin()
    case.take(4)
    case.seen.append(case.sess.run(both, {left: [50]}).tolist())
    case.take(2)
    return case.seen


def of_another_iterator(case):
    other = one().data.make_initializable_iterator(tf.data.Dataset.range(3))
    element, name = other.get_next(), case.iterator.string_handle()
    case.begin()
    for _ in range(3):
        case.take(4)
        case.sess.run([other.initializer, name])
        case.seen.append(int(case.sess.run(element)))
    return case.seen


def behind_the_element(case):
    with one().device("/job:ps/task:0"), tf.control_dependencies([case.number]):
        count = one().get_variable("count", initializer=tf.constant(0), use_resource=True)
        counted = count.assign_add(1, read_value=False)
    case.begin(tf.group(case.v.assign_add(1, read_value=False), counted))
    case.sess.run(count.initializer)
    try:
        case.take(100)
    except tf.errors.OutOfRangeError:
        return case.seen, int(case.sess.run(count))


def in_a_handler(case):
    """A signal handler changes a variable, and initialises the iterator, in the middle of a step."""
    import os
    import signal

    with one().device("/job:worker/task:0"):
        waits = one().py_func(lambda: (os.kill(os.getpid(), signal.SIGUSR1), threading.Event().wait(0.5))[1], [], tf.bool)
    with tf.control_dependencies([waits]):
        slow = case.v.assign_add(1, read_value=False)
    case.begin(tf.group(slow))
    more = case.v.assign_add(100, read_value=False)
    old = signal.signal(signal.SIGUSR1, lambda *_: case.sess.run([more, case.iterator.initializer]))
    try:
        case.take(4)
    finally:
        signal.signal(signal.SIGUSR1, old)
    return len(case.seen), int(case.sess.run(case.v))


def of_unknown_size(case):
    """The caller knows more of a shape than is true of the last batch."""
    iterator = one().data.make_one_shot_iterator(tf.data.Dataset.range(10).batch(4))
    x = iterator.get_next()
    x.set_shape([4])
    case.number = tf.reduce_sum(x)
    case.begin()
    try:
        case.take(9)
    except tf.errors.OutOfRangeError:
        return case.seen


def wrongly_fed(case):
    case.begin()
    case.take(3)
    for key in ("nope:0", "x y", 3):
        try:
            case.sess.run(case.step, {key: 1})
        except Exception as error:
            case.seen.append(type(error).__name__)
    case.take(2)
    return case.seen


def fed_what_starwire_does_not_know(case):
    from tensorflow.python.client import session

    class Number:
        pass

    session.register_session_run_conversion_functions(Number, lambda key: ([key.tensor], lambda values: values[0]), lambda key, value: [(key.tensor, value)])
    key = Number()
    key.tensor = one().placeholder(tf.int64, [])
    set_to = case.v.assign(key.tensor, read_value=False)
    case.begin()
    case.take(3)
    case.sess.run(set_to, {key: 1000})
    case.take(2)
    return case.seen


def taken_as_optional(case):
    more = case.iterator.get_next_as_optional().has_value()
    case.begin()
    case.take(4)
    case.seen.append((-1, int(case.sess.run(more))))
    case.take(35)
    # It takes an element behind those that were read.
    return [row for row, _ in case.seen], len({number for row, number in case.seen if row >= 0})


def left_by_another_session(case):
    """A session that was closed with an error has left batches on the worker."""
    case.begin()
    case.take(4)
    sizes = []
    if case.ahead:
        ahead = case.sess._starwire_runs._ahead
        stages = [(stage.get_attr("dtypes"), stage.get_attr("shared_name")) for stage in (ahead._rewrite.read, ahead._rewrite.first)]
        with one().device("/job:worker/task:0"):
            sizes = [tf.raw_ops.StageSize(dtypes=types, shared_name=name) for types, name in stages]
        assert sum(case.sess.run(sizes)) > 0
        ahead._is_broken = True
    case.sess.close()
    case.begin()
    case.take(4)
    return case.seen, sum(case.sess.run(sizes))


def closed_while_another_thread_waits(case):
    """As one does whose run waits for a server that is away: only the end of the session ends that."""
    case.begin()
    case.take(3)
    closed, holds, ended = threading.Event(), threading.Event(), []
    if case.ahead:
        changed = case.sess._starwire_runs._ahead._changed

        def hold():
            with changed:
                holds.set()
                ended.append(closed.wait(60))

        thread = threading.Thread(target=hold)
        thread.start()
        holds.wait()
    case.sess.close()
    closed.set()
    if case.ahead:
        thread.join()
        assert ended == [True], "close() waits for the other thread"
    case.begin()
    case.take(3)
    return case.seen


CASES = [
    behind_a_barrier, interrupted, by_threads, taken_meanwhile, taken_at_the_end, initialised_meanwhile, fed_in_part, of_another_iterator, behind_the_element, in_a_handler,
    of_unknown_size, wrongly_fed, fed_what_starwire_does_not_know, taken_as_optional, left_by_another_session,
    closed_while_another_thread_waits,
]


# Tests. ---------------------------------------------------------------------------------------------------------------


LITE = pytest.mark.deep(reason="the worker's queue runs ahead by the same code as over star_server")


@pytest.fixture(scope="module", params=["star_server", pytest.param("star_server_lite", marks=LITE), "grpc++"])
def cluster(request, make_cluster):
    return make_cluster((("ps", 2), ("worker", 1)), protocol=request.param)


@pytest.mark.parametrize("kind", ["resource", "reference"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_same_bits_as_one_after_the_other(cluster, program, kind):
    # Not Adam: what it does in a step that finds no batch depends on the moment.
    optimizer = {"steps": "adagrad", "epochs": "momentum", "mixed": "adagrad", "bad batch": "sgd"}[program]
    plain = worker_call(cluster, results, 0, program, kind, optimizer)
    assert worker_call(cluster, results, 1, program, kind, optimizer) == plain
    assert plain[0].count("end") == {"steps": 1, "epochs": 4, "mixed": 1, "bad batch": 1}[program]
    assert (True in plain[0]) == (program == "bad batch")


MORE = pytest.mark.deep(reason="more random programs of the same kinds")


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=MORE) for seed in range(6, 30))])
def test_random_programs_have_the_same_bits(cluster, seed):
    assert worker_call(cluster, random_program, 1, seed) == worker_call(cluster, random_program, 0, seed)


def test_a_monitored_session_with_its_hooks(cluster, tmp_path):
    plain = worker_call(cluster, monitored, 0, str(tmp_path / "plain"))
    assert worker_call(cluster, monitored, 1, str(tmp_path / "ahead")) == plain
    assert plain[1] == 25 and len(plain[0]) == 25


def test_a_step_is_a_round_of_calls(cluster):
    if cluster.protocol == "grpc++":
        pytest.skip("makes no star calls")
    made = []
    for ahead in (0, 1):
        before = star_calls(cluster)
        worker_call(cluster, sparse_steps, ahead, 200)
        made.append((star_calls(cluster) - before) / 200)
    # Two servers: a pull and a push, or both at once. The counters are a moment late.
    assert made == pytest.approx([4, 2], rel=0.1)


@pytest.mark.parametrize("program", ["epochs", "mixed"])
def test_overlapping_steps_use_each_batch_once(cluster, program):
    seen, variables = worker_call(cluster, results, 1, program, "resource", "sgd", depth=2)
    _, plain = worker_call(cluster, results, 0, program, "resource", "sgd")
    assert variables["global_step:0"] == plain["global_step:0"]


REASONS = {
    "an update in a condition": ["unable/update is in a condition or a loop, and may update a variable or wait for an update"],
    "an update in a branch": ["is in a condition or a loop, and may update a variable or wait for an update"],
    "two elements": ["it takes more than one element"],
    "no rows": ["the worker reads no variable on another task whose row it could know before its step begins"],
    "no dataset": [],
    "fed": [],
}


@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_pull_ahead_says_why_and_runs_as_ever(cluster, name):
    count, reasons = worker_call(cluster, unable, name)
    assert count == 6
    assert len(reasons) == (1 if REASONS[name] else 0) and all(words in reasons[0] for words in REASONS[name]), reasons


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_else_sessions_do(cluster, case):
    plain = worker_call(cluster, rows_of_steps, 0, case, timeout=120)
    assert plain
    assert worker_call(cluster, rows_of_steps, 1, case, timeout=120) == plain


def test_only_one_batch_can_be_ahead():
    import starwire

    with pytest.raises(ValueError, match="must be 0 or 1, not 2"):
        starwire.config(ahead=2)
