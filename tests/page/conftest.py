"""A real job, whose numbers the tests of this folder look at."""

import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "python"), str(ROOT / "tests" / "python")]

from own_ports import free_port  # noqa: E402


@pytest.fixture(scope="session")
def address(tmp_path_factory):
    """The address of a worker that trains with two parameter servers."""
    folder = tmp_path_factory.mktemp("job")
    port, *others = (free_port() for _ in range(3))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT / "python")}
    script = str(Path(__file__).with_name("job.py"))
    hosts = [f"localhost:{each}" for each in (port, *others)]
    tasks = []
    for task in ("worker:0", "ps:0", "ps:1"):
        log = (folder / task.replace(":", "-")).open("w")
        tasks.append(subprocess.Popen([sys.executable, script, task, *hosts], env=environment, cwd=folder, stdout=log, stderr=log))
    try:
        deadline = time.monotonic() + 240
        while True:
            assert all(task.poll() is None for task in tasks), [path.read_text() for path in folder.iterdir()]
            assert time.monotonic() < deadline, [path.read_text() for path in folder.iterdir()]
            try:
                text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
            except OSError:
                text = ""
            if len(re.findall(r'^starwire_peer_bytes_sent_total\{.*peer="/job:ps/.* \d{5,}$', text, re.M)) == 2:
                break
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        for task in tasks:
            task.kill()
            task.wait()
