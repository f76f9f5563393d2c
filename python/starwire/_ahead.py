"""Steps of a session that pull their parameters behind the updates of the step before, for a batch that was read ahead.

A step waits for its input, asks for the rows that its ids name, computes, and sends gradients. ``starwire.config(ahead=1)`` reads the next
batch while a step computes. Its ids travel with the gradients, and its rows come back behind the updates: one round trip per step. What it
means for training is in docs/ahead.md.

Each session has a queue of batches. The oldest were pulled for, and wait on the worker with what was pulled; the others were only read. A run
that takes a batch takes the oldest, whatever it does with it.
"""

import collections
import queue
import threading
import weakref

from starwire import _ahead_graph

# Each rewritten step costs a graph on the worker, each kind of run that is known a few lists here.
_MOST_REWRITES, _MOST_KNOWN = 8, 1000
# Seconds for which a step whose batch is ready waits for the next one.
_MOMENT = 0.02
# By graph: the operations that drop the batches of sessions that were closed when they were broken, or still read. The next session runs them.
_uncleared = weakref.WeakKeyDictionary()


def checked(steps):
    if isinstance(steps, bool) or steps not in (0, 1):
        raise ValueError(f"starwire.config(ahead=...) must be 0 or 1, not {steps!r}")
    return steps


