"""What tests wait for, with a limit that names it; the error of a test that hangs and target/test/times.json name it as well."""

import os
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "runner"))

from waits import waiting  # noqa: E402

HANGS = 30  # seconds after which something that takes a tenth of one hangs


def wait_for(path, timeout=60):
    deadline = time.monotonic() + timeout
    with waiting(f"a file: {path}"):
        while not os.path.exists(path):
            assert time.monotonic() < deadline, f"{path} did not appear within {timeout} s"
            time.sleep(0.01)


def wait_until(condition, timeout, what):
    deadline = time.monotonic() + timeout
    with waiting(f"a condition: {what}"):
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
            time.sleep(0.05)
