"""Decides whether a history of steps can be explained. Knows nothing but the history.

Every update has an element of its own, to which it adds one: an element counts how often its update was applied. Every write to a register has a value of
its own. An event is a dictionary: `what`, the time `begin` and, once it is over, `end`, and whether it succeeded (`ok`).

    kill      of `server`, which loses its variables, or (`kept_until`) at most what was acknowledged after that time
    init      of the variable `name` with `base`
    push      adds one to `element` of each of `names`
    count     adds one to the number `name`
    write     sets the register `name` to `value`
    read      found `values`, by name
"""

import collections
import math

import numpy

SIZE = 1 << 15  # elements of a variable


def unpack(packed):
    """Returns the elements of a read or base: `ones` as bits, and those that are neither 0 nor 1."""
    bits = numpy.frombuffer(bytes.fromhex(packed["ones"]), numpy.uint8)
    found = numpy.zeros(SIZE)
    found[: 8 * len(bits)] = numpy.unpackbits(bits)[:SIZE]
    for element, value in packed["others"]:
        found[element] = value
    return found


def pack(values):
    values = numpy.asarray(values)
    ones = numpy.packbits(values == 1)
    used = ones.nonzero()[0]
    others = [(int(n), float(values[n])) for n in ((values != 0) & (values != 1)).nonzero()[0]]
    return {"ones": ones[: used[-1] + 1 if len(used) else 0].tobytes().hex(), "others": others}


class Life:
    """A variable from its initialisation to the death of its server, or, if that keeps it, to the next initialisation."""

    def __init__(self, event, kills, inits):
        self.begin, self.known = event["begin"], _certain(event)
        self.base = event["base"]
        kills = [kill for kill in kills if kill["end"] > self.begin]
        self.kept = [kill for kill in kills if "kept_until" in kill]
        self.lost = [kill for kill in kills if "kept_until" not in kill]
        again = [init["begin"] for init in inits if any(kill["begin"] < init["begin"] for kill in self.kept)]
        self.end = min([kill["begin"] for kill in self.lost] + again, default=math.inf)
        self.over = min([kill["end"] for kill in self.lost] + again, default=math.inf)

    def may_lack(self, certain, read, shared=math.inf):
        """An update that had taken effect at these times may have been lost with the last moments of its server, and the read shows it. `shared`: when an
        update began that other servers have a part of: this one may have answered, and died, while they had not."""
        lacking = numpy.zeros(numpy.shape(certain), bool)
        for kill in self.kept:
            if kill["begin"] < _end(read):
                lacking |= (kill["kept_until"] <= certain) & (certain <= kill["end"])
                if kill["kept_until"] < kill["begin"]:
                    lacking |= (kill["kept_until"] <= certain) & (shared <= kill["begin"])
        return lacking

    def is_forgotten_by(self, init):
        """The variable had no value at the later initialisation, though no death of its server can have taken its value away."""
        return init["begin"] > self.known and not any(
            kill["begin"] < init["begin"] and kill.get("kept_until", -math.inf) <= self.known for kill in self.kept + self.lost
        )

    def is_interrupted(self, first, second):
        """The server may have lost something between two reads."""
        return any(kill["begin"] < _end(second) and kill["end"] > first["begin"] for kill in self.kept)

    def is_cut(self, begin, end):
        """The server died between these times."""
        return any(kill["begin"] < end and kill["end"] > begin for kill in self.kept + self.lost)

    def holds(self, event):
        """The event took place in this life, and in no other."""
        return self.known <= event["begin"] and _end(event) <= self.end


def _lives(events, name, server):
    kills = [event for event in events if event["what"] == "kill" and event["server"] == server]
    inits = [event for event in events if event["what"] == "init" and event["name"] == name]
    return [Life(event, kills, inits) for event in inits]


def _end(event):
    return event.get("end", math.inf)


def _certain(event):
    """When it is known to have taken effect."""
    return _end(event) if event["ok"] else math.inf


