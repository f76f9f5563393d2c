"""starwire.coordinator(pipeline=N): a worker runs up to 1 + N functions at a time; counts stay exact, also when workers die, and failures are TensorFlow's."""

import contextlib
import gc
import logging
import threading

import pytest

from cluster import RemoteError, state, tf
from steps import tensorflow_minor
from tf2_job import goes_on, replace_worker, schedule_rounds, schedule_until, start, start_chief, start_servers, train_keras_like, train_scheduled, variable
from waiting import wait_until

pytestmark = [pytest.mark.ours, pytest.mark.tensorflow2]


# In the chief's process. ----------------------------------------------------------------------------------------------


def pipelined(depth):
    """Returns the names of the threads that it adds."""
    import starwire

    before = set(threading.enumerate())
    made = starwire.coordinator(state["strategy"], pipeline=depth)
    assert made is state["coordinator"] is starwire.coordinator(state["strategy"], pipeline=depth)
    return sorted(thread.name for thread in set(threading.enumerate()) - before)


def most_at_once(expected, functions):
    """Schedules functions that wait for a token each; gives them tokens when `expected` of them run. Returns the most that ran at once, and the results."""
    running, most = variable(0, dtype=tf.int64, where=0), variable(0, dtype=tf.int64, where=0)
    with state["strategy"].scope(), tf.device("/job:ps/replica:0/task:1"):
        tokens = tf.queue.FIFOQueue(functions, tf.int64, ())

    @tf.function
    def step(number):
        now = running.assign_add(1)
        with tf.control_dependencies([most.assign(tf.maximum(most, now))]):
            token = tokens.dequeue()
        with tf.control_dependencies([token]):
            running.assign_sub(1)
        return number

    results = [state["coordinator"].schedule(step, args=(tf.constant(number, tf.int64),)) for number in range(functions)]
    wait_until(lambda: int(running.numpy()) >= expected, 60, "functions that run")
    for number in range(functions):
        tokens.enqueue(tf.constant(number, tf.int64))
    state["coordinator"].join()
    return int(most.numpy()), [int(result.fetch()) for result in results]


def fail_among_others(functions):
    """Returns the message of a function's failure, and what the coordinator counts after it."""
    count = variable(0, dtype=tf.int64)

    @tf.function
    def step(number):
        tf.debugging.assert_none_equal(number, tf.constant(7, tf.int64), message="told so")
        count.assign_add(1)

    try:
        for number in range(functions):
            state["coordinator"].schedule(step, args=(tf.constant(number, tf.int64),))
        state["coordinator"].join()
        message = None
    except tf.errors.InvalidArgumentError as error:
        message = error.message
    count.assign(0)
    for number in range(8, 8 + functions):
        state["coordinator"].schedule(step, args=(tf.constant(number, tf.int64),))
    state["coordinator"].join()
    return message, int(count.numpy())


def first_steps_beside_others(functions):
    """A function runs all the time, while others run for the first time. Returns what it added to each variable, and the number of steps."""
    variables = [variable(0, dtype=tf.int64, where=server) for server in range(2) for _ in range(6)]

    def make(number):
        def add():
            for one in variables:
                one.assign_add(1)
            return tf.constant(number)

        return tf.function(add, autograph=False)

    made = [make(number) for number in range(functions)]
    order = [number for other in range(1, functions) for number in (0, 0, 0, 0, other)]
    results = [state["coordinator"].schedule(made[number]) for number in order]
    state["coordinator"].join()
    assert [int(result.fetch()) for result in results] == order
    return {int(one.numpy()) for one in variables}, len(order)


def batches_until(stop):
    """As schedule_until, with a dataset on each worker, which is made again on a worker that comes back."""
    count = variable(0, dtype=tf.int64)
    iterator = iter(state["coordinator"].create_per_worker_dataset(lambda: tf.data.Dataset.range(1 << 40)))

    @tf.function
    def step(iterator):
        batch = next(iterator)
        with tf.control_dependencies([batch]):
            return count.assign_add(1)

    return schedule_rounds(stop, step, count, args=(iterator,))


def threads_end():
    """Drops the coordinator, which ends as TensorFlow's does. Returns the names of the threads of ours that are left."""
    iterator = iter(state["coordinator"].create_per_worker_dataset(lambda: tf.data.Dataset.range(10)))
    state["coordinator"].schedule(tf.function(lambda iterator: next(iterator)), args=(iterator,))
    state["coordinator"].join()
    del iterator
    state.clear()
    gc.collect()
    ours = lambda: [thread.name for thread in threading.enumerate() if thread.name.startswith("starwire-coordinator")]  # noqa: E731
    wait_until(lambda: not ours(), 30, "the threads' end")
    return ours()


