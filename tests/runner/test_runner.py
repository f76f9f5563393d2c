"""The runner itself: limits end what hangs and name it, failures reach what needs them, and shares leave nothing out."""

import contextlib
import dataclasses
import fcntl
import importlib.machinery
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import again  # noqa: E402
import deep  # noqa: E402
import jobs as all_jobs  # noqa: E402
import scheduler  # noqa: E402
import times  # noqa: E402
from jobs import Job  # noqa: E402

HANGING = """
import time
import pytest
import waits

@pytest.mark.limit(5)
def test_hangs():
    with waits.waiting("a peer: that never comes"):
        time.sleep(1000)

def test_goes_on():
    pass
"""


def made_runner():
    """The module scripts/test."""
    spec = importlib.util.spec_from_loader("runner", importlib.machinery.SourceFileLoader("runner", str(ROOT / "scripts/test")))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(jobs, folder):
    """Returns whether all passed, the verdicts by name, and the runs."""
    ended = []
    made = scheduler.Scheduler(jobs, folder, ended.append)
    return made.run(), made.done, {one.job.name: one for one in ended}


def pytest_of(folder, text, *arguments, **environment):
    path = folder / "test_made.py"
    path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{ROOT / 'tests/python'}", "STARWIRE_TEST_TIMES": str(folder / "times"), **environment}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_limits", *arguments, str(path)]
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

@pytest.mark.limit(5)
@pytest.mark.parametrize("wait", [lambda: wait_for("no/file"), lambda: wait_until(lambda: False, 1000, "a peer that never comes")], ids=["file", "condition"])
def test_waits(wait):
    wait()
"""


def test_what_a_test_waits_for_with_the_helpers_is_named(tmp_path):
    done = pytest_of(tmp_path, WAITING, PYTHONPATH=os.pathsep.join([str(HERE), str(ROOT / "tests/python")]))
    assert "waiting for a file: no/file" in done.stdout and "waiting for a condition: a peer that never comes" in done.stdout, done.stdout
    waited = [json.loads(line)["waited"] for line in (tmp_path / "times").read_text().splitlines()]
    assert [list(kinds) for kinds in waited] == [["a file"], ["a condition"]]


ORPHANED = """
import subprocess, sys

