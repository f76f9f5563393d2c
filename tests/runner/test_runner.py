"""The runner itself: limits end what hangs and name it, failures reach what needs them, and shares leave nothing out."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import deep  # noqa: E402
import jobs as all_jobs  # noqa: E402
import scheduler  # noqa: E402
import times  # noqa: E402
from jobs import Job  # noqa: E402

HANGING = """
import time
import pytest
import waits

@pytest.mark.limit(2)
def test_hangs():
    with waits.waiting("a peer: that never comes"):
        time.sleep(1000)

def test_goes_on():
    pass
"""


def run(jobs, folder):
    """Returns whether all passed, the verdicts by name, and the runs."""
    ended = []
    made = scheduler.Scheduler(jobs, folder, ended.append)
    return made.run(), made.done, {one.job.name: one for one in ended}


def pytest_of(folder, text, **environment):
    path = folder / "test_made.py"
    path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(HERE), "STARWIRE_TEST_TIMES": str(folder / "times"), **environment}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_limits", str(path)]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)


def test_a_test_that_hangs_ends_with_what_it_waited_for(tmp_path):
    done = pytest_of(tmp_path, HANGING)
    assert done.returncode == 1 and "waiting for a peer: that never comes" in done.stdout, done.stdout
    records = [json.loads(line) for line in (tmp_path / "times").read_text().splitlines()]
    assert [(record["test"], record["verdict"]) for record in records] == [("test_hangs", "failed"), ("test_goes_on", "passed")]
    assert "a peer" in records[0]["waited"]


WAITING = """
import pytest
from waiting import wait_for, wait_until

@pytest.mark.limit(2)
@pytest.mark.parametrize("wait", [lambda: wait_for("no/file"), lambda: wait_until(lambda: False, 1000, "a peer that never comes")], ids=["file", "condition"])
def test_waits(wait):
    wait()
