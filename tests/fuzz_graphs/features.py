"""What some seeds contain besides: each feature is rare, so that many programs are free of all."""

import random

import unordered

# And the share of the seeds. New ones come last, so that seeds keep theirs.
FEATURES = {
    "unordered": 0.15,  # unordered.py
}


def choose(g):
    """Returns the features of a seed. They are chosen apart from all else: without one, a seed makes the program that it has always made."""
    rng = random.Random(f"features of {g.seed}")
    return [name for name, share in FEATURES.items() if rng.random() < share]


def options(g):
    """Returns what the program says of them."""
    return {"features": g.features} if g.features else {}


def acts(g):
    """Returns what is done once, somewhere in the program."""
    return [act for name, act in (("unordered", unordered.act),) if name in g.features]
