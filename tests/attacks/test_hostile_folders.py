"""`starwire run`, installed as a command, in a folder that somebody else has filled, and with tasks that do not want to end."""

import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
# What starwire and the interpreter of a task import.
MODULES = ("json", "random", "socket", "selectors", "signal", "argparse", "subprocess", "sitecustomize", "usercustomize", "starwire", "starwire_run", "tensorflow")
COMMAND = "import sys\nfrom starwire_run.command import main\nsys.exit(main())\n"
TRAIN = """
import json, os, socket, sys
print("task", json.loads(os.environ["TF_CONFIG"])["task"]["type"], sys.argv[1:], flush=True)
"""
# Ignores every request to end, and leaves a child behind that does as well.
STAYS = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
child = os.fork()
if child:
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()} {child} ")
    if '"worker"' in os.environ["TF_CONFIG"]:
        while len(open(sys.argv[1]).read().split()) < 4:  # until the other has written
            time.sleep(0.01)
        os._exit(0)
time.sleep(600)
"""


@pytest.fixture
def folders(tmp_path):
    """Runs a script by `starwire run` in the hostile folder."""
    hostile, own = tmp_path / "hostile", tmp_path / "own"
    hostile.mkdir()
    own.mkdir()
    for name in MODULES:
        (hostile / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write({name!r} + ' ')\n")
    for name in ("starwire", "python", "python3", "sh"):
        (hostile / name).write_text(f"#!/bin/sh\ntouch {shlex.quote(str(tmp_path / 'executed'))}\n")
        (hostile / name).chmod(0o755)
    (own / "starwire").write_text(COMMAND)

    def call(text, *words, options=("--ps", "1", "--worker", "1"), **variables):
        (own / "train.py").write_text(text)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("STARWIRE_", "PYTHON", "TF_CONFIG"))}
        environment = {**kept, "PYTHONPATH": str(ROOT / "python"), **variables}
        return subprocess.run(
            [sys.executable, own / "starwire", "run", *options, own / "train.py", *words], cwd=hostile, env=environment, capture_output=True, text=True, timeout=60
        )

    call.executed = tmp_path / "executed"
    return call


def test_nothing_of_the_folder_is_executed(folders):
    words = ["{ps_hosts}", "$(touch executed)", "{job}{index};id", "{0.__class__}", "%s"]
    result = folders(TRAIN, *words, options=("--ps", "1", "--worker", "1", "--wait", "ps,worker"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert not folders.executed.exists(), folders.executed.read_text()
    lines = re.findall(r"task (ps|worker) (\[.*\])", result.stdout)
    assert sorted(job for job, _ in lines) == ["ps", "worker"], result.stdout
    for job, given in lines:
        assert re.fullmatch(r"\['\S+:\d+', '\$\(touch executed\)', '%s0;id', '\{0.__class__\}', '%%s'\]" % job, given), given
    # The logs are nobody else's.
    logs = Path(re.search(r"logs in (.+)", result.stdout + result.stderr)[1])
    assert stat.S_IMODE(logs.stat().st_mode) == 0o700, logs


@pytest.mark.parametrize("config", ["", "{", "[" * 100_000, '{"cluster": {"ps": ["a;id:1"]}}'])
def test_a_foreign_configuration_is_refused(folders, config):
    result = folders(TRAIN, TF_CONFIG=config)
    assert result.returncode == 2 and "TF_CONFIG is set" in result.stderr, result.stderr
    assert not folders.executed.exists()


def test_tasks_that_do_not_want_to_end(folders, tmp_path):
    pids = tmp_path / "pids"
    result = folders(STAYS, str(pids), options=("--ps", "1", "--worker", "1", "--grace", "0.5", "--linger", "0"))
    assert result.returncode == 0, result.stdout + result.stderr
    made = pids.read_text().split()
    assert len(made) == 4, made
    # A process that was killed ends when the kernel gets to it.
    wait_until(lambda: not any(map(alive, made)), 30, f"the end of {made}")


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