class Ahead:
    """The batches of one session that no step has used yet. `depth`: the steps that overlap. The oldest are ready: they wait on the worker with
    what was pulled for them. The others were only read. Whatever takes a batch takes the oldest one."""

    def __init__(self, session, run, depth):
        self._session, self._run_of_base = weakref.ref(session), run
        self._most_ready = depth + 1
        self._known = {}
        self._rewrites = 0
        self._last = None  # the last run, if that was a step
        self._step = self._rewrite = self._iterator = None  # the step that batches are read for
        self._changed = threading.Condition()
        self._owners = []  # the threads in the middle of a step, or of changing this: a signal handler may interrupt them
        self._ready = 0  # batches
        self._under_way = []  # the threads whose steps make batches ready
        self._takers = []  # the threads that wait for a batch, or whose run takes one: none is dropped meanwhile
        self._reads = collections.deque()
        self._is_stale = False  # variables have changed since
        self._is_broken = False  # a run has failed: nobody knows which batches it has taken
        self._is_closed = False
        self._reader = None

    def run(self, run, fetches, feeds, is_step):
        """`run(fetches)` runs these with the feeds. `is_step`: they may update variables, and nobody asks for how that went."""
        try:
            mapper, known = self._find(fetches, feeds)
        except Exception:  # the run says what is wrong with its arguments, or knows better
            return self.run_unknown(lambda: run(fetches))
        own = threading.get_ident()
        if (not known.takes and not known.iterators) or own in self._owners or self._is_closed:
            try:
                return run(fetches)
            finally:
                if known.changes:
                    self._is_stale = True
                if known.iterators:
                    self._is_broken = True
        self._owners.append(own)
        try:
            with self._changed:
                graph = self._next(known, is_step and not feeds)
            if graph is None:
                return self.run_unknown(lambda: run(fetches))
            wanted = [graph.fetched(one) for one in mapper.unique_fetches()]
            if graph is self._rewrite:
                return mapper.build_results(self._run_step(own, wanted))
            try:
                return mapper.build_results(run(wanted))
            finally:
                self._is_stale = True
        except _DatasetError as error:
            raise error.error from None
        except BaseException:
            self._is_broken = True
            raise
        finally:
            self._owners.remove(own)
            if own in self._under_way:  # it was interrupted before its step began
                self._end_step(own, False)
            if own in self._takers:
                with self._changed:
                    self._takers.remove(own)
                    self._changed.notify_all()

    def run_unknown(self, run):
        """What a callable does is not looked at: it takes an element behind those that were read."""
        try:
            return run()
        finally:
            self._is_stale = True

    def close(self):
        self._is_closed = True
        # A run of another thread may have it until the session is closed: one that waits for a server, say.
        has_lock = self._changed.acquire(timeout=1)
        try:
            reader, self._reader = self._reader, None
            if reader is not None:
                reader.put(None)
            is_idle = has_lock and not self._takers and not self._is_broken and all(read.is_done for read in self._reads)
            rewrite = self._rewrite
        finally:
            if has_lock:
                self._changed.release()
        if rewrite is None:
            return
        try:  # what it holds on the worker
            if is_idle:
                self._run(rewrite.clear)
                return
        except Exception:
            pass  # the server is gone, or the session was closed
        _uncleared.setdefault(rewrite.clear.graph, []).append(rewrite.clear.name)

    def __del__(self):
        if self._reader is not None:
            self._reader.put(None)

    def _run(self, fetches, feeds=None):
        return self._run_of_base(self._session(), fetches, feeds)

    def _find(self, fetches, feeds):
        from tensorflow.python.client import session

        graph = self._session().graph
        with graph.as_default():
            mapper = session._FetchMapper.for_fetch(fetches)
        wanted = [graph.as_graph_element(one) for one in mapper.unique_fetches()]
        fed = _elements(graph, feeds)
        key = (tuple(map(id, wanted)), frozenset(map(id, fed)))
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[key] = _Known(wanted, fed)
        return mapper, known

    def _next(self, known, is_step):
        """The graph to run: the rewritten step, whose batch is ready, another one that takes the oldest batch, or none but the run's own."""
        is_again, self._last = is_step and self._last is known, known
        if is_again and known is not self._step and not self._ready and not self._reads and not self._takers:
            self._begin(known)
        if self._step is None:
            return None
        while self._under_way and (self._is_stale or self._is_broken):
            self._changed.wait()
        if self._is_broken or self._iterator in known.iterators:
            self._forget()
        is_step = known is self._step and is_again
        if not is_step and not (self._ready or self._reads):
            return None
        redirected = None if is_step else self._redirected(known)
        if not is_step and redirected is None:
            return None
        self._takers.append(threading.get_ident())
        if not self._make_ready(self._most_ready if is_step else 1):
            return None  # raises that the dataset has ended, too
        self._ready -= 1
        # Not if there is a surplus, which several threads leave behind, or if the next batch takes long: training may have to make it.
        if is_step and self._ready + len(self._under_way) < self._most_ready and self._is_read():
            self._reads.popleft()
            self._begin_read()
            self._under_way.append(threading.get_ident())
            return self._rewrite
        return redirected or self._redirected(known)

    def _redirected(self, known):
        """The run's graph with the oldest batch, if it can be given that."""
        if known.redirected is None or known.redirected[0] is not self._rewrite:
            made = None
            if known.takes == self._step.takes:
                try:
                    made = _ahead_graph.Redirected(self._session().graph, known.wanted, known.ops, known.fed, self._rewrite)
                except _ahead_graph.Unable:
                    pass  # it takes an element behind those that were read
            known.redirected = (self._rewrite, made)
        return known.redirected[1]

    def _begin(self, known):
        import tensorflow as tf

        if known.is_unable:
            return
        try:
            if self._rewrites == _MOST_REWRITES:
                raise _ahead_graph.Unable(f"the session had {_MOST_REWRITES} other kinds of steps")
            graph, parts = self._session().graph, _ahead_graph.Parts(known.ops)
            rewrite = _ahead_graph.Rewrite(graph, known.wanted, parts)
            redirected = _ahead_graph.Redirected(graph, known.wanted, known.ops, known.fed, rewrite)
        except Exception as reason:
            known.is_unable = True
            what = reason if isinstance(reason, _ahead_graph.Unable) else f"{type(reason).__name__}: {reason}"
            tf.compat.v1.logging.warning(f"starwire: a step runs without ahead=1: {what}")
        else:
            self._clear_others(graph)
            self._rewrites += 1
            self._rewrite, known.redirected = rewrite, (rewrite, redirected)
            self._step, self._iterator = known, _ahead_graph.iterator_of(parts.take)

    def _clear_others(self, graph):
        import tensorflow as tf

        names = _uncleared.pop(graph, [])
        try:
            if names:
                self._run([graph.get_operation_by_name(name) for name in names])
        except tf.errors.OpError:
            pass  # the step says what is wrong

    def _forget(self):
        """Drops all batches."""
        while self._takers or (self._reads and not self._reads[-1].is_done):
            self._changed.wait()
        self._run(self._rewrite.clear)
        self._reads.clear()
        self._ready, self._is_broken = 0, False

    def _make_ready(self, most):
        """Makes a batch ready, or as many as steps overlap. Raises what reading it has raised. False: the dataset has ended."""
        import tensorflow as tf

        rewrite = self._rewrite
        if self._is_stale:
            self._is_stale = False
            for _ in range(self._ready):
                inputs = self._run(rewrite.ready_inputs)
                self._run(rewrite.first, dict(zip(rewrite.first_inputs, inputs)))
        while self._ready == 0 or self._ready + len(self._under_way) < most:
            if self._ready > 0 and not self._is_read() and self._ready > 0:  # another thread may have taken it meanwhile
                return True
            read = self._oldest_read()
            if not read.is_done or (read.error is not None and self._under_way):  # the batches of these come before the error
                self._changed.wait()
                continue
            error = read.error
            self._reads.popleft()
            if isinstance(error, tf.errors.OutOfRangeError):
                return False
            if error is not None:
                raise _DatasetError(error)
            self._run(rewrite.first)
            self._ready += 1
        return True

    def _run_step(self, own, wanted):
        is_made = False
        try:
            values = self._run(wanted + [self._rewrite.next])
            is_made = True
        finally:
            self._end_step(own, is_made)
        return values[:-1]

    def _end_step(self, own, is_made):
        with self._changed:
            self._ready += is_made
            self._is_broken = self._is_broken or not is_made
            self._under_way.remove(own)
            self._changed.notify_all()

    def _oldest_read(self):
        if not self._reads:
            self._begin_read()
        return self._reads[0]

    def _is_read(self):
        """Whether another batch was read. Waits for a moment."""
        if not self._oldest_read().is_done:
            self._changed.wait_for(lambda: not self._reads or self._reads[0].is_done, _MOMENT)
        return bool(self._reads) and self._reads[0].is_done and self._reads[0].error is None

    def _begin_read(self):
        read = _Read(self._rewrite.read)
        self._reads.append(read)
        if self._is_closed:
            read.is_done, read.error = True, RuntimeError("Attempted to use a closed Session.")
            return
        if self._reader is None:
            self._reader = queue.SimpleQueue()
            arguments = (self._reader, self._session, self._run_of_base, self._changed)
            threading.Thread(target=_read_all, args=arguments, name="starwire-ahead", daemon=True).start()
        self._reader.put(read)


