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


def checked(steps):
    if isinstance(steps, bool) or steps not in (0, 1):
        raise ValueError(f"starwire.config(ahead=...) must be 0 or 1, not {steps!r}")
    return steps


class Ahead:
    """The batches of one session that no step has used yet. `depth`: the steps that overlap. The oldest are ready: they wait on the worker with what was pulled for them. The others
    were only read. Whatever takes a batch takes the oldest one."""

    def __init__(self, session, run, depth):
        self._session, self._run_of_base = weakref.ref(session), run
        self._most_ready = depth + 1
        self._known = {}
        self._rewrites = 0
        self._last = None  # the last run, if that was a step
        self._step = self._rewrite = None  # the step that batches are read for
        self._changed = threading.Condition()
        self._ready = self._under_way = 0  # batches; steps, each of which makes a batch ready
        self._reads = collections.deque()
        self._is_stale = False  # variables have changed since
        self._is_broken = False  # a step has failed: nobody knows which batches it has taken
        self._reader = None

    def run(self, run, fetches, feeds, is_step):
        """`run(fetches)` runs these with the feeds. `is_step`: they may update variables, and nobody asks for how that went."""
        mapper, known = self._find(fetches, feeds)
        if not known.takes and not known.uses_iterators:
            try:
                return run(fetches)
            finally:
                self._is_stale = self._is_stale or known.changes
        with self._changed:
            is_again, self._last = is_step and not feeds and self._last is known, known
            if known.uses_iterators:
                self._forget()
            graph = self._next(known, is_again)
        if graph is None:
            return self.run_unknown(lambda: run(fetches))
        wanted = [graph.fetched(one) for one in mapper.unique_fetches()]
        if graph is self._rewrite:
            return mapper.build_results(self._run_step(wanted))
        try:
            return mapper.build_results(run(wanted))
        except BaseException:
            self._is_broken = True
            raise
        finally:
            self._is_stale = True

    def run_unknown(self, run):
        """What a callable does is not looked at: it takes an element behind those that were read."""
        try:
            return run()
        finally:
            self._is_stale = True

    def close(self):
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.put(None)

    __del__ = close

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
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            known = self._known[key] = _Known(wanted, fed)
        return mapper, known

    def _next(self, known, is_again):
        """The graph to run: the rewritten step, whose batch is ready, another one that takes the oldest batch, or none but the run's own."""
        if is_again and known is not self._step and not self._ready and not self._reads and not self._under_way:
            self._begin(known)
        if self._step is None:
            return None
        while self._under_way and (self._is_stale or self._is_broken):
            self._changed.wait()
        if self._is_broken:
            self._forget()
        is_step = known is self._step and is_again
        if not is_step and (not (self._ready or self._reads) or not known.can_take(self._rewrite.cut)):
            return None
        if not self._make_ready(self._most_ready if is_step else 1):
            return None  # raises it, too
        self._ready -= 1
        if is_step and self._read().error is None:
            self._reads.popleft()
            self._begin_read()
            self._under_way += 1
            return self._rewrite
        # The last batch of a dataset, or a run of another kind.
        if known.redirected is None or known.redirected[0] is not self._rewrite:
            known.redirected = (self._rewrite, _ahead_graph.Redirected(self._session().graph, known.ops, known.fed, self._rewrite))
        return known.redirected[1]

    def _begin(self, known):
        import tensorflow as tf

        if known.is_unable:
            return
        try:
            if self._rewrites == _MOST_REWRITES:
                raise _ahead_graph.Unable(f"the session had {_MOST_REWRITES} other kinds of steps")
            self._rewrite = _ahead_graph.Rewrite(self._session().graph, known.wanted, _ahead_graph.Parts(known.ops))
        except _ahead_graph.Unable as reason:
            known.is_unable = True
            tf.compat.v1.logging.warning(f"starwire: a step runs without ahead=1: {reason}")
        else:
            self._rewrites += 1
            self._step = known

    def _forget(self):
        """Drops all batches."""
        while self._under_way or (self._reads and not self._reads[-1].is_done):
            self._changed.wait()
        if self._rewrite is not None:
            self._run(self._rewrite.clear)
        self._reads.clear()
        self._ready, self._is_broken = 0, False

    def _make_ready(self, most):
        """Makes a batch ready, or as many as steps overlap. Raises what reading it has raised. False: the dataset has ended."""
        import tensorflow as tf

        rewrite, is_stale, self._is_stale = self._rewrite, self._is_stale, False
        for _ in range(self._ready if is_stale else 0):
            inputs = self._run(rewrite.ready_inputs)
            self._run(rewrite.first, dict(zip(rewrite.first_inputs, inputs)))
        while self._ready == 0 or self._ready + self._under_way < most:
            error = self._read().error
            if error is not None and self._ready > 0:
                return True
            self._reads.popleft()
            if isinstance(error, tf.errors.OutOfRangeError):
                return False
            if error is not None:
                raise error
            self._run(rewrite.first)
            self._ready += 1
        return True

    def _run_step(self, wanted):
        try:
            values = self._run(wanted + [self._rewrite.next])
        except BaseException:
            with self._changed:
                self._is_broken = True
                self._end_step()
            raise
        with self._changed:
            self._ready += 1
            self._end_step()
        return values[:-1]

    def _end_step(self):
        self._under_way -= 1
        self._changed.notify_all()

    def _read(self):
        """The oldest batch that was only read, once that is done."""
        while True:
            if not self._reads:
                self._begin_read()
            read = self._reads[0]
            if read.is_done:
                return read
            self._changed.wait()

    def _begin_read(self):
        if self._reader is None:
            self._reader = queue.SimpleQueue()
            arguments = (self._reader, self._session, self._run_of_base, self._changed)
            threading.Thread(target=_read_all, args=arguments, name="starwire-ahead", daemon=True).start()
        self._reads.append(_Read(self._rewrite.read))
        self._reader.put(self._reads[-1])


class _Known:
    """What is known of the runs that fetch and are fed the same."""

    def __init__(self, wanted, fed):
        self.wanted, self.fed = wanted, fed
        self.ops = _ahead_graph.leading_to(wanted, fed)
        self.takes, others = _ahead_graph.iterators(self.ops)
        self.uses_iterators = bool(others)
        self.changes = _ahead_graph.changes_variables(self.ops)
        self.is_unable = False
        self.redirected = None  # a rewritten step, and the same run with one of its batches
        self._cut = None

    def can_take(self, cut):
        """Whether it takes no element if it is given these tensors."""
        if self._cut is None or self._cut[0] is not cut:
            takes, _ = _ahead_graph.iterators(_ahead_graph.leading_to(self.wanted, [*self.fed, *cut]))
            self._cut = (cut, not takes)
        return self._cut[1]


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
