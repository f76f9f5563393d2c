"""What some seeds contain besides: each feature is rare, so that many programs are free of all."""

import random

import failures
import large
import moments
import states
import unordered
import unusual
import variables

# And the share of the seeds. New ones come last, so that seeds keep theirs.
FEATURES = {
    "unordered": 0.15,  # unordered.py
    "failure": 0.08,  # failures.py
    "restart": 0.03,  # of parameter servers between two runs
    "pause": 0.03,  # between two runs
    "odd numbers": 0.08,
    "optimizers": 0.08,  # dense updates, and rare sparse ones
    "scatters": 0.08,  # scatters.py
    "reshaped": 0.05,  # unusual.py
    "uninitialised": 0.04,  # a run before the variables are initialised
    "master": 0.05,  # the session's target is a parameter server
    "names": 0.06,  # like those of starwire's nodes
    "in flight": 0.06,  # in_flight.py
    "flags": 0.06,  # moments.py
    "late references": 0.06,  # moments.py
    "large branches": 0.04,  # large.py
}
# Of two that do not go together, the first one stays.
APART = (("unordered", "failure"), ("restart", "failure"), ("restart", "master"), ("uninitialised", "failure"), ("uninitialised", "restart"), ("uninitialised", "pause"), ("uninitialised", "reshaped"), ("failure", "in flight"))
# What is done now and then in a program with the feature.
ACTS = {
    "optimizers": variables.train_dense,
    "scatters": variables.scatter,
    "reshaped": unusual.act,
    "flags": moments.flags,
    "late references": moments.late_references,
    "large branches": large.branches,
}
NOTHING = {"fetch": [], "targets": [], "feed": []}
OURS = ("starwire_feed_@", "starwire_fetch_@", "starwire_call_ps_0_@", "starwire_pivot_@", "starwire_constant_@", "starwire_branch_@", "starwire_nothing_@", "starwire_enter_@")
# Behind the name of another node.
BEHIND = ("starwire_copy/0", "starwire_read/0", "starwire_rows", "starwire_unique_0", "starwire_all", "starwire_wide", "_0", "S0", "_retval", "__sw")


def choose(g):
    """Returns the features of a seed. They are chosen apart from all else: without one, a seed makes the program that it has always made."""
    rng = random.Random(f"features of {g.seed}")
    chosen = [name for name, share in FEATURES.items() if rng.random() < share]
    for first, second in APART:
        if first in chosen and second in chosen:
            chosen.remove(second)
    if "pause" in chosen:
        g.kinds += [states.Queue, states.Table, states.Random]
    g.weights.update({name: 5 for name in chosen if name in ACTS})
    if "failure" in chosen:
        # What a failed step has staged, the next one would take out.
        g.kinds = [kind for kind in g.kinds if kind is not states.Staging] or [variables.ResourceVariable]
    if "uninitialised" in chosen:
        # What others do without their state would not be undone.
        g.kinds = [variables.ResourceVariable, variables.RefVariable]
    g.odd = "odd numbers" in chosen
    g.names = {}
    return chosen


def options(g):
    """Returns what the program says of them."""
    if not g.features:
        return {}
    made = {"features": g.features}
    if g.odd:
        made["odd"] = True
    if "master" in g.features:
        made["master"] = g.rng.choice(("ps0", "ps1"))
    return made


def acts(g):
    """Returns what is done once, somewhere in the program."""
    return [act for name, act in (("unordered", unordered.act), ("failure", failures.fail)) if name in g.features]


def name(g):
    """Names a record as starwire or TensorFlow names its own nodes, with each name once."""
    if g.next_id > 1 and g.chance(0.3):
        made = f"n{g.rng.randrange(g.next_id)}/{g.rng.choice(BEHIND)}"
    else:
        kind = g.rng.choice(OURS)
        g.names[kind] = g.names.get(kind, -1) + 1
        made = kind.replace("@", str(g.names[kind]))
    if made in g.names:
        return {}
    g.names[made] = True
    return {"name": made}


# ---- runs


def scheduled(g, runs):
    if "uninitialised" in g.features:
        # Which of several variables is missed first, by an operation with one code or the other, is not determined.
        runs = [dict(runs[1], codes=[5, 9, 13]), dict(runs[0], begins=True), *runs[1:]]
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
    # TensorFlow may fold what the first look read of a file.
    files = {f"{record['id']}:0" for record in g.final if record["op"] == "ReadFile"}
    look = {"fetch": [name for name in g.final_out if name not in files], "targets": [], "feed": [], "sure": sure}
    if all(state in g.sure for state in g.states):
        look["settles"] = True
    return [runs[0], *(one for run in runs[1:-1] for one in (run, dict(look))), runs[-1]]
