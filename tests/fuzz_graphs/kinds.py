"""What the kinds of state have in common: how one is created, initialised, used and finally read."""

import values
from program import lit


def record_in(g, where, op, dev, ins=None, attr=None, out=(), ctl=(), **more):
    """Adds a record outside of the body: to the initialisation or the final reads."""
    records, g.scope.records = g.scope.records, where
    number = g.record(op, dev, ins, attr, out, ctl, **more)
    g.scope.records = records
    return number


def final(g, number, outputs=1):
    g.final_out += [f"{number}:{k}" for k in range(outputs)]


def small(g, dtype):
    return lit(dtype, values.literal(g, dtype))


class Kind:
    """`make` creates a state of this kind, `act` uses it, `inside` tells whether the current body may use it, `finish` reads it at the end."""

    devices = ("ps0", "ps1", "ps0", "ps1", "me")

    @classmethod
    def place(cls, g):
        # Two sessions would each have their own state on `me`.
        return g.rng.choice([d for d in cls.devices if d in g.devices and (d != "me" or g.sessions == 1)] or ["ps0"])

    @staticmethod
    def inside(g, state):
        return True

    @staticmethod
    def finish(g, state):
        pass

    @classmethod
    def new(cls, g, number, dev, dtype=None, shape=None, **extra):
        from generate import State

        state = State(cls, number, f"{number}:0", dev, dtype, shape, extra)
        if g.failing is not None and g.chance(g.after_failure):
            state.writes = [(g.failing, ())]
            g.sure.add(state)
        g.states.append(state)
        return state
