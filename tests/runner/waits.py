"""What a test waits for: named in the error of a test that hangs (pytest_limits.py), and counted in target/test/times.json."""

import contextlib
import time

current = []  # innermost last
seconds = {}  # by kind: what is before the first colon


@contextlib.contextmanager
def waiting(what):
    started = time.monotonic()
    current.append(what)
    try:
        yield
    finally:
        current.remove(what)
        kind = what.split(":")[0]
        seconds[kind] = seconds.get(kind, 0.0) + time.monotonic() - started