class Updates:
    """The updates of a variable, and what the reads of one of its lives say about them."""

    def __init__(self, events, life, server_of):
        self.events, self.life = events, life
        self.begin = numpy.array([event["begin"] for event in events])
        self.end = numpy.array([_end(event) for event in events])
        self.acknowledged = numpy.array([_certain(event) for event in events])
        self.shared = numpy.where([len({server_of[name] for name in event["names"]}) > 1 for event in events], self.begin, math.inf)
        self.elements = numpy.array([event["element"] for event in events], int)
        # Its error says that it was not applied: the variable has no value. A server that died meanwhile may have applied it before.
        refused = [event.get("error", "").startswith("FailedPrecondition") and not life.is_cut(event["begin"], _end(event)) for event in events]
        self.refused = numpy.array(refused, bool) & (self.shared == math.inf)
        self.seen = numpy.full(len(events), math.inf)  # the end of the first read that shows the effect
        self.proved = numpy.zeros(len(events), bool)

    def see(self, mask, read):
        self.seen[mask] = numpy.minimum(self.seen[mask], _end(read))

    def bounds(self, read):
        """Returns for each update whether the read must see it, and whether it may. What a read has seen, later ones must see."""
        certain = numpy.minimum(self.acknowledged, self.seen)
        is_new = self.begin >= self.life.known
        must = (is_new | (self.seen < math.inf)) & (certain < read["begin"]) & ~self.life.may_lack(certain, read, self.shared)
        self.proved |= must & (self.acknowledged < read["begin"])
        return must, (self.begin < _end(read)) & (self.end > self.life.begin) & ~self.refused


def _check_elements(name, updates, reads, complain):
    life = updates.life
    values, base = [unpack(read["values"][name]) for read in reads], unpack(life.base)
    for value, read in zip(values, reads):
        updates.see(value[updates.elements] > base[updates.elements], read)
    for value, read in zip(values, reads):
        low, high = base.copy(), base.copy()
        must, may = updates.bounds(read)
        numpy.add.at(low, updates.elements[must], 1)
        numpy.add.at(high, updates.elements[may], 1)
        for element in ((value < low) | (value > high)).nonzero()[0]:
            of = [update for update in updates.events if update["element"] == element]
            what = "lost" if value[element] < low[element] else "applied twice" if value[element] > 1 else "applied, though it was refused or over before"
            complain((name, element), f"{name}[{element}] is {value[element]:g}, not {low[element]:g} to {high[element]:g}: {what}; update {of}", read)
        for kill in life.kept:
            _check_order(name, updates, value > base, kill, read, complain)


def _check_order(name, updates, is_there, kill, read, complain):
    """What a server has lost is what came last."""
    late = (updates.begin >= updates.life.known) & (kill["kept_until"] <= updates.acknowledged) & (updates.acknowledged <= kill["begin"])
    there, lost = late & is_there[updates.elements], late & ~is_there[updates.elements]
    if kill["end"] < read["begin"] and there.any() and lost.any():
        first, last = (updates.acknowledged + ~lost * 1e9).argmin(), (updates.begin - ~there * 1e9).argmax()
        if updates.acknowledged[first] < updates.begin[last]:
            complain((name, "order"), f"{name} has lost {updates.events[first]}, but not {updates.events[last]}", read)


def _check_count(name, updates, reads, complain):
    life = updates.life
    for read in reads:
        must, may = updates.bounds(read)
        value, low, high = read["values"][name], life.base + must.sum(), life.base + may.sum()
        # One update that was lost and one that came twice are no sum, but between two reads they show.
        for before in [other for other in reads if _end(other) < read["begin"] and not life.is_interrupted(other, read)][-3:]:
            low = max(low, before["values"][name] + (must & (updates.begin >= _end(before))).sum())
            high = min(high, before["values"][name] + (may & ~(updates.acknowledged < before["begin"])).sum())
        if not low <= value <= high:
            complain(name, f"{name} is {value}, not {low} to {high}", read)


