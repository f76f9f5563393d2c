"""A ClusterCoordinator whose workers run several steps at a time.

TensorFlow has one thread in the chief for each worker, which waits for a step before it sends the next one, so that a worker idles while the chief
prepares a step, and the chief while the worker computes. What overlapping means for training is in docs/pipeline.md.
"""

import contextlib
import functools
import logging
import threading

from starwire import _pipeline, _schedule

_ATTRIBUTE = "_starwire_pipeline"
# What this file uses of TensorFlow's classes, which are not public: the same from 2.13 to 2.21.
_OF_WORKER = (
    "_cluster", "_maybe_delay", "_on_closure_failure", "_on_resource_closure_failure", "_process_closure", "_process_resource_closure", "_schedule_resource",
    "_should_worker_thread_run", "executor", "failure_handler", "stop", "worker_index",
)
_OF_QUEUE = ("clear_tag_unlocked", "get", "put_back")
_lock = threading.Lock()


def coordinator(strategy, *, pipeline=1):
    """Returns the ``ClusterCoordinator`` of a ``ParameterServerStrategy``; its workers run up to ``1 + pipeline`` scheduled functions at a time.

    It is the object that ``tf.distribute.coordinator.ClusterCoordinator(strategy)`` and the ``Model.fit`` of Keras 2 use, too. With 0, or in a release of
    TensorFlow whose coordinator this module does not know (it logs that), it runs one at a time, as always in TensorFlow.

    Args:
      strategy: a ``tf.distribute.ParameterServerStrategy``.
      pipeline: the number of functions that a worker may still be running when it begins the next one (docs/pipeline.md).

    Raises:
      ValueError: ``pipeline`` is no number from 0 to 16, or the coordinator already has another one.
    """
    import tensorflow as tf

    depth = _pipeline.checked(pipeline, "coordinator")
    made = tf.distribute.coordinator.ClusterCoordinator(strategy)
    apply(made, depth)
    return made


def apply(made, depth):
    """Gives a ``ClusterCoordinator`` the threads and the scheduler, once."""
    with _lock:
        before = getattr(made, _ATTRIBUTE, None)
        if before == depth:
            return
        if before is not None:
            raise ValueError(f"the coordinator of this strategy has pipeline={before} already; it cannot be changed to {depth}")
        setattr(made, _ATTRIBUTE, depth)
        try:
            from tensorflow.python.distribute.coordinator import cluster_coordinator

            # A subclass may schedule something else.
            if type(made).schedule is cluster_coordinator.ClusterCoordinator.schedule:
                made.schedule = _schedule.Scheduler(made)
        except (AttributeError, ImportError):
            pass  # a TensorFlow that this does not know: it looks for each trace
        if depth > 0:
            _start(made, depth)


def _start(made, depth):
    workers = getattr(getattr(made, "_cluster", None), "workers", ())
    unknown = _unknown(workers)
    if unknown:
        logging.getLogger("starwire").warning("starwire.coordinator: this TensorFlow's coordinator has no %s: its workers run one function at a time", unknown)
        return
    cluster = made._cluster
    # Of failures that are ignored because they may pass: each thread of a worker notices the same one.
    for name in ("_transient_ps_failures_threshold", "_transient_timeouts_threshold"):
        if getattr(cluster, name, 0) > 0:
            setattr(cluster, name, getattr(cluster, name) * (1 + depth))
    gates = {worker.worker_index: _Gate(worker) for worker in workers}
    clear = cluster.closure_queue.clear_tag_unlocked

    def clear_tag(index):
        clear(index)
        gates[index].cleared()

    cluster.closure_queue.clear_tag_unlocked = clear_tag
    for worker in workers:
        gate = gates[worker.worker_index]
        for number in range(depth):
            name = f"starwire-coordinator-{worker.worker_index}-{number + 1}"
            threading.Thread(target=_process_queue, args=(_Lane(worker), gate), name=name, daemon=True).start()


def _unknown(workers):
    """Returns the first name of TensorFlow's that is missing."""
    if not workers:
        return "ClusterCoordinator._cluster.workers"
    for worker in workers:
        # The other handler, of TF_PSS_ENABLE_COORDINATION_SERVICE, takes a second failure for an error once the worker is back.
        if type(getattr(worker, "failure_handler", None)).__name__ != "WorkerPreemptionHandler":
            return "WorkerPreemptionHandler"
        missing = [name for name in _OF_WORKER if not hasattr(worker, name)]
        if missing:
            return f"Worker.{missing[0]}"
        queue = getattr(worker._cluster, "closure_queue", None)
        missing = [name for name in _OF_QUEUE if not hasattr(queue, name)]
        if missing:
            return f"Cluster.closure_queue.{missing[0]}"
    return None


