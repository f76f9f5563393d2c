"""Defines which differences between runs count."""

DEADLINE = 4
CANCELLED, ABORTED, UNAVAILABLE = 1, 10, 14
# The codes that TensorFlow's sessions recover from. Stock gRPC has a third one for the step that meets a restarted server, by a race.
RECOVERABLE = {ABORTED, UNAVAILABLE}
LOST = "a server has been restarted"


def summary(run):
    """The part of a run that must be equal: the bits of every value, or the kind of error."""
    if run[0] == "ok":
        return run
    return ("error", run[1], run[2])


def hangs(runs):
    return any(run[0] == "error" and run[2] == DEADLINE for run in runs)


def mask(first, second):
    """Compares two runs over stock gRPC; returns for each run True (compare everything), a list of flags per fetch, or False."""
    if len(first) != len(second):
        return None
    out = []
    for a, b in zip(first, second):
        if summary(a) == summary(b):
            out.append(True)
        elif a[0] == b[0] == "ok" and len(a[1]) == len(b[1]):
            out.append([x == y for x, y in zip(a[1], b[1])])
        else:
            out.append(False)
    return out


def agreement(first, others):
    """As `mask`, for any number of runs over stock gRPC: what all of them agree on."""
    agreed = [True] * len(first)
    for other in others:
        found = mask(first, other)
        if found is None:
            return None
        agreed = [both(one, more) for one, more in zip(agreed, found)]
    return agreed


def both(one, other):
    if isinstance(one, bool) or isinstance(other, bool):
        return other if one is True else one if other is True else False
    return [a and b for a, b in zip(one, other)]


def alike(runs, results, is_stock):
    """Returns the results with one kind of error for all that say that a server has been restarted, and for those that a run calls equal."""
    out, is_lost = [], False
    for run, result in zip(runs, results):
        is_lost = {"restart": True, "renew": False}.get(run.get("mode"), is_lost)
        if is_lost and result[0] == "error" and result[2] in (RECOVERABLE | {CANCELLED} if is_stock else RECOVERABLE):
            result = ("error", LOST, UNAVAILABLE, result[3])
        elif result[0] == "error" and result[2] in run.get("codes", ()):
            result = ("error", "one of several", run["codes"][0], result[3])
        out.append(result)
    return out + results[len(out) :]


def difference(stock, other, agreed, runs=()):
    """Describes the first run in which `other` differs from `stock`, or returns None. `runs` are the program's, if one of them settles what those before it
    have left open."""
    settled = known = True
    failed = None  # the run after which the state was not settled any more
    for number, (a, same) in enumerate(zip(stock, agreed)):
        run = runs[number] if number < len(runs) else {}
        if run.get("mode") == "renew" or run.get("begins"):
            settled = known = True
        if not known:
            continue  # state may differ
        if number >= len(other):
            return f"run {number} is missing"
        b = other[number]
        if b[0] == "error" and b[2] == DEADLINE and not (a[0] == "error" and a[2] == DEADLINE):
            return f"run {number}: hangs"
        if a[1] == LOST:
            if b[0] == "error" and b[1] != LOST:
                return f"run {number}: {show(b)} here, which a session does not recover from"
            settled = False  # a step need not reach a server that has only to compute something
            continue
        if same is False:
            known = False
            continue
        if a[0] != b[0] or a[0] == "error":
            if not settled:
                continue
            if summary(a) != summary(b):
                return f"run {number}: {show(a)} over grpc, {show(b)} here"
            # Stock TensorFlow does not determine how much of the failed step the other servers ran.
            settled, failed = False, number
            continue
        after_failure = failed == number - 1
        if not settled and not after_failure:
            continue
        # Steps in flight have results of their own, and none is sure.
        sure = [settled or name in run["sure"] for name in run["fetch"]] if "sure" in run else [settled] * len(a[1])
        for k, (x, y) in enumerate(zip(a[1], b[1])):
            if sure[k] and (same is True or same[k]) and x != y:
                return f"run {number}, fetch {k}: {show_value(x)} over grpc, {show_value(y)} here"
        if after_failure and run.get("settles"):
            settled = True
        if same is not True:
            known = False
    return None


def show(run):
    return run[1] + ": " + run[3][:300] if run[0] == "error" else f"{len(run[1])} values"


def show_value(value):
    import numpy as np

    if value is None:
        return "nothing"
    dtype, shape, data = value
    if dtype == "object":
        return f"strings{list(shape)} {data[:80]!r}"
    try:
        text = str(np.frombuffer(data, dtype=np.dtype(dtype))[:8])
    except TypeError:
        text = data[:16].hex()
    return f"{dtype}{list(shape)} {text}"
