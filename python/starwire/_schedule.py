"""Schedules functions on a coordinator without looking for their traces again.

For each function that it schedules, TensorFlow's ClusterCoordinator computes the types of arguments and captures, finds the trace (the
ConcreteFunction) that fits them, and computes the types of its results: most of the time that the chief's Python takes for a small step.
Here the trace is remembered. It is used again only where TensorFlow would certainly find the same one; the rest goes TensorFlow's way.
"""

import contextlib
import copy
import threading
import types
import weakref

_ATTRIBUTE = "_starwire_traces"
_MOST = 8  # traces of a function
# Defaults of arguments that do not change.
_PLAIN = (type(None), bool, int, float, str, bytes)
_CONFIGS = ("_variable_creation_config", "_no_variable_creation_config")


class Scheduler:
    """The method ``schedule`` of a coordinator. Raises AttributeError or ImportError in a release of TensorFlow that it does not know."""

    def __init__(self, coordinator):
        from tensorflow.python.distribute.coordinator import cluster_coordinator, coordinator_context, metric_utils, values
        from tensorflow.python.eager import context
        from tensorflow.python.eager.polymorphic_function import polymorphic_function
        from tensorflow.python.framework import ops
        from tensorflow.python.saved_model import save_context

        self._context, self._graph, self._in_save_context = context.context, ops.get_default_graph, save_context.in_save_context
        self._function, self._tensor, self._per_worker = polymorphic_function.Function, ops.EagerTensor, values.PerWorkerValues
        self._coordinator, self._stock = coordinator, type(coordinator).schedule
        self._queue = coordinator._cluster.closure_queue
        self._put = self._queue.put = _Put(self._queue.put)

        class Closure(cluster_coordinator.Closure):
            """One whose arguments are tensors: there is nothing in them to be selected or checked for a worker."""

            def execute_on(self, worker):
                with ops.device(worker.device_name), context.executor_scope(worker.executor), coordinator_context.with_dispatch_context(worker):
                    with metric_utils.monitored_timer("closure_execution"):
                        values = self._function(*self._args)
                self.maybe_call_with_output_remote_value(lambda result: result._set_values(values))

        self._stock_closure, self._tensors_closure = cluster_coordinator.Closure, Closure

    def __call__(self, fn, args=None, kwargs=None):
        key = self._key(fn, args, kwargs)
        if key is None:  # as before the first trace
            return self._stock(self._coordinator, fn, args, kwargs)
        for trace in getattr(fn, _ATTRIBUTE, ()):
            if trace.matches(self, key):
                return self._schedule(trace.closure(args, self._queue._cancellation_mgr))
        with self._put.watched() as put:
            result = self._stock(self._coordinator, fn, args, kwargs)
        # Not if there is a new trace, by this call or by another thread.
        if type(put.closure) is self._stock_closure and key == self._key(fn, args, kwargs):
            self._remember(fn, args, key, put.closure)
        return result

    def _schedule(self, closure):
        result = closure.build_output_remote_value()
        self._queue.put(closure)
        return result

    def _remember(self, fn, args, key, closure):
        if not any(isinstance(one, self._per_worker) for one in args or ()):
            closure = copy.copy(closure)
            closure.__class__ = self._tensors_closure
        setattr(fn, _ATTRIBUTE, [_Trace(self, key, closure), *getattr(fn, _ATTRIBUTE, ())][:_MOST])

    def _key(self, fn, args, kwargs):
        """All that the choice of a trace depends on, as a tuple whose parts compare by identity or by value; None: not known well enough."""
        if type(fn) is not self._function or kwargs or not isinstance(args or (), tuple):
            return None
        configs = [getattr(fn, name, None) for name in _CONFIGS]  # none up to TensorFlow 2.13
        if configs[0] is None or any(config is not None and config.function_captures is None for config in configs):
            return None
        # TensorFlow looks at the contents of others for each call.
        if not all(isinstance(one, _PLAIN) for one in (getattr(fn, "_default_values", None) or {}).values()):
            return None
        context, stack = self._context(), self._graph()._distribution_strategy_stack
        inside = not stack or (stack[-1].strategy is self._coordinator.strategy and stack[-1].replica_context is None)
        if not inside or not context.executing_eagerly() or self._in_save_context():
            return None
        parts = [_Same(config and config.function_captures.capture_types) for config in configs]
        parts += [_Same(config) for config in configs]
        parts += [bool(fn._created_variables), context.device_name, len(stack), fn.experimental_get_tracing_count()]
        for one in args or ():
            if type(one) is self._tensor and one.dtype.is_numpy_compatible:
                parts += [one.dtype, one._shape_tuple()]
            elif isinstance(one, self._per_worker):
                parts.append(_Same(one))
            else:
                return None
        return tuple(parts)


class _Put:
    """The method ``put`` of the coordinator's queue, which shows a thread the closure that it puts there. It knows nothing of the coordinator, which could
    not end as long as a thread of the queue knows it."""

    def __init__(self, put):
        self._put = put
        self._local = threading.local()

    def __call__(self, closure, tag=None):
        seen = getattr(self._local, "seen", None)
        if seen is not None and tag is None:
            seen.closure = closure
        return self._put(closure, tag=tag)

    @contextlib.contextmanager
    def watched(self):
        seen = self._local.seen = types.SimpleNamespace(closure=None)
        try:
            yield seen
        finally:
            self._local.seen = None


class _Trace:
    def __init__(self, scheduler, key, closure):
        self._scheduler, self._key = weakref.ref(scheduler), key
        # What is of this call alone is replaced in each copy, and not kept.
        self._closure = copy.copy(closure)
        self._closure._args = self._closure._function = None
        self._closure._output_remote_value_ref = None
        self._concrete = closure._concrete_function

    def matches(self, scheduler, key):
        return self._scheduler() is scheduler and self._key == key

    def closure(self, args, cancellation_manager):
        made = copy.copy(self._closure)
        made._args = args or ()
        made._function = cancellation_manager.get_cancelable_function(self._concrete)
        return made


class _Same:
    """Compares by identity, and does not keep alive what it can refer to weakly."""

    def __init__(self, what):
        try:
            self._get = weakref.ref(what)
        except TypeError:
            self._get = lambda: what

    def __eq__(self, other):
        return isinstance(other, _Same) and self._get() is other._get()