"""


def test_what_a_test_waits_for_with_the_helpers_is_named(tmp_path):
    done = pytest_of(tmp_path, WAITING, PYTHONPATH=os.pathsep.join([str(HERE), str(ROOT / "tests/python")]))
    assert "waiting for a file: no/file" in done.stdout and "waiting for a condition: a peer that never comes" in done.stdout, done.stdout
    waited = [json.loads(line)["waited"] for line in (tmp_path / "times").read_text().splitlines()]
    assert [list(kinds) for kinds in waited] == [["a file"], ["a condition"]]


def test_a_job_that_hangs_is_ended_with_its_children(tmp_path):
    pid_file = tmp_path / "pid"
    passed, done, runs = run([Job("hangs", f"sleep 1000 & echo $! >'{pid_file}'; wait", limit=3)], tmp_path)
    assert not passed and done == {"hangs": "FAILED"}
    assert f"exceeded its limit of {3 * scheduler.PATIENCE:.0f} s" in runs["hangs"].log.read_text()
    child = Path("/proc", pid_file.read_text().strip(), "stat")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while child.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)  # the kernel ends it soon after the signal


def test_a_service_that_is_never_ready_fails_what_needs_it(tmp_path):
    service = Job("service", "sleep 1000", limit=1, ready_file=str(tmp_path / "never"))
    passed, done, _ = run([service, Job("user", "true", needs=("service",)), Job("other", "true")], tmp_path)
    assert not passed and done == {"service": "FAILED", "user": "not run", "other": "passed"}


def test_a_service_runs_until_the_others_have_ended(tmp_path):
    ready = tmp_path / "ready"
    service = Job("service", f"echo $$ >'{ready}'; exec sleep 1000", ready_file=str(ready))
    passed, done, runs = run([service, Job("user", f"kill -0 $(cat '{ready}')", needs=("service",))], tmp_path)
    assert passed and done == {"service": "passed", "user": "passed"}, runs["user"].log.read_text()
    assert not Path("/proc", ready.read_text().strip()).exists()


def test_signals_that_the_caller_ignores_are_not_ignored_in_jobs(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import scheduler, subprocess; scheduler.default_signals(); print(subprocess.run(['grep', 'SigIgn', '/proc/self/status'], capture_output=True, text=True).stdout)"
    ignoring = lambda: [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)]  # noqa: E731
    done = subprocess.run([sys.executable, "-c", code], preexec_fn=ignoring, capture_output=True, text=True, timeout=60, check=True)
    ignored = int(done.stdout.split()[1], 16)
    assert not ignored & (1 << signal.SIGINT - 1 | 1 << signal.SIGHUP - 1), done.stdout


def test_jobs_end_when_the_terminal_goes_away(tmp_path):
    pid_file = tmp_path / "pid"
    job = f"Job('waits', 'echo $$ >{pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep 1000')"
    code = f"import pathlib, sys; sys.path.insert(0, {str(HERE)!r}); import scheduler; from jobs import Job; scheduler.default_signals(); scheduler.Scheduler([{job}], pathlib.Path({str(tmp_path)!r}), print).run()"
    with subprocess.Popen([sys.executable, "-c", code], preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)) as runner:
        while not pid_file.exists():
            time.sleep(0.01)
        runner.send_signal(signal.SIGHUP)
        assert runner.wait() == 129
    assert not Path("/proc", pid_file.read_text().strip()).exists()


def test_no_job_needs_what_is_not_there():
    settings = all_jobs.Settings("/nowhere")
    prepared = all_jobs.preparation(settings)
    for others in (all_jobs.quick(settings), deep.jobs(settings)):
        names = [job.name for job in prepared + others]
        assert len(names) == len(set(names))
        assert {need for job in others for need in job.needs} <= set(names)


@pytest.mark.parametrize("count", [1, 7, 20, 100])
def test_shares_of_the_deep_suite_leave_nothing_out(count):
    every = sorted(job.name for job in deep.jobs(all_jobs.Settings("/nowhere")))
    shares = [deep.share(deep.jobs(all_jobs.Settings("/nowhere")), f"{number}/{count}") for number in range(1, count + 1)]
    assert sorted(job.name for share in shares for job in share) == every


@pytest.mark.parametrize("shard", ["0/3", "4/3", "x", "1", "1/0", "-1/3"])
def test_a_wrong_share_is_an_error(shard):
    with pytest.raises(SystemExit, match="is not K/N"):
        deep.share([], shard)


def test_a_share_without_jobs_is_an_error():
    done = subprocess.run([sys.executable, ROOT / "scripts/test", "--deep", "--shard", "1000/1000"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "the share 1000/1000 has no jobs" in done.stderr, done.stderr


def test_an_unknown_job_is_an_error():
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "test"), "rust", "nonsense"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "there is no job nonsense; the stages are" in done.stderr


# Reports. --------------------------------------------------------------------------------------------------------------

GTEST = """{"testsuites": [{"name": "Suite", "testsuite": [
  {"name": "Passes", "result": "COMPLETED", "time": "0.25s"},
  {"name": "Fails", "result": "COMPLETED", "time": "0s", "failures": [{"failure": "told so"}]},
  {"name": "Skips", "result": "SKIPPED", "time": "0s"}
]}]}"""
NEXTEST = '<testsuites><testsuite><testcase classname="crate" name="test" time="0.5"/></testsuite></testsuites>'


def test_each_test_of_a_gtest_is_recorded(tmp_path):
    job = Job("made", f"cat >$STARWIRE_TEST_TIMES <<'END'\n{GTEST}\nEND", report="gtest")
    recorded = times.Times(tmp_path)
    _, _, runs = run([job], tmp_path)
    assert recorded.add(runs["made"])["tests"] == 3
    assert [(test["file"], test["test"], test["verdict"]) for test in recorded.tests] == [
        ("Suite", "Passes", "passed"), ("Suite", "Fails", "failed"), ("Suite", "Skips", "skipped")
    ]  # fmt: skip
    assert [test["wall"] for test in recorded.tests] == [0.25, 0.0, 0.0]


def test_the_report_of_an_earlier_nextest_does_not_stand_for_a_later_one(tmp_path):
    path = times.junit(tmp_path, "default")
    path.parent.mkdir(parents=True)
    path.write_text(NEXTEST)
    recorded = times.Times(tmp_path)
    _, _, runs = run([Job("made", "true", report="nextest")], tmp_path)
    recorded.add(runs["made"])
    path.write_text(NEXTEST)
    recorded.add(runs["made"])
    recorded.add(runs["made"])
    assert [test["test"] for test in recorded.tests] == ["(all)", "test", "(all)"]
