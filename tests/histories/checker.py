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
        self.begin, self.known = event["begin"], event.get("end", math.inf) if event["ok"] else math.inf
        self.base = event["base"]
        kills = [kill for kill in kills if kill["end"] > self.begin]
        self.kept = [kill for kill in kills if "kept_until" in kill]
        again = [init["begin"] for init in inits if any(kill["begin"] < init["begin"] for kill in self.kept)]
        self.end = min([kill["begin"] for kill in kills if "kept_until" not in kill] + again, default=math.inf)

    def may_lack(self, certain, read):
        """An update that was acknowledged may have been lost with the last moments of its server, and the read shows it."""
        return any(kill["kept_until"] <= certain <= kill["end"] and kill["begin"] < _end(read) for kill in self.kept)

    def holds(self, event):
        """The event took place in this life, and in no other."""
        return self.known <= event["begin"] and event.get("end", math.inf) <= self.end


def _lives(events, name, server):
    kills = [event for event in events if event["what"] == "kill" and event["server"] == server]
    inits = [event for event in events if event["what"] == "init" and event["name"] == name]
    return [Life(event, kills, inits) for event in inits]


def _end(event):
    return event.get("end", math.inf)


def _certain(event):
    """When it is known to have taken effect."""
    return _end(event) if event["ok"] else math.inf


def _bounds(updates, life, read):
    """Returns for each update whether the read must see it, and whether it may."""
    begin, certain = (numpy.array([function(update) for update in updates]) for function in (lambda update: update["begin"], _certain))
    over = numpy.array([_end(update) for update in updates])
    lacking = numpy.array([life.may_lack(time, read) for time in certain])
    must = (begin >= life.known) & (certain < read["begin"]) & ~lacking
    may = (begin < _end(read)) & (over > life.begin)
    return must, may


def _check_elements(name, updates, life, read, complain):
    value, base = unpack(read["values"][name]), unpack(life.base)
    low, high = base.copy(), base.copy()
    if updates:
        must, may = _bounds(updates, life, read)
        elements = numpy.array([update["element"] for update in updates])
        numpy.add.at(low, elements[must], 1)
        numpy.add.at(high, elements[may], 1)
    for element in ((value < low) | (value > high)).nonzero()[0]:
        of = [update for update in updates if update["element"] == element]
        what = "lost" if value[element] < low[element] else "applied twice" if value[element] > 1 else "applied, though it was over before"
        complain((name, element), f"{name}[{element}] is {value[element]:g}, not {low[element]:g} to {high[element]:g}: {what}; update {of}", read)
    for kill in life.kept:
        # What a server has lost is what came last.
        late = [update for update in updates if life.known <= update["begin"] and kill["kept_until"] <= _certain(update) <= kill["begin"]]
        there = [update for update in late if value[update["element"]] > base[update["element"]]]
        lost = [update for update in late if value[update["element"]] <= base[update["element"]]]
        if kill["end"] < read["begin"] and there and lost:
            first, last = min(lost, key=_certain), max(there, key=lambda update: update["begin"])
            if _certain(first) < last["begin"]:
                complain((name, "order"), f"{name} has lost {first}, but not {last}", read)


def _check_count(name, updates, life, read, complain):
    must, may = _bounds(updates, life, read) if updates else (numpy.zeros(0), numpy.zeros(0))
    value, low, high = read["values"][name], life.base + must.sum(), life.base + may.sum()
    if not low <= value <= high:
        complain(name, f"{name} is {value}, not {low} to {high}", read)


def _check_register(name, writes, life, read, complain):
    value = read["values"][name]
    source = None if value == life.base else next((write for write in writes if write["value"] == value), None)
    if source is None and value != life.base:
        return complain((name, value), f"{name} is {value}, which nobody has written", read)
    if source is not None and (source["begin"] >= _end(read) or _end(source) <= life.begin):
        return complain((name, value), f"{name} is {value}, which is written later or was written to a server that is gone: {source}", read)
    since = _certain(source) if source is not None else life.known
    for other in writes:
        if other is not source and since < other["begin"] and _certain(other) < read["begin"] and not life.may_lack(_certain(other), read):
            return complain((name, value), f"{name} is {value}, but {other} overwrote it", read)


CHECKS = {"push": _check_elements, "count": _check_count, "write": _check_register}


def check(events, server_of, kind_of):
    """Returns the violations, each once, and how many reads of variables were compared. `server_of`, `kind_of`: of each variable, by name; a kind is the word for its
    updates."""
    wrong, compared = {}, 0

    def complain(what, text, read):
        wrong.setdefault(what, f"{text}; first read {read['begin']:.3f} to {_end(read):.3f}")

    updates = collections.defaultdict(list)
    for event in events:
        if event["what"] in CHECKS:
            for name in event["names"]:
                updates[name].append(event)
    reads = [event for event in events if event["what"] == "read" and event["ok"]]
    for name, server in server_of.items():
        lives = _lives(events, name, server)
        for read in reads:
            if name not in read["values"]:
                continue
            # An initialisation whose end is not known may still come, and none can be told from it.
            late = [life for life in lives if life.known == math.inf and life.begin < _end(read) and life.end > read["begin"]]
            life = next((life for life in lives if life.holds(read)), None)
            if life is None or late:
                continue
            compared += 1
            CHECKS[kind_of[name]](name, updates[name], life, read, complain)
    return list(wrong.values()), compared
