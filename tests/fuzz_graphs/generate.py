"""Generates programs from seeds.

A program's result is determined: of two operations that touch the same state, one of them writing, one runs before the other along edges of the
graph. `Generator.emit` ensures that for every record: it knows which state an operation reads and writes (a value that may be the buffer of a
reference variable counts as that variable), and adds control edges from the last users. Control edges from operations that may be dead go through
a Merge. Cases that no edge can order are not generated: a snapshot of a reference variable is not sent to another task after a write, because it is
undefined when the buffer is read.
"""

import json
import random
from dataclasses import dataclass, field

import features
import in_flight
import states
import values
import variables
from program import DEVICES, closure, dependencies, lit, node_of


@dataclass(eq=False)
class Val:
    """A tensor. `alias`: the variables whose buffer it may be, and their number of writes at that time."""

    ref: str
    dtype: str
    shape: tuple
    dev: str
    guard: tuple = ()
    alias: dict = field(default_factory=dict)
    feedable: bool = True


@dataclass(eq=False)
class Ref:
    """A reference to one of several variables."""

    ref: str
    dtype: str
    shape: tuple
    dev: str
    guard: tuple
    states: list


@dataclass(eq=False)
class State:
    """State that operations read and write."""

    kind: object
    id: int
    handle: str
    dev: str
    dtype: str = None
    shape: tuple = None
    extra: dict = field(default_factory=dict)
    epoch: int = 0
    writes: list = field(default_factory=list)  # (id, guard): the last writers, and in `reads` the readers since
    reads: list = field(default_factory=list)


class Scope:
    """The records of one body, and the values visible in it."""

    def __init__(self, functional, depth, loop, only=None):
        self.records, self.values, self.preds, self.pivots = [], [], [], {}
        self.functional, self.depth, self.loop = functional, depth, loop
        self.touched = {}
        # TensorFlow itself sometimes hangs if a loop within a branch or another loop spans tasks, so such a loop stays on one device.
        self.only = only


