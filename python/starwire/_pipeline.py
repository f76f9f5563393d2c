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
import weakref

MOST = 16
# Seconds for which close() waits for the steps of other threads, and the end of the process for all steps of all sessions.
PATIENCE = 60
_thread = threading.local()
_pipelines = weakref.WeakSet()


def checked(depth, function="config"):
    if isinstance(depth, bool) or not isinstance(depth, int) or not 0 <= depth <= MOST:
        raise ValueError(f"starwire.{function}(pipeline=...) must be a number of steps from 0 to {MOST}, not {depth!r}")
    return depth


def is_running():
    """Whether this thread is in the middle of a run: a callable may call run()."""
    return getattr(_thread, "runs", False)


def leave():
    """At the end of a program, which makes all of its steps, whether it closes its sessions or not. Returns how many have not ended."""
    error, left, deadline = None, 0, time.monotonic() + PATIENCE
    for pipeline in list(_pipelines):
        try:
            left += pipeline.leave(deadline)
        except Exception as one:
            error = error or one
    if error is not None:
        raise error
    return left


class Pipeline:
    """The steps of one session. Each thread that runs steps has a sequence of its own, in which everything else keeps its place."""

    def __init__(self, depth):
        self._depth = depth
        self._local = threading.local()
        self._lock = threading.RLock()
        self._sequences = []
        _pipelines.add(self)

    def run(self, run, feeds, key):
        """`key`: the same for the runs that are steps of one kind; None: not a step."""
        sequence = getattr(self._local, "sequence", None)
        if sequence is None:
            sequence = self._local.sequence = _Sequence(self._depth)
            with self._lock:
                self._sequences = [one for one in self._sequences if not one.is_over()] + [sequence]
        return sequence.run(run, feeds, key if _is_data(feeds) else None)

    def finish(self):
        """Waits for the steps under way."""
        self._end(_Sequence.finish)

    def leave(self, deadline):
        """As finish(), but no thread comes back for its steps. Returns how many have not ended."""
        self._end(lambda sequence, is_own, _: sequence.finish(False, deadline))
        with self._lock:
            return sum(sequence.under_way() for sequence in self._sequences)

    def close(self):
        try:
            self._end(_Sequence.close)
        finally:
            self._sequences = []

    def _end(self, end):
        with self._lock:
            sequences = list(self._sequences)
        own, error, deadline = getattr(self._local, "sequence", None), None, time.monotonic() + PATIENCE
        for sequence in sequences:
            try:
                end(sequence, sequence is own, deadline)
            except Exception as one:  # the first is raised when all have ended
                error = error or one
        if error is not None:
            raise error


