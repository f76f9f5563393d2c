"""Steps of a session that overlap: the next ones begin before the last one has ended.

A step spends much of its time on the network. ``starwire.config(pipeline=1)`` lets ``session.run`` return while its step is still under way,
so that the parameters of the next step arrive, and the gradients of the last one leave, while this one computes. What it means for training
is in docs/pipeline.md.
"""

import collections
import copy
import queue
import threading
import time

# A device type that does not exist, as in _config.py: sessions find their depth there.
MARK = "STARWIRE_PIPELINE"
MOST = 16
# Seconds for which close() waits for the steps of other threads.
PATIENCE = 60
_ATTRIBUTE = "_starwire_pipeline"
_lock = threading.Lock()
_thread = threading.local()
_applied = False


def checked(depth, function="config"):
    if isinstance(depth, bool) or not isinstance(depth, int) or not 0 <= depth <= MOST:
        raise ValueError(f"starwire.{function}(pipeline=...) must be a number of steps from 0 to {MOST}, not {depth!r}")
    return depth


def apply():
    """Gives the sessions of this process whose configuration asks for it a pipeline."""
    global _applied
    from tensorflow.python.client import session

    with _lock:
        if _applied:
            return
        _applied = True
    base = session.BaseSession
    run, make_callable, close = base.run, base.make_callable, base.close

    def pipelined_run(self, fetches, feed_dict=None, options=None, run_metadata=None):
        pipeline = _of(self)
        if pipeline is None or getattr(_thread, "runs", False):  # a callable may call run()
            return run(self, fetches, feed_dict, options, run_metadata)
        # MonitoredSession always passes both. Without an option nothing is recorded.
        is_step = not (options and options.ByteSize()) and _has_operation(fetches)
        return pipeline.run(lambda feeds: run(self, fetches, feeds, options, run_metadata), feed_dict, _key(fetches) if is_step else None)

    def pipelined_make_callable(self, fetches, feed_list=None, accept_options=False):
        made, pipeline = make_callable(self, fetches, feed_list, accept_options), _of(self)
        if pipeline is None:
            return made
        is_step = not accept_options and _has_operation(fetches)
        key = _Same(made) if is_step else None

        def call(*feeds, **options):
            return pipeline.run(lambda feeds: made(*feeds, **options), feeds, key)

        return call

    def pipelined_close(self):
        pipeline = getattr(self, _ATTRIBUTE, None)
        try:
            if pipeline is not None:
                pipeline.close()
        finally:
            close(self)

    for name, method in (("run", pipelined_run), ("make_callable", pipelined_make_callable), ("close", pipelined_close)):
        method.__doc__ = getattr(base, name).__doc__
        setattr(base, name, method)


def _of(session):
    pipeline = getattr(session, _ATTRIBUTE, False)
    if pipeline is False:
        config = getattr(session, "_config", None)
        depth = config.device_count.get(MARK, 0) if config is not None else 0
        pipeline = Pipeline(depth) if depth > 0 else None
        setattr(session, _ATTRIBUTE, pipeline)
    return pipeline


class Pipeline:
    """The steps of one session. Each thread that runs steps has a sequence of its own, in which everything else keeps its place."""

    def __init__(self, depth):
        self._depth = depth
        self._local = threading.local()
        self._lock = threading.Lock()
        self._sequences = []

    def run(self, run, feeds, key):
        """`key`: the same for the runs that are steps of one kind; None: not a step."""
        sequence = getattr(self._local, "sequence", None)
        if sequence is None:
            sequence = self._local.sequence = _Sequence(self._depth)
            with self._lock:
                self._sequences.append(sequence)
        return sequence.run(run, feeds, key if _is_data(feeds) else None)

    def close(self):
        with self._lock:
            sequences, self._sequences = self._sequences, []
        own, error = getattr(self._local, "sequence", None), None
        for sequence in sequences:
            try:
                sequence.close(sequence is own)
            except Exception as one:  # the first is raised when all have ended
                error = error or one
        if error is not None:
            raise error