def another_release(name):
    """A coordinator without one of the names that we use. Returns the warning and the threads that were added."""
    worker = state["coordinator"]._cluster.workers[0]
    method = getattr(type(worker), name)
    delattr(type(worker), name)
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("starwire").addHandler(handler)
    try:
        added = pipelined(1)
    finally:
        setattr(type(worker), name, method)
    return warnings, added


class Queue:
    """Of closures, which are functions here."""

    def __init__(self):
        self.closures, self.put_back_too, self.ended = [], [], False
        self.changed = threading.Condition()

    def put(self, closure):
        with self.changed:
            self.closures.append(closure)
            self.changed.notify_all()

    def get(self):
        with self.changed:
            self.changed.wait_for(lambda: self.closures or self.ended)
            return None if self.ended else self.closures.pop(0)

    def put_back(self, closure):
        self.put_back_too.append(closure)
        self.put(closure)

    def end(self):
        with self.changed:
            self.ended = True
            self.changed.notify_all()


class Handler:
    """Of failures: keeps them."""

    def __init__(self):
        self.caught = []

    @contextlib.contextmanager
    def wait_on_failure(self):
        try:
            yield
        except Exception as error:
            self.caught.append(error)


class Worker:
    """What TensorFlow's has, without TensorFlow."""

    def __init__(self):
        self.failure_handler = Handler()
        self._cluster = type("Cluster", (), {"closure_queue": Queue()})()
        self._should_worker_thread_run = True
        self.failures = []

    def _maybe_delay(self):
        pass

    def _process_closure(self, closure):
        closure()

    def _process_resource_closure(self, closure):
        closure()

    def _schedule_resource(self, closure):
        pass

    def _on_closure_failure(self, closure, error):
        self.failures.append(error)

    def _on_resource_closure_failure(self, error):
        self.failures.append(error)

    def stop(self):
        self._should_worker_thread_run = False


def scheduled_by():
    """Whether TensorFlow's own coordinator, a subclass, and a subclass with a method `schedule` of its own schedule in starwire's way."""
    import types

    from starwire import _coordinator

    stock = tf.distribute.coordinator.ClusterCoordinator

    class Same(stock):
        pass

    class Other(stock):
        def schedule(self, fn, args=None, kwargs=None):
            return super().schedule(fn, args, kwargs)

    found = []
    for kind in (stock, Same, Other):
        made = object.__new__(kind)
        made._cluster = types.SimpleNamespace(closure_queue=types.SimpleNamespace(put=print))
        _coordinator.apply(made, 0)
        found.append("schedule" in vars(made))
    return found


def gates():
    """Nothing begins while a resource is being made, or while another thread waits for the worker's recovery; not even on TensorFlow's thread."""
    from starwire import _coordinator

    worker = Worker()
    queue, gate, done = worker._cluster.closure_queue, _coordinator._Gate(worker), []
    lane = threading.Thread(target=_coordinator._process_queue, args=(_coordinator._Lane(worker), gate))
    lane.start()
    queue.put(lambda: done.append("first"))
    wait_until(lambda: done == ["first"], 30, "the first function")

    worker._schedule_resource(None)
    queue.put(lambda: done.append("second"))
    wait_until(lambda: len(queue.put_back_too) == 1, 30, "a function that is put back")
    assert done == ["first"] and not gate.is_open()
    # It fails, is tried again within, and succeeds; the one behind it is lost.
    worker._schedule_resource(None)
    again = lambda: worker._process_resource_closure(lambda: done.append("resource"))  # noqa: E731
    worker._process_resource_closure(lambda: (worker._on_resource_closure_failure("lost"), gate.cleared(), again()))
    wait_until(lambda: done == ["first", "resource", "second"], 30, "the second function")

    failing, recovered = threading.Event(), threading.Event()

    def fails():
        worker._on_closure_failure(None, "gone")
        worker._on_closure_failure(None, "gone again")
        failing.set()
        recovered.wait(30)

    queue.put(fails)
    assert failing.wait(30) and not gate.is_open()
    first = threading.Thread(target=worker._process_closure, args=(lambda: done.append("too early"),))
    first.start()
    wait_until(lambda: len(queue.put_back_too) == 2, 30, "a function that is put back")
    assert queue.get() is queue.put_back_too[1] and first.is_alive() and "too early" not in done
    recovered.set()
    first.join(30)
    wait_until(gate.is_open, 30, "the recovery")
    worker._process_closure(lambda: done.append("third"))

    # What goes wrong because another thread gives up the resources is a failure of the worker.
    handler, gone = worker.failure_handler, RuntimeError("gone")
    for loses in (False, True):
        with handler.wait_on_failure():
            if loses:
                worker._on_closure_failure(None, gone)
            raise AssertionError("no value")
    usual, converted = handler.caught
    assert type(usual) is AssertionError and type(converted).__name__ == "ClosureAbortedError" and converted.original_exception is gone
    gate.process(lambda _: None, None)

    # The end, while the gate is closed.
    worker._schedule_resource(None)
    worker.stop()
    queue.end()
    lane.join(30)
    assert not lane.is_alive() and not first.is_alive()
    return done, [str(error) for error in worker.failures]


