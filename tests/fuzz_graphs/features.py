"""What some seeds contain besides: each feature is rare, so that many programs are free of all."""

import random

import failures
import states
import unordered
import variables

# And the share of the seeds. New ones come last, so that seeds keep theirs.
FEATURES = {
    "unordered": 0.15,  # unordered.py
    "failure": 0.08,  # failures.py
    "restart": 0.03,  # of parameter servers between two runs
    "pause": 0.03,  # between two runs
}
# Of two that do not go together, the first one stays.
APART = (("unordered", "failure"), ("restart", "failure"))
NOTHING = {"fetch": [], "targets": [], "feed": []}


def choose(g):
    """Returns the features of a seed. They are chosen apart from all else: without one, a seed makes the program that it has always made."""
    rng = random.Random(f"features of {g.seed}")
    chosen = [name for name, share in FEATURES.items() if rng.random() < share]
    for first, second in APART:
        if first in chosen and second in chosen:
            chosen.remove(second)
    if "pause" in chosen:
        g.kinds += [states.Queue, states.Table, states.Random]
    if "failure" in chosen:
        # What a failed step has staged, the next one would take out.
        g.kinds = [kind for kind in g.kinds if kind is not states.Staging] or [variables.ResourceVariable]
    return chosen


def options(g):
    """Returns what the program says of them."""
    return {"features": g.features} if g.features else {}


def acts(g):
    """Returns what is done once, somewhere in the program."""
    return [act for name, act in (("unordered", unordered.act), ("failure", failures.fail)) if name in g.features]


# ---- runs


def scheduled(g, runs):
    if "pause" in g.features:
        pause(g, runs)
    return restart(g, runs) if "restart" in g.features else runs


def pause(g, runs):
    """The sessions rest for longer than servers with short limits keep what nobody needs."""
    for _ in range(g.rng.choice((1, 2))):
        runs.insert(g.rng.randint(2, len(runs) - 1), {"mode": "pause", "seconds": g.rng.choice((1.2, 2.2)), **NOTHING})


def restart(g, runs):
    """Servers are killed and started again. Sessions notice it, and new ones begin with new state."""
    at = g.rng.randint(2, len(runs) - 1)
    servers = g.rng.choice((["ps0"], ["ps1"], ["ps0", "ps1"]))
    lost = [dict(run) for run in runs[1:-1][: g.rng.choice((1, 2, 3))]]
    again = [dict(run) for run in (runs[0], *runs[max(1, at - 2) : at])]
    return [*runs[:at], {"mode": "restart", "servers": servers, **NOTHING}, *lost, {"mode": "renew", **NOTHING}, *again, *runs[at:]]


def looks(g, runs, sure):
    """Looks at the state after each run, of which a failed one determines some."""
    look = {"fetch": list(g.final_out), "targets": [], "feed": [], "sure": sure}
    if all(state in g.sure for state in g.states):
        look["settles"] = True
    return [runs[0], *(one for run in runs[1:-1] for one in (run, dict(look))), runs[-1]]