class _Lane:
    """A worker as one more thread sees it: everything is the worker's, but for the executor, on which calls of several threads would wait for each other."""

    def __init__(self, worker):
        from tensorflow.python.eager import executor

        self.__dict__["_worker"] = worker
        self.__dict__["executor"] = executor.new_executor(enable_async=False)

    def __getattr__(self, name):
        return getattr(self._worker, name)

    def __setattr__(self, name, value):
        setattr(self._worker, name, value)


def _process_queue(lane, gate):
    """What TensorFlow's thread of the worker does, but for the per-worker resources, which stay with that thread."""
    queue = lane._cluster.closure_queue
    process = type(lane._worker)._process_closure
    lane._maybe_delay()
    while gate.wait():
        closure = queue.get()
        if closure is None:
            return
        if not lane._should_worker_thread_run:
            closure.mark_cancelled()
            return
        if gate.is_open():
            gate.process(functools.partial(process, lane), closure)
        else:
            queue.put_back(closure)
        # The coordinator must be able to end while this thread waits for the next closure, as in TensorFlow's loop.
        del closure


class _Gate:
    """Closed while one of the worker's threads handles the worker's failure, or a per-worker resource is being made: a function that began then would be
    given resources that are lost, and fail."""

    def __init__(self, worker):
        self._worker = worker
        self._changed = threading.Condition()
        self._resources = 0  # closures that make per-worker resources, queued or running
        self._makes = False  # one of these is running
        self._failures = 0  # threads that wait until the worker has been recovered
        self.aborts, self.error = 0, None  # how often the resources were lost, and why at last
        self._thread = threading.local()
        # TensorFlow's methods, as they were; those below call them.
        self._fail, self._fail_resource = worker._on_closure_failure, worker._on_resource_closure_failure
        self._process, self._process_resource = worker._process_closure, worker._process_resource_closure
        self._schedule_resource, self._stop = worker._schedule_resource, worker.stop
        worker._on_closure_failure, worker._on_resource_closure_failure = self.fail, self.fail_resource
        worker._process_closure, worker._process_resource_closure = self.process_on_stock_thread, self.process_resource
        worker._schedule_resource, worker.stop = self.schedule_resource, self.stop
        worker.failure_handler = _Handler(worker.failure_handler, self)

    def is_open(self):
        return self._resources == 0 and self._failures == 0

    def wait(self):
        """Returns when the gate is open (True) or the worker's threads should end (False)."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_open() or not self._worker._should_worker_thread_run)
        return self._worker._should_worker_thread_run

    def stop(self):
        self._stop()
        with self._changed:
            self._changed.notify_all()

    def process(self, process, closure):
        try:
            process(closure)
        finally:
            if getattr(self._thread, "failed", False):
                self._thread.failed = False
                self._change(failures=-1)

    def process_on_stock_thread(self, closure):
        """For TensorFlow's own thread of the worker, which makes the resources and so cannot wait for them."""
        if self._failures == 0:
            self.process(self._process, closure)
            return
        self._worker._cluster.closure_queue.put_back(closure)
        with self._changed:
            self._changed.wait_for(lambda: self._failures == 0 or not self._worker._should_worker_thread_run)

    def fail(self, closure, error):
        if not getattr(self._thread, "failed", False):
            self._thread.failed = True
            self._change(failures=1)
        self._lose(error)
        self._fail(closure, error)

    def schedule_resource(self, closure):
        self._change(resources=1)
        self._schedule_resource(closure)

    def process_resource(self, closure):
        if self._makes:  # it is tried again
            return self._process_resource(closure)
        self._makes = True
        try:
            return self._process_resource(closure)
        finally:
            self._makes = False
            self._change(resources=-1)

    def fail_resource(self, error):
        self._lose(error)
        self._fail_resource(error)

    def cleared(self):
        """Only the one that has failed is left; those behind it are scheduled again after the recovery."""
        with self._changed:
            self._resources = int(self._makes)

    def _lose(self, error):
        with self._changed:
            self.aborts, self.error = self.aborts + 1, error

    def _change(self, resources=0, failures=0):
        with self._changed:
            self._resources = max(0, self._resources + resources)
            self._failures += failures
            self._changed.notify_all()


class _Handler:
    """TensorFlow's handler of failures. A function that takes its worker's resources while another thread gives them up fails as if it had found them lost."""

    def __init__(self, stock, gate):
        self._stock, self._gate = stock, gate

    def __getattr__(self, name):
        return getattr(self._stock, name)

    @contextlib.contextmanager
    def wait_on_failure(self, *arguments, **keywords):
        from tensorflow.python.distribute.coordinator import cluster_coordinator

        before = self._gate.aborts
        with self._stock.wait_on_failure(*arguments, **keywords):
            try:
                yield
            except (AssertionError, TypeError, ValueError) as error:
                if self._gate.aborts == before:
                    raise
                raise cluster_coordinator.ClosureAbortedError(self._gate.error) from error