class _DatasetError(Exception):
    """What reading a batch has raised. The run that would have taken it raises it, and nothing is broken."""

    def __init__(self, error):
        super().__init__(str(error))
        self.error = error


class _Known:
    """What is known of the runs that fetch and are fed the same."""

    def __init__(self, wanted, fed):
        self.wanted, self.fed = wanted, fed
        self.ops = _ahead_graph.leading_to(wanted, fed)
        self.takes = _ahead_graph.takes(self.ops)
        self.iterators = _ahead_graph.iterators_used(self.ops)
        self.changes = _ahead_graph.changes_variables(self.ops)
        self.is_unable = False
        self.redirected = None  # a rewritten step, and this run with one of its batches, if it can take one


class _Read:
    def __init__(self, fetch):
        self.fetch = fetch
        self.is_done, self.error = False, None


def _read_all(reads, session, run, changed):
    while True:
        read = reads.get()
        if read is None:
            return
        try:
            run(session(), read.fetch)
        except BaseException as error:  # raised where its batch is waited for
            read.error = error
        with changed:
            read.is_done = True
            changed.notify_all()
        del read


def _elements(graph, feeds):
    """The tensors that are fed."""
    import tensorflow as tf

    parts = tf.nest.flatten(list(feeds or ()), expand_composites=True)
    return [graph.as_graph_element(one, allow_operation=False) for one in parts]