class _Sequence:
    def __init__(self, depth):
        self._depth = depth
        # close() comes from any thread, and from signal handlers of the one that has the lock.
        self._lock = threading.RLock()
        self._is_busy = self._is_closed = False
        self._key = None
        self._first = None  # the result of the first step, until one of the next was waited for
        self._steps = collections.deque()
        self._queue = queue.SimpleQueue()
        self._threads = 0
        self._owner = threading.current_thread()

    def is_over(self):
        """Whether its thread has ended, and all of its steps without an error that is still to be raised. Then its own threads end, too."""
        if self._owner.is_alive() or not self._lock.acquire(blocking=False):
            return False
        try:
            while self._steps and self._steps[0].has_ended and self._steps[0].error is None:
                self._steps.popleft()
            if self._steps:
                return False
            self._stop()
            return True
        finally:
            self._lock.release()

    def run(self, run, feeds, key):
        with self._lock:
            if self._is_busy:
                # A signal handler runs it, in the middle of another run, and leaves that one's steps as they are.
                self._await_all()
                return _run(run, feeds)
            self._is_busy = True
            try:
                return self._run(run, feeds, key)
            finally:
                self._is_busy = False
                if self._is_closed:
                    self._stop()

    def _run(self, run, feeds, key):
        if key is None or key != self._key:
            # Another kind of run sees what all steps before it did, and they see nothing of it.
            self._finish()
            self._key = None
            result = _run(run, feeds)
            self._key, self._first = key, None if key is None else _copied(result)
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
        # More than one if Ctrl-C has ended a wait.
        while len(self._steps) > self._depth:
            result = self._wait()
        return result

    def _wait(self, deadline=None):
        """Returns the result of the oldest step under way, which has ended if there is a deadline."""
        step = self._steps[0]
        step.done.wait()
        self._steps.popleft()
        if step.error is not None:
            # The steps behind it have begun: they end before anything else does.
            while self._steps and self._steps[0].done.wait(_until(deadline)):
                self._steps.popleft()
            self._key = self._first = None
            raise step.error
        return step.result

    def _finish(self):
        while self._steps:
            self._wait()

    def _await_all(self):
        """In a signal handler. It may have interrupted done.wait(), whose lock this thread then has."""
        for step in list(self._steps):
            while not step.has_ended:
                time.sleep(0.01)

    def finish(self, is_own, deadline):
        """`is_own`: by the thread that runs the steps. Those of another may wait for something that only the end of the session ends: they have until
        `deadline`."""
        if not self._lock.acquire(blocking=is_own):
            return  # it waits for a step in run()
        try:
            if self._is_busy:
                self._await_all()
                self._raise_first_error()
                return
            self._is_busy = True
            try:
                deadline = None if is_own else deadline
                while self._steps and self._steps[0].done.wait(_until(deadline)):
                    self._wait(deadline)
            finally:
                self._is_busy = False
        finally:
            self._lock.release()

    def under_way(self):
        return len(self._steps)

    def _raise_first_error(self):
        for step in self._steps:
            if step.error is not None:
                raise step.error

    def close(self, is_own, deadline):
        """As finish(), and ends the threads. A run that is under way, here or in another thread, ends them when it returns."""
        self._is_closed = True
        if not self._lock.acquire(blocking=is_own):
            return
        try:
            self.finish(is_own, deadline)
        finally:
            if not self._is_busy:
                self._stop()
            self._lock.release()

    def _stop(self):
        self._key = self._first = None
        for _ in range(self._threads):
            self._queue.put(None)
        self._threads = 0


def _until(deadline):
    return None if deadline is None else max(0, deadline - time.monotonic())


class _Step:
    def __init__(self, run, feeds):
        self.run, self.feeds = run, feeds
        self.done = threading.Event()
        self.has_ended = False
        self.result = self.error = None


def _run(run, feeds):
    before, _thread.runs = getattr(_thread, "runs", False), True
    try:
        return run(feeds)
    finally:
        _thread.runs = before  # a signal handler may have interrupted another run


def _work(steps):
    while True:
        step = steps.get()
        if step is None:
            return
        try:
            step.result = _run(step.run, step.feeds)
        except BaseException as error:  # raised where its result is waited for
            step.error = error
        step.has_ended = True
        step.done.set()
        # Behind that: they may be the last ones that know the session, whose end waits for its steps.
        step.run = step.feeds = None
        del step


def _parts(fetches):
    """The values of a structure of fetches, whose names and order are in key_of()."""
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


def structure(fetches):
    """The same fetches in lists and dictionaries of their own: the caller may change those as soon as a run returns."""
    parts = _parts(fetches)
    if parts is None:
        return fetches
    own = [structure(part) for part in parts]
    if isinstance(fetches, dict):
        made = copy.copy(fetches)
        made.update(zip(fetches, own))
        return made
    return type(fetches)(*own) if hasattr(fetches, "_fields") else type(fetches)(own)


def has_operation(fetches):
    """Whether it may be a step: what only reads must not return what was there before, and what fills a queue waits there for long."""
    from tensorflow.python.framework import ops

    parts = _parts(fetches)
    if parts is None:
        return isinstance(fetches, ops.Operation) and "Queue" not in fetches.type
    return any(has_operation(part) for part in parts)


def key_of(fetches):
    """Equal for the same fetches in the same structure; it keeps them alive, because it compares their identities."""
    parts = _parts(fetches)
    if parts is None:
        return fetches if isinstance(fetches, str) else Same(fetches)
    names = tuple(Same(name) if not isinstance(name, str) else name for name in fetches) if isinstance(fetches, dict) else ()
    return (type(fetches), names, tuple(key_of(part) for part in parts))


class Same:
    """Tensors compare element by element, and have no hash."""

    def __init__(self, what):
        self._what = what

    def __eq__(self, other):
        return isinstance(other, Same) and self._what is other._what

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