burns = "import time; until = time.process_time() + 0.5\\nwhile time.process_time() < until: pass\\nprint(flush=True); input()"
parent = subprocess.Popen(["bash", "-c", '"$0" -c "$1"; true', sys.executable, burns], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
parent.stdout.readline()

def test_loses_a_descendant():
    parent.kill()
    parent.wait()
"""


def test_no_test_took_less_than_nothing(tmp_path):
    """A descendant that another process adopts takes its time out of the sum."""
    done = pytest_of(tmp_path, ORPHANED)
    record = json.loads((tmp_path / "times").read_text())
    assert done.returncode == 0 and record["cpu"] >= 0, (record, done.stdout)


@pytest.mark.parametrize("mark", ["pytest.mark.deep", "pytest.mark.quick(lambda of: True)", "pytest.mark.deep(reason='')"])
def test_a_mark_that_leaves_tests_out_has_a_reason(tmp_path, mark):
    text = f"import pytest\n@pytest.mark.parametrize('of', [pytest.param(1, marks={mark})])\ndef test_made(of): pass\n"
    done = pytest_of(tmp_path, text, "-p", "marks")
    assert done.returncode == 4 and "test_made[1]: its mark" in done.stderr and "has no reason=" in done.stderr, done.stdout + done.stderr
    fine = pytest_of(tmp_path, text.replace(mark, "pytest.mark.deep(reason='much time')"), "-p", "marks")
    assert "1 deselected" in fine.stdout, fine.stdout


def test_a_job_that_hangs_is_ended_with_its_children(tmp_path):
    pid_file = tmp_path / "pid"
    passed, done, runs = run([Job("hangs", f"sleep 1000 & echo $! >'{pid_file}'; wait", limit=10)], tmp_path)
    assert not passed and done == {"hangs": "FAILED"}
    assert f"exceeded its limit of {10 * scheduler.PATIENCE:.0f} s" in runs["hangs"].log.read_text()
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
    service = Job("service", f"echo $$ >'{ready}.new'; mv '{ready}.new' '{ready}'; exec sleep 1000", ready_file=str(ready))
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
    command = f'echo $$ >"{pid_file}.new"; mv "{pid_file}.new" "{pid_file}"; exec sleep 1000'
    job = f"Job('waits', {command!r})"
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


def test_a_second_run_in_a_checkout_ends_at_once(tmp_path):
    """It would overwrite the logs and reports of the first one."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(HERE)!r}); import test_runner; test_runner.made_runner().lock({str(tmp_path / 'lock')!r}).__enter__()"]
    with made_runner().lock(tmp_path / "lock"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and f"process {os.getpid()} holds {tmp_path / 'lock'}; wait" in done.stderr, done.stderr
    subprocess.run(command, check=True, timeout=60)


def test_a_run_takes_the_lock_of_its_checkout():
    path = ROOT / "target/test/lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        with contextlib.suppress(BlockingIOError):  # the run that this test is part of has it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        done = subprocess.run([sys.executable, ROOT / "scripts/test", "abi"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"holds {path}" in done.stderr, done.stderr


def test_copies_of_a_job_with_files_of_its_own_run_one_after_the_other(tmp_path):
    copies = made_runner().repeated([Job("made", "false", cores=0, memory=0)], [], 3)
    passed, done, runs = run(copies, tmp_path)
    assert not passed and done == {"made": "FAILED", "made#2": "FAILED", "made#3": "FAILED"}, "a failure does not keep the next one from running"
    one, two, three = (runs[copy.name] for copy in copies)
    assert one.started + one.wall <= two.started and two.started + two.wall <= three.started


def test_copies_of_tests_run_beside_each_other():
    copies = made_runner().repeated([Job("python/made", "true", report="pytest"), Job("deploy", "true", report="pytest")], [], 3)
    assert {job.name: job.after for job in copies if job.after} == {"deploy#2": "deploy", "deploy#3": "deploy#2"}


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
    job = Job("made", f"cat >\"$STARWIRE_TEST_TIMES\" <<'END'\n{GTEST}\nEND", report="gtest")
    recorded = times.Times(tmp_path)
    _, _, runs = run([job], tmp_path)
    assert recorded.add(runs["made"])["tests"] == 3
    assert [test["test"] for test in recorded.failed["made"]] == ["Fails"]
    assert [(test["file"], test["test"], test["verdict"]) for test in recorded.tests] == [
        ("Suite", "Passes", "passed"), ("Suite", "Fails", "failed"), ("Suite", "Skips", "skipped")
    ]  # fmt: skip
    assert [test["wall"] for test in recorded.tests] == [0.25, 0.0, 0.0]


@pytest.mark.parametrize("report", ["pytest", "gtest", "nextest"])
def test_a_job_that_ends_well_without_a_test_has_failed(tmp_path, report):
    recorded = times.Times(tmp_path)
    _, _, runs = run([Job("made", "true", report=report)], tmp_path)
    assert recorded.add(runs["made"])["verdict"] == "FAILED"
    assert "made ended well, but with no test" in runs["made"].log.read_text()


@pytest.mark.parametrize(
    "command, words",
    [
        (f"cat >\"$STARWIRE_TEST_TIMES\" <<'END'\n{GTEST[:-20]}\nEND", "is cut off"),
        ("printf '[ RUN      ] Suite.Ends\\n'", "a test that failed or did not end"),
    ],
    ids=["report", "process"],
)
def test_a_gtest_whose_process_was_ended_has_failed(tmp_path, command, words):
    recorded = times.Times(tmp_path)
    _, _, runs = run([Job("made", command, report="gtest")], tmp_path)
    assert recorded.add(runs["made"])["verdict"] == "FAILED"
    assert words in runs["made"].log.read_text()


def test_a_pytest_whose_process_a_test_ended_has_failed(tmp_path):
    (tmp_path / "test_made.py").write_text("import os\n\ndef test_passes():\n    pass\n\ndef test_ends():\n    os._exit(0)\n")
    command = f"PYTHONPATH={shlex.quote(str(HERE))} {shlex.quote(sys.executable)} -m pytest -q -p pytest_limits -p no:cacheprovider {shlex.quote(str(tmp_path))}"
    recorded = times.Times(tmp_path)
    _, _, runs = run([Job("made", command, report="pytest")], tmp_path)
    assert recorded.add(runs["made"])["verdict"] == "FAILED", runs["made"].log.read_text()
    assert [(test["test"], test["verdict"]) for test in recorded.tests] == [("test_passes", "passed"), ("test_ends", "failed")]


def test_the_limits_of_a_container_are_the_budget(monkeypatch):
    files = {"cpu.max": [["max", "100000"], ["150000", "100000"]], "memory.max": [["max"], ["7000000000"]]}
    monkeypatch.setattr(scheduler, "_limits", files.get)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert scheduler.cores() == 1 and scheduler.memory() <= 5.0
    monkeypatch.setattr(scheduler, "_limits", lambda name: [])
    assert scheduler.cores() == 8


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


# How to run it again. ---------------------------------------------------------------------------------------------------


def failed_run(folder, report, records=(), log="", name="python/made", **options):
    """A run that failed, and the records of its failed tests."""
    made = Job(name, f"cat <<'END'\n{log}\nEND\nfalse", report=report, **options)
    _, _, runs = run([made], folder)
    return runs[name], [{"file": file, "test": test, "verdict": "failed"} for file, test in records]


def settings(monkeypatch, **environment):
    for name in ("TF_VERSION", "VENV", "CARGO", "PYTEST_ARGS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return all_jobs.Settings("/nowhere")


def test_the_command_for_a_failed_pytest_reaches_pytest(tmp_path, monkeypatch):
    """Through make, whose variables and shell take words and dollars apart."""
    name = "test_made[a b-$x-it's-grpc++]"
    failed, records = failed_run(tmp_path, "pytest", [("tests/test_made.py", name)])
    (command,) = again.commands(settings(monkeypatch), failed, records, is_deep=True)
    assert command.startswith("make test-deep ONLY=python/made PYTEST_ARGS="), command
    (tmp_path / "Makefile").write_text("test-deep:\n\t@echo $(ONLY)\n\t@printenv PYTEST_ARGS\n")
    told = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    made = settings(monkeypatch, PYTEST_ARGS=told[1]).pytest("made", "tests/python/test_made.py")
    assert told[0] == "python/made"
    words = shlex.split(made.command.rpartition("pytest_limits")[2])
    assert words == ["--rootdir", ".", f"tests/test_made.py::{name}"]


def test_other_arguments_of_pytest_choose_from_the_jobs_files(monkeypatch):
    made = settings(monkeypatch, PYTEST_ARGS="-k name").pytest("made", "tests/python/test_made.py")
    assert made.command.endswith("--rootdir . tests/python/test_made.py -k name")


def test_the_command_names_the_test_with_which_the_process_ended(tmp_path, monkeypatch):
    ended, _ = failed_run(tmp_path, "pytest")
    ended.times.with_name(ended.times.name + ".now").write_text("tests/test_made.py::test_ends")
    assert again.commands(settings(monkeypatch), ended, []) == ['make test ONLY=python/made PYTEST_ARGS="tests/test_made.py::test_ends"']


def test_the_command_has_what_make_was_told(tmp_path, monkeypatch):
    failed, _ = failed_run(tmp_path, "", name="shim", seed=7)
    told = settings(monkeypatch, TF_VERSION="2.15.1", VENV="/a b")
    assert again.commands(told, failed, []) == ["make test ONLY=shim TF_VERSION=2.15.1 VENV='/a b' SEED=7"]
    assert again.commands(settings(monkeypatch, TF_VERSION="2.15.1", VENV=".venvs/2.15.1"), failed, []) == ["make test ONLY=shim TF_VERSION=2.15.1 SEED=7"]


def test_the_command_for_a_failed_test_of_nextest(tmp_path, monkeypatch):
    failed, records = failed_run(tmp_path, "nextest", [("starwire-engine::engine", "tls::ends")], name="rust-verbs", environment={"STARWIRE_TEST_TRANSPORT": "verbs"})
    failed.job = dataclasses.replace(failed.job, command="cargo nextest run --profile verbs")
    (command,) = again.commands(settings(monkeypatch), failed, records)
    assert command == "STARWIRE_TEST_TRANSPORT=verbs cargo nextest run --profile verbs -E 'binary_id(=starwire-engine::engine) & test(=tls::ends)'"


CARGO = """
test star::passes ... ok
test star::fails ... FAILED
test fails - should panic ... FAILED
error: test failed, to rerun pass `-p starwire-engine --test engine`
test net::fails ... FAILED
error: test failed, to rerun pass `-p starwire-net --lib`
test passes ... ok
error: 2 targets failed:
    `-p starwire-engine --test engine`
    `-p starwire-net --lib`
"""


def test_the_commands_for_failed_tests_of_cargo(tmp_path, monkeypatch):
    failed, _ = failed_run(tmp_path, "", log=CARGO, name="rust")
    failed.job = dataclasses.replace(failed.job, command="cargo test --no-fail-fast --lib --bins --tests")
    program = "cargo test -p starwire-engine --test engine -- --exact"
    other = "cargo test -p starwire-net --lib -- --exact net::fails"
    assert again.commands(settings(monkeypatch), failed, []) == [f"{program} star::fails", f"{program} fails", other]


GTEST_LOG = """
[ RUN      ] Suite.Passes
[       OK ] Suite.Passes (250 ms)
[ RUN      ] Suite.Fails
[  FAILED  ] Suite.Fails, where GetParam() = 1 (3 ms)
[ RUN      ] Each/Suite.Ends/0
"""


def test_the_command_for_the_gtest_that_ended_its_process(tmp_path, monkeypatch):
    """It wrote no report."""
    failed, _ = failed_run(tmp_path, "gtest", log=GTEST_LOG, name="abi")
    recorded = times.Times(tmp_path)
    assert recorded.add(failed)["tests"] == 3 and recorded.count("passed") == 1
    assert again.commands(settings(monkeypatch), failed, recorded.failed["abi"]) == [
        "make test ONLY=abi GTEST_FILTER=Suite.Fails",
        "make test ONLY=abi GTEST_FILTER=Each/Suite.Ends/0",
    ]


def test_a_job_without_tests_is_run_again_as_a_whole(tmp_path, monkeypatch):
    failed, _ = failed_run(tmp_path, "gtest", name="abi#2")
    recorded = times.Times(tmp_path)
    recorded.add(failed)
    assert again.commands(settings(monkeypatch), failed, recorded.failed["abi#2"]) == ["make test ONLY=abi"]


def test_random_jobs_begin_with_the_given_seed():
    one, other = (deep.jobs(all_jobs.Settings("/nowhere", seed)) for seed in (123, 123456))
    assert not any("RANDOM" in job.command for job in one)
    differ = [job.name for job, same in zip(one, other) if job.command != same.command]
    assert differ == [job.name for job in one if job.seed == 123], "the others have no seed"
    assert {"fuzz-graphs", "histories", "fail-points", "simulate", "fuzz"} <= set(differ)


# Paths and limits of what the jobs call. --------------------------------------------------------------------------------


def test_gtest_is_told_a_path_with_spaces():
    show = 'show: ; @printf "%s\\n" $(GTEST_REPORT)'
    environment = {**os.environ, "STARWIRE_TEST_TIMES": "/a b/made's.times"}
    done = subprocess.run(["make", "-s", "-f", "tests/cc/tests.mk", "--eval", show, "show"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "--gtest_output=json:/a b/made's.times\n", done.stdout + done.stderr


def test_a_check_of_lint_that_hangs_is_ended_and_named(tmp_path):
    (tmp_path / "python3").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "python3").chmod(0o755)
    environment = {**os.environ, "LINT_LIMIT": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / "scripts/lint", "python", "shell"], env=environment, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and [line.split()[1] for line in lines] == ["python", "shell"], done.stdout + done.stderr
    assert all("exceeded its limit of 1 s" in line for line in lines)