def _check_register(name, writes, reads, complain):
    life = writes.life
    written = numpy.array([write["value"] for write in writes.events])
    for read in reads:
        writes.see(written == read["values"][name], read)
    certain = numpy.minimum(writes.acknowledged, writes.seen)
    for read in reads:
        value = read["values"][name]
        source = None if value == life.base else next((n for n, write in enumerate(writes.events) if write["value"] == value), None)
        if source is None and value != life.base:
            complain((name, value), f"{name} is {value}, which nobody has written", read)
            continue
        since = life.known
        if source is not None:
            if writes.begin[source] >= _end(read) or writes.end[source] <= life.begin or writes.refused[source]:
                complain((name, value), f"{name} is {value}, which is written later, was refused, or was written to a server that is gone: {writes.events[source]}", read)
            # What a server has lost may come again, and later.
            since = writes.acknowledged[source] if life.may_lack(writes.seen[source], read) else certain[source]
        over = (since < writes.begin) & (certain < read["begin"]) & ~life.may_lack(certain, read)
        if source is not None:
            over[source] = False
        if over.any():
            complain((name, value), f"{name} is {value}, but {writes.events[over.argmax()]} overwrote it", read)
        # Each value is written once. What had been written before another value was read is over, also if the two were written at once.
        began, took_effect = (life.begin, life.known) if source is None else (writes.begin[source], certain[source])
        for other in reads:
            is_between = took_effect < other["begin"] and _end(other) < read["begin"]
            if is_between and other["values"][name] != value and not life.is_cut(began, _end(read)):
                complain((name, value), f"{name} is {value} again, after it was {other['values'][name]} at {other['begin']:.3f}", read)


CHECKS = {"push": _check_elements, "count": _check_count, "write": _check_register}


class Verdict:
    """`wrong`: the violations, each once. `compared`: how many reads of variables were. `proved`: how many updates a read had to show. `latest`: by variable, when the
    last read began that was compared; `unsure`: the last one that was not, because an initialisation failed and may still come."""

    def __init__(self):
        self.found, self.compared, self.proved, self.latest, self.unsure = {}, 0, 0, {}, {}

    @property
    def wrong(self):
        return list(self.found.values())

    def complain(self, what, text, read):
        self.found.setdefault(what, f"{text}; first read {read['begin']:.3f} to {_end(read):.3f}")


def _check_lives(name, lives, updates, verdict):
    """No variable loses its value, or has updates before it has one."""
    for earlier in lives:
        if later := next((life for life in lives if earlier.is_forgotten_by({"begin": life.begin})), None):
            verdict.found.setdefault((name, "forgotten"), f"{name}, initialised until {earlier.known:.3f}, had no value at {later.begin:.3f}")
    for update in updates:
        if update["ok"] and not any(life.begin < _end(update) and life.over > update["begin"] for life in lives):
            verdict.found.setdefault((name, "nowhere"), f"{name} had no value, but acknowledged {update}")


def check(events, server_of, kind_of):
    """Returns the verdict. `server_of`, `kind_of`: of each variable, by name; a kind is the word for its updates."""
    verdict, updates = Verdict(), collections.defaultdict(list)
    for event in events:
        if event["what"] in CHECKS:
            for name in event["names"]:
                updates[name].append(event)
    found = sorted((event for event in events if event["what"] == "read" and event["ok"]), key=_end)
    for name, server in server_of.items():
        lives = _lives(events, name, server)
        _check_lives(name, lives, updates[name], verdict)
        reads = collections.defaultdict(list)
        for read in found:
            # An initialisation whose end is not known may still come, and none can be told from it.
            late = [life for life in lives if life.known == math.inf and life.begin < _end(read) and life.end > read["begin"]]
            life = next((life for life in lives if life.holds(read)), None)
            if late and name in read["values"]:
                verdict.unsure[name] = read["begin"]
            elif life is not None and name in read["values"]:
                reads[life].append(read)
        for life, compared in reads.items():
            of = Updates(updates[name], life, server_of)
            CHECKS[kind_of[name]](name, of, compared, verdict.complain)
            verdict.compared += len(compared)
            verdict.proved += int(of.proved.sum())
            verdict.latest[name] = max(verdict.latest.get(name, 0), *(read["begin"] for read in compared))
    return verdict
