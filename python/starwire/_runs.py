"""Changes what sessions of this process do whose configuration asks for it: steps that overlap (_pipeline.py), or that pull ahead (_ahead.py)."""

import atexit
import os
import sys
import threading

from starwire import _ahead, _pipeline

# Device types that do not exist, as in _config.py: sessions find their options there.
PIPELINE = "STARWIRE_PIPELINE"
AHEAD = "STARWIRE_AHEAD"
_ATTRIBUTE = "_starwire_runs"
_lock = threading.Lock()
_applied = False


def apply():
    global _applied
    from tensorflow.python.client import session

    with _lock:
        if _applied:
            return
        _applied = True
    atexit.register(_finish_at_exit, os.getpid())
    base = session.BaseSession
    run, close = base.run, base.close
    make_callable, make_from_options = base.make_callable, base._make_callable_from_options
    setup, partial_run = base.partial_run_setup, base.partial_run

    def changed_run(self, fetches, feed_dict=None, options=None, run_metadata=None):
        runs = _of(self, run)
        if runs is None or _pipeline.is_running():
            return run(self, fetches, feed_dict, options, run_metadata)
        # MonitoredSession always passes both. Without an option nothing is recorded.
        is_step = not (options and options.ByteSize()) and _pipeline.has_operation(fetches)
        if is_step:
            fetches = _pipeline.structure(fetches)
        return runs.run(lambda fetches, feeds: run(self, fetches, feeds, options, run_metadata), fetches, feed_dict, is_step)

    def changed_make_callable(self, fetches, feed_list=None, accept_options=False):
        made, runs = make_callable(self, fetches, feed_list, accept_options), _of(self, run)
        if runs is None:
            return made
        key = _pipeline.Same(made) if not accept_options and _pipeline.has_operation(fetches) else None
        return lambda *feeds, **options: runs.run_unknown(lambda feeds: made(*feeds, **options), feeds, key)

    # These are never steps.
    def changed_make_from_options(self, callable_options):
        made, runs = make_from_options(self, callable_options), _of(self, run)
        if runs is None:
            return made
        return lambda *feeds, **options: runs.run_unknown(lambda feeds: made(*feeds, **options), feeds)

    def changed_setup(self, fetches, feeds=None):
        runs = _of(self, run)
        return setup(self, fetches, feeds) if runs is None else runs.run_unknown(lambda feeds: setup(self, fetches, feeds), feeds)

    def changed_partial_run(self, handle, fetches, feed_dict=None):
        runs = _of(self, run)
        if runs is None:
            return partial_run(self, handle, fetches, feed_dict)
        return runs.run_unknown(lambda feeds: partial_run(self, handle, fetches, feeds), feed_dict)

    def changed_close(self):
        runs = getattr(self, _ATTRIBUTE, None)
        try:
            if runs is not None:
                runs.close()
        finally:
            close(self)

    _replace(base, run=changed_run, make_callable=changed_make_callable, _make_callable_from_options=changed_make_from_options)
    _replace(base, partial_run_setup=changed_setup, partial_run=changed_partial_run, close=changed_close)
    _apply_to_monitored_sessions()


def _replace(kind, **methods):
    for name, method in methods.items():
        method.__doc__ = getattr(kind, name).__doc__
        setattr(kind, name, method)


def _apply_to_monitored_sessions():
    """They drop what the close() of their session raises, and their hooks see the end before that."""
    from tensorflow.python.framework import errors
    from tensorflow.python.training import monitored_session

    base = monitored_session._MonitoredSession
    leave, close = base.__exit__, base.close
    ends = (None, errors.OutOfRangeError, StopIteration)  # with which the hooks hear of the end

    def changed_exit(self, exception_type, exception, traceback):
        try:
            if exception_type in ends:
                _finish(self)
        except BaseException as error:  # as if the body had raised it
            if leave(self, type(error), error, error.__traceback__):
                return True
            raise
        return leave(self, exception_type, exception, traceback)

    def changed_close(self):
        try:
            _finish(self)
        except BaseException as error:
            leave(self, type(error), error, error.__traceback__)
            raise
        close(self)

    _replace(base, __exit__=changed_exit, close=changed_close)


def _finish(monitored):
    """Waits for the steps under way of a MonitoredSession, which recovers from their errors as from those of run()."""

    def finish(context=None):
        runs = getattr(monitored._coordinated_creator.tf_sess, _ATTRIBUTE, None)
        if runs is not None:
            runs.finish()

    session = monitored._tf_sess()
    if monitored._sess is not None and getattr(session, _ATTRIBUTE, None) is not None:
        monitored._sess.run_step_fn(finish, session, None)


def _finish_at_exit(process):
    """What is raised here is printed."""
    left = _pipeline.leave() if os.getpid() == process else 0  # not after a fork, which has no threads
    if left:
        print(f"starwire: the process ends with {left} steps under way, after {_pipeline.PATIENCE} s", file=sys.stderr)


def _of(session, run):
    runs = getattr(session, _ATTRIBUTE, False)
    if runs is False:
        config = getattr(session, "_config", None)
        depth, ahead = (config.device_count.get(name, 0) if config is not None else 0 for name in (PIPELINE, AHEAD))
        # Another thread may be as far.
        runs = session.__dict__.setdefault(_ATTRIBUTE, _Runs(session, run, depth, ahead) if depth > 0 or ahead > 0 else None)
    return runs


class _Runs:
    """The runs of one session."""

    def __init__(self, session, run, depth, ahead):
        self._pipeline = _pipeline.Pipeline(depth) if depth > 0 else None
        self._ahead = _ahead.Ahead(session, run, depth) if ahead > 0 else None

    def run(self, run, fetches, feeds, is_step):
        """`is_step`: they may be a step, and nobody asks for how that went."""
        ahead = self._ahead

        def call(feeds):
            if ahead is None:
                return run(fetches, feeds)
            return ahead.run(lambda fetches: run(fetches, feeds), fetches, feeds, is_step)

        if self._pipeline is None:
            return call(feeds)
        return self._pipeline.run(call, feeds, _pipeline.key_of(fetches) if is_step else None)

    def run_unknown(self, run, feeds, key=None):
        ahead = self._ahead
        call = run if ahead is None else lambda feeds: ahead.run_unknown(lambda: run(feeds))
        return call(feeds) if self._pipeline is None else self._pipeline.run(call, feeds, key)

    def finish(self):
        if self._pipeline is not None:
            self._pipeline.finish()

    def close(self):
        try:
            if self._pipeline is not None:
                self._pipeline.close()
        finally:
            if self._ahead is not None:
                self._ahead.close()