def traces():
    """Functions that are scheduled again: whose arguments, variables, captures, devices or scopes change. Returns what they return, and how often they were traced.
    With and without the scheduler, the same functions and the same arguments."""
    coordinator, strategy = state["coordinator"], state["strategy"]
    here = variable(1.0)
    captured, log = {"scale": tf.constant(2.0)}, []

    @tf.function
    def several(x, y=None):
        log.append("several")
        return x * tf.cast(here, x.dtype) if y is None else x * y

    @tf.function(reduce_retracing=True)
    def relaxed(x):
        log.append(f"relaxed {x.shape}")
        return tf.reduce_sum(x)

    @tf.function
    def captures():
        log.append("captures")
        return captured["scale"] * 10.0

    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def signed(x):
        log.append("signed")
        return tf.rank(x)

    @tf.function
    def makes(x):
        if not hasattr(makes, "v"):
            makes.v = tf.Variable(5.0)
        log.append("makes")
        return makes.v.assign_add(x)

    @tf.function
    def number(x):
        log.append(f"number {x}")
        return tf.constant(x)

    dataset = lambda: tf.data.Dataset.range(100)  # noqa: E731
    iterators = [iter(coordinator.create_per_worker_dataset(dataset)) for _ in range(2)]

    @tf.function
    def takes(iterator, offset):
        log.append("takes")
        return next(iterator) + offset

    @tf.function
    def either(x):
        log.append("either")
        return x + 1 if tf.is_tensor(x) else next(x)

    options = {"rate": 2.0}

    def rates(x, options=options):
        log.append("rates")
        return x * options["rate"]

    rated = tf.function(rates)
    out = []

    def schedule(function, *args, **kwargs):
        result = coordinator.schedule(function, args=args, kwargs=kwargs)
        coordinator.join()
        out.append(tf.nest.map_structure(lambda one: one.tolist() if hasattr(one, "tolist") else one, result.fetch()))

    one = lambda *shape: tf.ones(shape)  # noqa: E731
    for _ in range(2):
        for x in (one(), one(2), one(3), tf.constant(3, tf.int64), one(2), one()):
            schedule(several, x)
        schedule(several, one(), one())
        schedule(several, one(), y=one(2))
        for size in (1, 2, 3, 1):
            schedule(relaxed, one(size))
        schedule(captures)
        schedule(captures)
        captured["scale"] = tf.constant([3.0])  # a trace keeps what it captured
        schedule(captures)
        for shape in ((), (2,), (2, 2)):
            schedule(signed, one(*shape))
        schedule(makes, one())
        schedule(number, 1)
        schedule(number, 2)
        with strategy.scope():
            schedule(several, one(2))
            with tf.device("/job:ps/task:1"):
                schedule(several, one(2))
        with tf.device("/job:ps/task:1"):
            schedule(several, one(2))
            schedule(captures)
        for x in (iterators[0], iterators[0], tf.constant(7, tf.int64), iterators[1]):
            schedule(either, x)
        for _ in range(2):
            schedule(rated, one())
            schedule(rated, one())
            options["rate"] += 1.0  # the default's contents are part of its type
        for iterator in (*iterators, iterators[0]):
            schedule(takes, iterator, tf.constant(100, tf.int64))
    with pytest.raises(ValueError):
        coordinator.schedule(several, args=(coordinator.schedule(captures),))
    with pytest.raises(TypeError):
        coordinator.schedule(lambda: 7)
    coordinator.join()
    concrete = several.get_concrete_function(one(5))
    schedule(concrete, one(5))
    return out, log


def traces_twice():
    """With TensorFlow's scheduler, then with ours; and how many of the latter's were found without TensorFlow."""
    import starwire
    from starwire import _schedule

    stock = traces()
    starwire.coordinator(state["strategy"], pipeline=0)
    found, schedule = [], _schedule.Scheduler._schedule
    _schedule.Scheduler._schedule = lambda self, closure: found.append(1) or schedule(self, closure)
    ours = traces()
    return stock, ours, len(found)


def refusals():
    import starwire

    out = []
    for wrong in (-1, 17, True, "1", 2):
        with pytest.raises(ValueError) as caught:
            starwire.coordinator(state["strategy"], pipeline=wrong)
        out.append(str(caught.value))
    return out


# Tests. ---------------------------------------------------------------------------------------------------------------


