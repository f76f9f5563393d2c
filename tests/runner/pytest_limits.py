"""A pytest plugin: records the time of each test, and ends a test that hangs with an error that names what it waited for.

scripts/test loads it (`-p pytest_limits`). It writes a line of JSON per test to $STARWIRE_TEST_TIMES, and the name of the running test to
$STARWIRE_TEST_TIMES.now. Python 3.7 must be able to run it, for TensorFlow 1.15.
"""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback

import pytest

import waits

# Seconds that a test may take, with its fixtures; `@pytest.mark.limit(seconds)` sets another limit. A limit ends a hang: none is a measurement.
LIMIT = float(os.environ.get("STARWIRE_TEST_LIMIT", "240"))
# If the limit's exception does not end the test, the process ends this much later.
GRACE = 60
PATH = os.environ.get("STARWIRE_TEST_TIMES")
TICKS = os.sysconf("SC_CLK_TCK")


class TestTimeout(BaseException):
    """Not an Exception, so that no test catches it."""

    __test__ = False


def _limit_of(item):
    marker = item.get_closest_marker("limit")
    return float(marker.args[0]) if marker else LIMIT


def _cpu():
    """CPU seconds of this process and all its living and ended descendants."""
    children, own = {}, {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat") as stat:
                fields = stat.read().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(name))
        own[int(name)] = sum(map(int, fields[11:15])) / TICKS
    total, left = 0.0, [os.getpid(), *filter(None, [_zygote()])]
    while left:
        pid = left.pop()
        total += own.get(pid, 0.0)
        left += children.get(pid, [])
    return total


def _zygote():
    """The process that forks this session's tasks, if it is not a child of ours."""
    harness = sys.modules.get("cluster")
    return getattr(harness, "shared_zygote_pid", None)


def pytest_configure(config):
    config.addinivalue_line("markers", "limit(seconds): the test may take longer than others")
    signal.signal(signal.SIGALRM, _expire)


def _expire(_signal, frame):
    waited = f", waiting for {', then '.join(waits.current)}" if waits.current else ""
    stack = "".join(traceback.format_stack(frame)[-6:])
    raise TestTimeout(f"the test exceeded its limit{waited}; it was at\n{stack}")


def pytest_runtest_logstart(nodeid, location):
    if PATH:
        with open(PATH + ".now", "w") as now:
            now.write(nodeid)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    waits.seconds.clear()
    limit = _limit_of(item)
    signal.setitimer(signal.ITIMER_REAL, limit)
    faulthandler.dump_traceback_later(limit + GRACE, exit=True, file=sys.__stderr__)
    started, cpu = time.monotonic(), _cpu()
    item._starwire_verdict = "passed"
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
    if PATH:
        # What another process has waited for, or adopted, takes its time out of the sum: then the test's own time is not known, but not negative.
        spent = max(0.0, _cpu() - cpu)
        record = {
            "file": item.nodeid.split("::")[0], "test": item.nodeid.split("::", 1)[-1], "wall": round(time.monotonic() - started, 3), "cpu": round(spent, 3),
            "waited": {kind: round(seconds, 3) for kind, seconds in waits.seconds.items()}, "verdict": item._starwire_verdict,
        }
        with open(PATH, "a") as out:
            out.write(json.dumps(record) + "\n")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.failed:
        item._starwire_verdict = "failed"
    elif report.skipped and item._starwire_verdict == "passed":
        item._starwire_verdict = "skipped"