class _Sequence:
    def __init__(self, depth):
        self._depth = depth
        self._lock = threading.Lock()  # close() comes from any thread
        self._key = None
        self._first = None  # the result of the first step, until one of the next was waited for
        self._steps = collections.deque()
        self._queue = queue.SimpleQueue()
        self._threads = 0

    def run(self, run, feeds, key):
        with self._lock:
            if key is None or key != self._key:
                # Another kind of run sees what all steps before it did, and they see nothing of it.
                self._finish()
                self._key = None
                result = _run(run, feeds)
                self._key, self._first = key, _copied(result)
                return result
            # The caller may change arrays as soon as this returns.
            step = _Step(run, {to: copy.deepcopy(one) for to, one in feeds.items()} if isinstance(feeds, dict) else copy.deepcopy(feeds))
            if self._threads <= self._depth:
                self._threads += 1
                threading.Thread(target=_work, args=(self._queue,), name=f"starwire-pipeline-{self._threads}", daemon=True).start()
            self._queue.put(step)
            self._steps.append(step)
            if len(self._steps) <= self._depth:
                return _copied(self._first)
            self._first = None
            return self._wait()

    def _wait(self):
        """Returns the result of the oldest step under way."""
        step = self._steps[0]
        step.done.wait()
        self._steps.popleft()
        if step.error is not None:
            # The steps behind it have begun: they end before anything else does.
            for other in self._steps:
                other.done.wait()
            self._steps.clear()
            self._key = self._first = None
            raise step.error
        return step.result

    def _finish(self):
        while self._steps:
            self._wait()

    def close(self, is_own):
        """`is_own`: by the thread that runs the steps. Those of another may wait for something that only the end of the session ends."""
        if not self._lock.acquire(blocking=is_own):
            return  # it waits for a step in run()
        try:
            deadline = None if is_own else time.monotonic() + PATIENCE
            while self._steps and self._steps[0].done.wait(None if is_own else max(0, deadline - time.monotonic())):
                self._wait()
        finally:
            self._key = self._first = None
            for _ in range(self._threads):
                self._queue.put(None)
            self._threads = 0
            self._lock.release()


class _Step:
    def __init__(self, run, feeds):
        self.run, self.feeds = run, feeds
        self.done = threading.Event()
        self.result = self.error = None


def _run(run, feeds):
    _thread.runs = True
    try:
        return run(feeds)
    finally:
        _thread.runs = False


def _work(steps):
    while True:
        step = steps.get()
        if step is None:
            return
        try:
            step.result = _run(step.run, step.feeds)
        except BaseException as error:  # raised where its result is waited for
            step.error = error
        step.run = step.feeds = None
        step.done.set()
        del step


def _parts(fetches):
    """The values of a structure of fetches, whose names and order are in _key()."""
    if isinstance(fetches, dict):
        return list(fetches.values())
    return list(fetches) if isinstance(fetches, (list, tuple)) else None


def _copied(result):
    """The caller may change what a run returns: arrays and the structure around them. The handle of a value on a server stays the same one."""
    from tensorflow.python.ops.session_ops import TensorHandle

    parts = _parts(result)
    if parts is None:
        return result if isinstance(result, TensorHandle) else copy.deepcopy(result)
    copies = [_copied(part) for part in parts]
    if isinstance(result, dict):  # its keys may be a session's hooks
        made = copy.copy(result)
        made.update(zip(result, copies))
        return made
    return type(result)(*copies) if hasattr(result, "_fields") else type(result)(copies)


def _has_operation(fetches):
    """Whether it may be a step: what only reads must not return what was there before, and what fills a queue waits there for long."""
    from tensorflow.python.framework import ops

    parts = _parts(fetches)
    if parts is None:
        return isinstance(fetches, ops.Operation) and "Queue" not in fetches.type
    return any(_has_operation(part) for part in parts)


def _key(fetches):
    """Equal for the same fetches in the same structure; it keeps them alive, because it compares their identities."""
    parts = _parts(fetches)
    if parts is None:
        return fetches if isinstance(fetches, str) else _Same(fetches)
    names = tuple(_Same(name) if not isinstance(name, str) else name for name in fetches) if isinstance(fetches, dict) else ()
    return (type(fetches), names, tuple(_key(part) for part in parts))


class _Same:
    """Tensors compare element by element, and have no hash."""

    def __init__(self, what):
        self._what = what

    def __eq__(self, other):
        return isinstance(other, _Same) and self._what is other._what

    def __hash__(self):
        return id(self._what)


def _is_data(feeds):
    """Whether they can be copied. A handle of a value that the server keeps cannot."""
    import numpy as np

    if isinstance(feeds, dict):
        feeds = list(feeds.values())
    if isinstance(feeds, (list, tuple)):
        return all(_is_data(part) for part in feeds)
    return feeds is None or isinstance(feeds, (np.ndarray, np.generic, int, float, complex, bool, str, bytes))