def test_functions_of_a_worker_overlap(fresh_cluster):
    """Exactly 1 + N at a time, on one worker; the numbers that an option refuses; the threads end with the coordinator."""
    _, chief = start(fresh_cluster, workers=1)
    assert chief.call(most_at_once, 1, 3, timeout=120) == (1, [0, 1, 2])
    assert chief.call(pipelined, 1) == ["starwire-coordinator-0-1"]
    assert chief.call(most_at_once, 2, 7, timeout=120) == (2, list(range(7)))
    *wrong, other = chief.call(refusals)
    assert all(message.startswith("starwire.coordinator(pipeline=...) must be a number of steps from 0 to 16, not ") for message in wrong)
    assert other == "the coordinator of this strategy has pipeline=1 already; it cannot be changed to 2"
    assert chief.call(threads_end) == []


def test_counts_and_failures(fresh_cluster):
    """Sums of many steps on two workers are exact. A failure is raised once, cancels what is behind it, and the next functions run."""
    _, chief = start(fresh_cluster)
    assert chief.call(pipelined, 2) == [f"starwire-coordinator-{worker}-{number}" for worker in (0, 1) for number in (1, 2)]
    steps = 60
    count, total, texts, _ = chief.call(train_scheduled, steps, timeout=120)
    assert (count, texts) == (sum(range(steps)), [str(number) for number in range(steps)])
    assert total == 7000 * sum(range(steps))
    losses = chief.call(train_keras_like, 40, timeout=120)
    assert len(losses) == 40 and losses[-1] < losses[0]
    message, counted = chief.call(fail_among_others, 30, timeout=120)
    assert "told so" in message and counted == 30
    assert chief.call(train_scheduled, 5, timeout=120)[0] == 10


@pytest.mark.deep(reason="without what it tests, it fails once in some twenty runs; ComponentFunctionsStayWhereTheyAre fails each time")
def test_functions_that_are_new_to_a_worker_run_beside_others(fresh_cluster):
    """TensorFlow moves the worker's list of functions when it grows, and a step that reads it meanwhile has a part that never ends, or fails."""
    _, chief = start(fresh_cluster, workers=1)
    chief.call(pipelined, 15)
    added, steps = chief.call(first_steps_beside_others, 40, timeout=60)
    assert added == {steps} and steps == 195


def test_a_killed_worker_is_replaced(fresh_cluster, tmp_path):
    """Several threads of the chief notice the death; what they were running is run again, after the worker's dataset was made again."""
    with start_servers(fresh_cluster(shape=(("ps", 2), ("worker", 2)), start=False)) as cluster:
        chief = start_chief(cluster)
        chief.call(pipelined, 2)
        replace_worker(cluster, chief, str(tmp_path / "stop"))
        stop = str(tmp_path / "batches")
        chief.begin(batches_until, stop)
        goes_on(chief, stop)
        for _ in range(2):
            cluster["worker", 1].kill()
            goes_on(chief, stop)
            cluster.start("worker", 1)
            goes_on(chief, stop)
        open(stop, "w").close()
        scheduled, counted = chief.result(60)
        assert counted >= scheduled > 0

        # A parameter server cannot be replaced: the error is TensorFlow's. The first one has the counter.
        chief.kill()
        chief = start_chief(cluster)
        chief.call(pipelined, 2)
        chief.begin(schedule_until, str(tmp_path / "lost"))
        goes_on(chief, tmp_path / "lost")
        cluster["ps", 0].kill()
        with pytest.raises(RemoteError) as caught:
            chief.result(60)
        assert caught.value.type in ("UnavailableError", "PSUnavailableError")


def test_a_function_is_found_as_tensorflow_finds_it(fresh_cluster):
    """One worker. The results and the traces are those of TensorFlow's scheduler, and most functions are found without it."""
    _, chief = start(fresh_cluster, workers=1)
    stock, ours, found = chief.call(traces_twice, timeout=240)
    assert ours == stock
    assert found >= 20 or tensorflow_minor() < (2, 14)
    # What a subclass schedules is its own business.
    assert chief.call(scheduled_by) == [True, True, False]


def test_functions_wait_for_resources_and_recoveries(fresh_cluster):
    _, chief = start(fresh_cluster, workers=1)
    assert chief.call(gates, timeout=120) == (["first", "resource", "second", "third"], ["lost", "gone", "gone again", "gone"])


@pytest.mark.parametrize("name", ["_process_closure", "_schedule_resource"])
def test_unknown_coordinators_are_left_alone(fresh_cluster, name):
    _, chief = start(fresh_cluster, workers=1)
    warnings, added = chief.call(another_release, name)
    assert (warnings, added) == ([f"starwire.coordinator: this TensorFlow's coordinator has no Worker.{name}: its workers run one function at a time"], [])
    assert chief.call(train_scheduled, 5, timeout=120)[0] == 10