class Generator:
    def __init__(self, seed):
        self.seed, self.rng = seed, random.Random(seed)
        self.next_id = 0
        self.scopes = [Scope(False, 0, False)]
        self.states, self.init, self.final, self.final_out = [], [], [], []
        self.wanted, self.asked = [], []  # values that the main runs fetch, and ids that they run, in any case
        # The operation that fails, the share of later states whose users wait for it, and the states that a failed step leaves the same everywhere.
        self.failing, self.after_failure, self.sure = None, 0, set()
        self.users = set()  # the ids of all users of state
        self.guard = ()
        self.size = self.rng.choice((4, 6, 9, 13, 20))
        self.sessions = 2 if self.chance(0.15) else 1
        # Random feature weights: a feature that is rare in a full mix is common where the others are off.
        self.weights = {name: self.rng.choice((0, 0, 1, 3)) for name in ("cond", "while", "guard", "merge", "refs", "pure", "state", "relay", "strings", "rows")}
        self.weights["state"] = max(1, self.weights["state"]) * 2
        self.weights["while"] = min(self.weights["while"], 1)  # loops take the most time
        self.kinds = self.rng.sample(states.KINDS, self.rng.randint(1, 4))
        if self.rng.random() < 0.6:
            self.kinds.append(variables.RefVariable)
        self.dtypes = self.rng.choice((["float32", "int32"], ["int64", "float32"], ["float32", "int32", "int64", "float64", "string"], list(values.DTYPES)))
        self.shapes = self.rng.choice(([()], [(2,)], [(), (2,), (3,)], [(2, 3), (2,), ()], [(0,), (1,), (0, 2), (2,)], [(4,), (5000,)], [(2,), (3,), (2, 3), (1,), (0,), ()], [(64, 48), (48,)]))
        if self.rng.random() < 0.02:
            self.shapes = self.shapes + [(300_000,)]
        # Numbers whose sums depend on the order. The others are small integers, which shrink to readable programs.
        self.fine = self.chance(0.5)
        self.devices = self.rng.choice((["ps0", "me"], ["ps0", "me"], ["ps0", "ps1", "me"], ["ps0", "ps1", "me"], list(DEVICES), ["ps0", "ps1"]))
        self.features = features.choose(self)

    # ---- choices

    @property
    def scope(self):
        return self.scopes[-1]

    def chance(self, p):
        return self.rng.random() < p

    def device(self):
        return self.scope.only or self.rng.choice(self.devices)

    def new_id(self):
        self.next_id += 1
        return self.next_id - 1

    def visible(self):
        for scope in self.scopes:
            for value in scope.values:
                if scope is self.scope:
                    if value.guard == self.guard[: len(value.guard)]:
                        yield value
                elif not value.guard and not (value.alias and (self.scope.loop or self.scope.functional)):
                    # Values captured by a loop or a function may pass through any task, so they must not be mutable buffers.
                    yield value

    def usable(self, value, dev):
        """True if an operation on `dev` may take it: the buffer of a variable written since may not leave its task."""
        return value.dev == dev or all(state.epoch == epoch for state, epoch in value.alias.items())

    def pick(self, dev, accept):
        found = [v for v in self.visible() if accept(v) and self.usable(v, dev)]
        if not found:
            return None
        # Prefer late values: that makes chains rather than fans.
        return found[-1 - min(int(self.rng.expovariate(0.3)), len(found) - 1)] if self.chance(0.6) else self.rng.choice(found)

    def want(self, dtype, shape, dev, fresh=False):
        """Returns a value of that type: an existing one, a feed, a constant, or one computed from another value."""
        shape = tuple(shape)
        if not fresh and self.chance(0.75):
            value = self.pick(dev, lambda v: v.dtype == dtype and v.shape == shape)
            if value is not None:
                return value
        return values.make(self, dtype, shape, dev)

    # ---- records

    def record(self, op, dev, ins=None, attr=None, out=(), ctl=(), **more):
        """Adds a record without edges for state. Returns its id."""
        number = self.new_id()
        made = {"id": number, "op": op, "dev": dev, "in": {n: self.show(v) for n, v in (ins or {}).items()}}
        if attr:
            made["attr"] = attr
        if ctl:
            made["ctl"] = sorted(set(ctl))
        made.update({key: value for key, value in more.items() if value})
        if "names" in self.features and "name" not in made and self.chance(0.3):
            made.update(features.name(self))
        made["out"] = [[dtype, list(shape)] for dtype, shape in out]
        self.scope.records.append(made)
        return number

    def show(self, value):
        if isinstance(value, (list, tuple)):
            return [self.show(one) for one in value]
        return value.ref if isinstance(value, (Val, Ref)) else value

    def emit(self, op, dev, ins=None, attr=None, out=(), reads=(), writes=(), alias=False, feedable=True, ctl=(), pin=None, pool=True, implied=(), **more):
        """Adds an operation with the edges that its state requires. Returns its values. `implied`: states whose writers come before its inputs anyway."""
        reads, writes, ctl = list(reads), list(writes), list(ctl)
        flat = [one for value in (ins or {}).values() for one in (value if isinstance(value, (list, tuple)) else [value])]
        guards = [one.guard for one in flat if isinstance(one, (Val, Ref))]
        aliased = {}
        for one in flat:
            if isinstance(one, Val):
                assert self.usable(one, dev), f"{op} on {dev} would take {one.ref}, the buffer of a variable that was written since, from {one.dev}"
                reads += one.alias
                if one.dev == dev and alias:
                    for state, epoch in one.alias.items():
                        aliased[state] = min(epoch, aliased.get(state, epoch))
            elif isinstance(one, Ref) and not any(state in writes for state in one.states):
                reads += one.states
        guard = max(guards, key=len, default=())
        if len(guard) < len(self.guard) and (pin if pin is not None else (reads or writes) and self.chance(0.7)):
            ctl.append(self.pivot(self.guard))
            guard = self.guard
        for state in dict.fromkeys(reads + writes):
            ctl += self.before(state, state in writes, guard) if state not in implied else ()
        number = self.record(op, dev, ins, attr, out, ctl, **more)
        for state in dict.fromkeys(reads + writes):
            self.used(state, number, guard, state in writes)
        made = [Val(f"{number}:{k}", dtype, tuple(shape), dev, guard, dict(aliased), feedable) for k, (dtype, shape) in enumerate(out)]
        if pool:
            self.scope.values += [v for v in made if v.dtype not in ("resource", "variant")]
        return made

    # ---- order

    def before(self, state, write, guard):
        """Returns the control inputs for a user of `state` under `guard`."""
        found = []
        for users in ([state.writes, state.reads] if write else [state.writes]):
            for at, (number, theirs) in enumerate(users):
                users[at] = number, theirs = self.settle(number, theirs, guard)
                if theirs == guard[: len(theirs)]:
                    found.append(self.detour(number, theirs))
        return found

    def settle(self, number, theirs, guard):
        """Leads the source of a control edge through Merges until it is dead only if its user is, or is in the opposite branch."""
        while theirs != guard[: len(theirs)]:
            at = next((k for k, (one, other) in enumerate(zip(theirs, guard)) if one != other), None)
            if at is not None and theirs[at][0] == guard[at][0]:
                return number, theirs  # the other branch
            number, theirs = self.join(number, theirs), theirs[:-1]
        return number, theirs

    def join(self, number, guard):
        """Returns an operation that runs after `number`, or alone if `number` is dead."""
        branch = guard[-1][1]
        dev = self.device()
        pair = [None, None]
        pair[branch] = self.record("Identity", dev, {"input": self.side(guard)}, out=[("bool", ())], ctl=[number])
        pair[1 - branch] = self.record("Identity", dev, {"input": self.side(guard[:-1] + ((guard[-1][0], 1 - branch),))}, out=[("bool", ())])
        return self.record("Merge", dev, {"inputs": [f"{one}:0" for one in pair]}, out=[("bool", ()), ("int32", ())])

    def side(self, guard):
        """Returns the tensor that is alive exactly under `guard`: one side of a Switch."""
        pred, branch = guard[-1]
        key = guard[:-1] + (pred,)
        if key not in self.scope.pivots:
            value = self.scope.preds[pred]
            self.scope.pivots[key] = self.record("Switch", value.dev, {"data": value, "pred": value}, out=[("bool", ())] * 2), {}
        return f"{self.scope.pivots[key][0]}:{branch}"

    def pivot(self, guard):
        side = self.side(guard)
        cache = self.scope.pivots[guard[:-1] + (guard[-1][0],)][1]
        if guard[-1][1] not in cache:
            cache[guard[-1][1]] = self.record("Identity", self.device(), {"input": side}, out=[("bool", ())])
        return cache[guard[-1][1]]

    def detour(self, number, guard):
        """Sometimes routes an edge through another task."""
        if self.chance(0.12) and not self.scope.functional:
            return self.record("NoOp", self.device(), ctl=[number])
        return number

    def used(self, state, number, guard, write):
        self.users.add(number)
        self.scope.touched[state] = write or self.scope.touched.get(state, False)
        if write:
            state.epoch += 1
            kept = lambda users: [(n, g) for n, g in users if g[: len(guard)] != guard]  # noqa: E731
            state.writes, state.reads = kept(state.writes) + [(number, guard)], kept(state.reads)
        else:
            state.reads.append((number, guard))

    # ---- bodies

    def body(self, functional, loop, first, fill, only=None):
        """Generates a body with `fill`. Every user of state runs after the id `first`. Returns (scope, the result of `fill`, control ids)."""
        saved = {state: (state.writes, state.reads) for state in self.states}
        guard, self.guard = self.guard, ()
        for state in self.states:
            state.writes, state.reads = ([(first, ())] if first is not None else []), []
        self.scopes.append(Scope(functional or self.scope.functional, self.scope.depth + 1, loop or self.scope.loop, only or self.scope.only))
        result = fill()
        ends = []
        for state in self.scope.touched:
            ends += [i for i in self.before(state, True, ()) if i != first]
        scope = self.scopes.pop()
        for state, (writes, reads) in saved.items():
            state.writes, state.reads = writes, reads
        self.guard = guard
        return scope, result, sorted(set(ends))

    def after_bodies(self, scopes):
        """Returns (reads, writes) of the record that holds the bodies."""
        touched = {}
        for scope in scopes:
            for state, write in scope.touched.items():
                touched[state] = write or touched.get(state, False)
        return [s for s, w in touched.items() if not w], [s for s, w in touched.items() if w]

    def plain_value(self, dtype, shape, dev):
        """Returns a value that is alive and not a variable's buffer."""
        value = self.pick(dev, lambda v: v.dtype == dtype and v.shape == tuple(shape) and not v.alias and not v.guard)
        return value or values.constant(self, dtype, shape, dev)

    def fill(self, count):
        for _ in range(count):
            self.act()

    def pred(self, dev):
        return values.predicate(self, dev)

    def cond(self):
        style = "v2" if self.scope.functional or self.chance(0.4) else "v1"
        dev, guard = self.device(), self.guard
        self.guard = ()
        pred = self.pred(dev)
        types = [(self.rng.choice(self.dtypes), self.rng.choice(self.shapes)) for _ in range(self.rng.randint(1, 2))]

        def fill():
            self.fill(self.rng.randint(0, 4))
            return [self.plain_value(dtype, shape, self.device()) for dtype, shape in types]

        self.conditional(style, dev, pred, types, (fill, fill))
        self.guard = guard

    def conditional(self, style, dev, pred, types, fills):
        """A condition whose branches `fills` generates: what happens if it holds, and if not."""
        bodies = [self.body(style == "v2", False, None, fill) for fill in fills]
        reads, writes = self.after_bodies([scope for scope, _, _ in bodies])
        parts = {}
        for name, (scope, out, ctl) in zip(("then", "else"), bodies):
            parts.update({name: scope.records, f"{name}_out": self.show(out) or [], f"{name}_ctl": ctl})
        self.structured("@cond", dev, {"pred": pred}, types, reads, writes, {**parts, "style": style})

    def structured(self, op, dev, ins, types, reads, writes, parts):
        ctl = [i for state in reads + writes for i in self.before(state, state in writes, ())]
        for value in [one for v in ins.values() for one in (v if isinstance(v, list) else [v])]:
            if isinstance(value, Val):
                for state in value.alias:
                    ctl += self.before(state, False, ())
        number = self.record(op, dev, ins, out=types, ctl=ctl)
        self.scope.records[-1].update(parts)
        for state in reads + writes:
            self.used(state, number, (), state in writes)
        self.scope.values += [Val(f"{number}:{k}", dtype, tuple(shape), dev) for k, (dtype, shape) in enumerate(types)]

    def loop(self):
        style = "v2" if self.scope.functional or self.chance(0.4) else "v1"
        dev, guard = self.device(), self.guard
        self.guard = ()
        types = [("int32", ())] + [(self.rng.choice(self.dtypes), self.rng.choice(self.shapes)) for _ in range(self.rng.randint(1, 2))]
        copied = variables.copied(self) if self.chance(0.5) else None
        if copied is not None:
            dev, types[1] = copied.dev, (copied.dtype, copied.shape)
        start = [lit("int32", 0)] + [self.plain_value(dtype, shape, dev) for dtype, shape in types[1:]]
        if copied is not None:
            start[1] = variables.times_one(self, copied)
        names = [self.new_id() for _ in types]

        def fill():
            variables = [Val(f"{i}:0", dtype, tuple(shape), dev, feedable=False) for i, (dtype, shape) in zip(names, types)]
            self.scope.values += variables
            self.fill(self.rng.randint(1, 4))
            return [variables[0]] + [self.plain_value(dtype, shape, self.device()) for dtype, shape in types[1:]]

        scope, out, ctl = self.body(style == "v2", True, names[0], fill, only=dev if self.scope.depth else None)
        reads, writes = self.after_bodies([scope])
        parts = {"style": style, "limit": self.rng.randint(0, 4), "parallel": self.rng.choice((1, 4, 10)), "vars": names, "body": scope.records, "body_out": self.show(out), "body_ctl": ctl}
        self.structured("@while", dev, {"init": start}, types, reads, writes, parts)
        self.guard = guard

    # ---- the program

    def act(self):
        scope = self.scope
        choices = dict(self.weights)
        choices["pure"] += 1
        if scope.depth >= 2:
            choices["cond"] = choices["while"] = 0
        if scope.functional:
            choices["guard"] = choices["merge"] = choices["refs"] = 0
        what = self.rng.choices(list(choices), list(choices.values()))[0]
        if not scope.functional and scope.preds and self.chance(0.3):
            self.guard = self.rng.choice([()] + [key[:-1] + ((key[-1], b),) for key in scope.pivots for b in (0, 1)])
        if what in features.ACTS:
            features.ACTS[what](self)
        else:
            getattr(self, f"act_{what}")()

    def act_cond(self):
        self.cond()

    def act_while(self):
        self.loop()

    def act_guard(self):
        """Continues in one branch of a Switch."""
        if len(self.guard) >= 2 or self.chance(0.3):
            self.guard = self.guard[:-1]
            return
        pred = self.pred(self.device())
        if pred.alias:
            return
        self.scope.preds.append(pred)
        # The predicate may be less deeply nested than the current guard.
        self.guard = pred.guard + ((len(self.scope.preds) - 1, self.rng.randint(0, 1)),)
        self.side(self.guard)

    def act_merge(self):
        values.merge(self)

    def act_refs(self):
        variables.references(self)

    def act_pure(self):
        values.act(self)

    def act_strings(self):
        values.strings(self)

    def act_rows(self):
        variables.train_rows(self)

    def act_relay(self):
        values.relay(self)

    def act_state(self):
        usable = [s for s in self.states if s.kind.inside(self, s) and self.scope.only in (None, s.dev)]
        if usable and (len(self.scopes) > 1 or len(self.states) >= 6 or self.chance(0.8)):
            state = self.rng.choice(usable)
            state.kind.act(self, state)
        elif len(self.scopes) == 1:
            guard, self.guard = self.guard, ()
            self.rng.choice(self.kinds).make(self)
            self.guard = guard

    def program(self):
        for _ in range(self.rng.randint(1, 3)):
            self.rng.choice(self.kinds).make(self)
        wide = self.rng.randrange(self.size) if self.chance(0.02) else None
        special = {self.rng.randrange(self.size): act for act in features.acts(self)}
        for number in range(self.size):
            if number in special:
                self.guard = ()
                special[number](self)
            self.act()
            if number == wide:
                self.guard = ()
                values.wide(self)
        self.guard = ()
        if self.chance(0.3):
            variables.step_counter(self)
        self.guard = ()
        if self.chance(0.07) and self.failing is None:
            states.error(self)
        self.guard = ()
        records = self.scope.records
        # Before the final reads, which include its counters.
        together = self.together(records) if self.chance(0.15) else None
        in_flight_run = in_flight.run(self, records) if "in flight" in self.features else None
        sure = []
        for state in self.states:
            start = len(self.final_out)
            state.kind.finish(self, state)
            sure += self.final_out[start:] if state in self.sure else ()
        runs = self.runs(records)
        if self.failing is not None:
            runs = features.looks(self, runs, sure)
        for one in (together, in_flight_run):
            if one:
                runs.insert(-1, one)
        # TensorFlow constant-folds reads of a file with a constant name, so it reads the file before the step.
        reads_files = any(f'"{op}"' in json.dumps(records) for op in ("ReadFile", "MatchingFiles"))
        # Grappler drops control edges that others imply, even if the implying path leads through a fed value; then nothing orders the two.
        feeds_inside = any("feed_inner" in run for run in runs)
        options = {
            "grappler": self.chance(0.7) and not reads_files and not feeds_inside,
            "sessions": self.sessions,
            "fine": self.fine,
        }
        options.update(features.options(self))
        if options["sessions"] == 2:
            for number, run in enumerate(run for run in runs[1:-1] if "sure" not in run):
                if "lanes" not in run:
                    run["session"] = number % 2
        return {"seed": self.seed, "options": options, "init": self.init, "body": records, "final": self.final, "runs": runs}

    def fetchable(self):
        """Returns live values that are not buffers written since."""
        return [v for v in self.scopes[0].values if not v.guard and all(s.epoch == e for s, e in v.alias.items())]

    def together(self, records):
        """Returns a run that several threads execute concurrently and repeatedly, each on the session of its lane."""
        targets, fetch = variables.counters(self)
        fed = sorted(closure(records, targets) & {r["id"] for r in records if r["op"] == "@feed"})
        lanes = [number % self.sessions for number in range(self.rng.randint(2, 4))]
        return {"fetch": fetch, "targets": targets, "feed": fed, "mode": "together", "lanes": lanes, "times": self.rng.choice((3, 10, 25))}

    def runs(self, records):
        feeds = {r["id"] for r in records if r["op"] == "@feed"}
        by_id = {r["id"]: r for r in records}
        fetchable = self.fetchable()
        ends = sorted({n for state in self.states for n, _ in state.writes + state.reads if n in by_id} | set(self.asked))
        # What stages a value and what takes it out again run in the same step, or what stays behind races with the next
        # one's. TensorFlow may prune the taker: an output of a conditional need not depend on all of its inputs.
        paired = {number for r in records if r.get("needs") for number in (r["id"], *r["needs"])}

        def run(fetch, targets):
            needed = closure(records, [int(v.ref.split(":")[0]) for v in fetch] + targets)
            return {"fetch": [v.ref for v in fetch], "targets": sorted(needed & (paired | set(targets))), "feed": sorted(needed & feeds)}

        fetch = self.rng.sample(fetchable, min(len(fetchable), self.rng.choice((1, 2, 4, 8))))
        fetch += [v for v in self.wanted if v not in fetch]
        # What nobody asks for may be made late.
        main = run(fetch, self.ends_alone(records, ends, fetch) if "unordered" in self.features and self.chance(0.7) else ends)
        runs = [{"fetch": [], "targets": [r["id"] for r in self.init if r.get("target")], "feed": []}]
        mode = self.rng.choices(("run", "callable", "partial"), (8, 1, 1))[0]
        # What the client feeds late, or in the middle, would make one of two unordered ones wait for other things than usual.
        is_open = "unordered" in self.features
        if mode == "partial" and {"unordered", "restart", "failure", "uninitialised"} & set(self.features):
            mode = "run"
        if mode == "partial":
            runs += self.partial(records, main, feeds) * 3
        else:
            repeated = dict(main, **({"mode": mode} if mode != "run" else {}))
            # Each run may be the one in which stock gRPC does not agree with itself.
            runs += [dict(repeated) for _ in range(self.rng.choice((2, 3) if is_open else (2, 3, 3, 6, 12)))]
            if self.chance(0.05):
                runs[-1]["trace"] = self.rng.choice((1, 2, 3))
        if self.chance(0.3) and fetchable:
            some = run(self.rng.sample(fetchable, min(len(fetchable), 2)), [])
            runs.insert(self.rng.randint(1, len(runs)), some)
        if self.chance(0.2) and not is_open:
            # Python drops a control edge beside a data edge from the same op; if that one is fed, nothing orders the two.
            waited_for = {number for record in records for number in record.get("ctl", ())}
            inner = [v for v in fetchable if int(v.ref.split(":")[0]) not in waited_for and v.feedable and int(v.ref.split(":")[0]) in by_id and by_id[int(v.ref.split(":")[0])]["op"] not in ("@feed", "@cond", "@while") and v.dtype not in ("resource", "variant") and v.ref not in main["fetch"]]
            if inner:
                fed = self.rng.choice(inner)
                runs.insert(self.rng.randint(1, len(runs)), dict(main, feed_inner=[[fed.ref, fed.dtype, list(fed.shape)]]))
        runs.append({"fetch": list(self.final_out), "targets": [], "feed": []})
        return features.scheduled(self, runs)

    @staticmethod
    def ends_alone(records, ends, fetch):
        """Returns the ends that nothing else in the run comes after."""
        roots = {*ends, *(node_of(v.ref) for v in fetch)}
        by_id = {r["id"]: r for r in records}
        implied = closure(records, set().union(*(dependencies(by_id[one]) for one in roots if one in by_id)))
        return [one for one in ends if one not in implied]

    def partial(self, records, main, feeds):
        """Splits the run `main` in two: first what depends on some of the feeds only, then the rest."""
        if not main["feed"] or not main["fetch"] or any(r.get("needs") for r in records):
            return [dict(main)]
        first = [f for f in main["feed"] if self.chance(0.5)]
        early = [v for v in main["fetch"] if not (closure(records, [int(v.split(":")[0])]) & (feeds - set(first)))]
        fetch = self.fetches_of(records, main)
        return [dict(main, mode="partial", targets=[], fetch=fetch, first={"feed": first, "fetch": early})]

    def fetches_of(self, records, main):
        """Partial runs cannot have targets, so targets with a live value are fetched instead."""
        plain = {v.ref for v in self.fetchable()}
        more = [f"{t}:0" for t in main["targets"] if f"{t}:0" in plain and f"{t}:0" not in main["fetch"]]
        return main["fetch"] + more


def generate(seed):
    return Generator(seed).program()


__all__ = ["generate", "Generator", "Val", "Ref", "State", "dependencies"]
