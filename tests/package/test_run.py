"""`starwire run`: local clusters, their output and their end, and mistakes in the command line."""

import errno
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launcher import ROOT, environment, port_finder, python, run, script


# The scripts do not need TensorFlow.

# `up` tells the other tasks that this one runs; `await_start` and `await_end` wait for another one, the latter until the launcher has seen its end.
TASK = """
import json, os, pathlib, signal, subprocess, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
job, index = task["type"], task["index"]
folder = pathlib.Path(__file__).parent

def up():
    own = folder / f"begun{os.getpid()}"
    own.write_text(str(os.getpid()))
    own.rename(folder / f"{job}{index}")

def await_start(name):
    while not (folder / name).exists():
        time.sleep(0.02)

def await_end(name):
    await_start(name)
    while pathlib.Path("/proc", (folder / name).read_text()).exists():
        time.sleep(0.02)
    time.sleep(1)  # the launcher has reaped it, and now decides what that means
"""
HANG = 60  # seconds after which a launcher that should have ended long ago hangs


@pytest.fixture
def cluster(tmp_path):
    """Runs a cluster of a small script; returns (exit status, output). The output names no files, so that it can be compared."""

    def call(text, *options, words=(), timeout=HANG, **variables):
        path = script(tmp_path, TASK + text)
        status, out, err = run(*options, "--logs", tmp_path / "logs", path, *words, timeout=timeout, **variables)
        assert err == "", err
        assert gone(path)
        return status, out

    return call


def gone(path):
    """Waits until no process is left behind: one that was killed ends when the kernel gets to it."""
    deadline = time.monotonic() + HANG
    while left_behind(path):
        assert time.monotonic() < deadline, left_behind(path)
        time.sleep(0.01)
    return True


def left_behind(path):
    """Processes that have the script in their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdigit() else []
            if os.fsencode(path) in words and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(folder.name)
        except OSError:
            continue
    return found


def test_ports_leave_room_for_the_second_one_of_each_task(monkeypatch):
    ports, asked = port_finder(), []
    monkeypatch.setattr(ports, "_is_free", lambda port: asked.append(port) or True)
    found = ports.free(3, {"STARWIRE_PORT_OFFSET": "7"})
    assert sorted(asked) == sorted(found + [port + 7 for port in found])
    with pytest.raises(OSError, match="only 0 of 3 ports are free"):
        ports.free(3, {"STARWIRE_PORT_OFFSET": "60000"})


def test_each_task_has_its_tf_config(cluster, tmp_path):
    status, out = cluster("print(os.environ['TF_CONFIG'], os.environ['STARWIRE_PROTOCOL'])", "--ps", 2, "--worker", 1, "--chief", "--evaluator", "--wait", "chief,worker,ps,evaluator")
    assert status == 0, out
    said = {match[1]: json.loads(match[2]) for match in re.finditer(r"^(\w+ \d) +\| (\{.*\}) grpc\+\+$", out, re.M)}
    assert set(said) == {"ps 0", "ps 1", "chief 0", "worker 0", "evaluator 0"}
    clusters = [config["cluster"] for config in said.values()]
    assert all(one == clusters[0] for one in clusters)
    assert {job: len(tasks) for job, tasks in clusters[0].items()} == {"ps": 2, "chief": 1, "worker": 1}
    addresses = [address for tasks in clusters[0].values() for address in tasks]
    assert len(set(addresses)) == 4 and all(re.fullmatch(r"localhost:\d+", address) for address in addresses)
    assert {name: f"{c['task']['type']} {c['task']['index']}" for name, c in said.items()} == {name: name for name in said}
    assert json.loads((tmp_path / "logs" / "evaluator-0.log").read_text().rpartition(" ")[0])["task"] == {"type": "evaluator", "index": 0}


def test_placeholders_and_other_braces(cluster):
    status, out = cluster("print(sys.argv[1:])", "--ps", 1, "--worker", 1, "--wait", "ps,worker", words=["--ps={ps_hosts}", "--at={job}:{index}", '{"a": {}}', "{chief_hosts}"])
    assert status == 0
    said = dict(re.findall(r"^(\w+ 0) +\| (\[.*\])$", out, re.M))
    assert re.fullmatch(r"""\['--ps=localhost:\d+', '--at=worker:0', '\{"a": \{\}\}', ''\]""", said["worker 0"]), out
    assert "--at=ps:0" in said["ps 0"]


def test_the_workers_end_the_run_and_parameter_servers_are_stopped(cluster):
    status, out = cluster("time.sleep(1000 if job == 'ps' else 0.1 + 0.3 * index)\nprint('bye')", "--ps", 1, "--worker", 2)
    assert status == 0
    assert out.count("| bye") == 2 and "worker 1 finished after" in out and out.splitlines()[-1].startswith("starwire | done after ")


def test_the_chief_ends_the_run_and_workers_may_finish(cluster):
    text = """
up()
if job == "chief":
    await_start("worker0"), await_start("worker1")
elif (job, index) == ("worker", 0):
    await_end("chief0")
else:
    time.sleep(1000)
print("bye", job, index)
"""
    status, out = cluster(text, "--ps", 1, "--worker", 2, "--chief", "--linger", 8)
    assert status == 0
    assert "starwire | chief finished; worker 0, worker 1: 8 s to finish too" in out
    assert "| bye worker 0" in out and "bye worker 1" not in out


def test_jobs_to_wait_for(cluster):
    text = "up()\nif job == 'ps': time.sleep(1000)\nif job == 'worker': await_end('chief0')\nprint('bye', job)"
    status, out = cluster(text, "--ps", 1, "--worker", 1, "--chief", "--linger", 0, "--wait", "chief,worker")
    assert status == 0 and "| bye worker" in out


@pytest.mark.parametrize("job, kind, status, words", [("worker", "sys.exit(7)", 7, "exit status 7"), ("ps", "os.kill(os.getpid(), 9)", 137, "killed by SIGKILL")])
def test_the_death_of_a_task_ends_the_run(cluster, job, kind, status, words, tmp_path):
    text = f"if (job, index) == ('{job}', 1):\n    print('the reason', end='', flush=True)\n    {kind}\ntime.sleep(1000)"
    got, out = cluster(text, "--ps", 2, "--worker", 2)
    assert got == status
    lines = out.splitlines()
    assert f"{job + ' 1':<8} | the reason" in lines
    assert lines[-1] == f"starwire | {job} 1 failed: {words}; its log is {tmp_path}/logs/{job}-1.log"


def test_ends_are_seen_though_the_launcher_was_started_without(tmp_path):
    path = script(tmp_path, TASK + "sys.exit(7)")
    words = [sys.executable, "-m", "starwire", "run", "--worker", "1", "--logs", f"{tmp_path}/logs", f"{path}"]
    result = subprocess.run(words, env=environment(ROOT / "python"), capture_output=True, text=True, timeout=HANG, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    assert result.returncode == 7 and "worker 0 failed: exit status 7" in result.stdout, result.stdout


def test_a_worker_that_fails_after_the_chief_counts(cluster):
    text = "up()\nif job == 'ps': time.sleep(1000)\nif job == 'worker': await_end('chief0')\nsys.exit(job == 'worker')"
    status, _ = cluster(text, "--ps", 1, "--worker", 1, "--chief", "--linger", HANG)
    assert status == 1


def interruptible():
    """A shell without job control, and nohup, start processes with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_until(process, word, count=1):
    """Reads the output until a word has come `count` times, and returns it. A launcher that hangs is killed, which ends its output."""
    seen = ""
    watchdog = threading.Timer(HANG, process.kill)
    watchdog.start()
    try:
        while seen.count(word) < count:
            line = process.stdout.readline()
            assert line, f"the output ended without {word!r}:\n{seen}"
            seen += line
        return seen
    finally:
        watchdog.cancel()


@pytest.fixture
def started(tmp_path):
    """Starts launchers that run in the background; each call returns once both tasks have said `ready`."""
    made = []

    def start(text, *options):
        path = script(tmp_path, TASK + text)
        words = [sys.executable, "-m", "starwire", "run", *map(str, options), "--logs", str(tmp_path / "logs"), str(path)]
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True, "preexec_fn": interruptible}
        made.append(subprocess.Popen(words, env=environment(ROOT / "python"), **how))
        read_until(made[-1], "ready", 2)
        return made[-1], path

    yield start
    for process in made:
        process.kill()
        process.communicate()


def test_ctrl_c_stops_workers_first_then_parameter_servers(started):
    text = """
if job == "worker":
    try:
        print("ready", flush=True)
        time.sleep(1000)
    except KeyboardInterrupt:
        time.sleep(0.5)  # the ps must not be stopped in this time
        print("saved", flush=True)
        sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: (print("ps ends", flush=True), sys.exit(0)))
print("ready", flush=True)
time.sleep(1000)
"""
    process, path = started(text, "--ps", 1, "--worker", 1, "--grace", HANG)
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=HANG)[0]
    assert process.returncode == 130
    assert out.index("worker 0 | saved") < out.index("ps 0     | ps ends")
    assert "starwire | stopping after SIGINT" in out and "failed" not in out
    assert gone(path)


def test_tasks_that_do_not_stop_are_killed_with_their_children(started):
    text = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", __file__])
print("ready", flush=True)
time.sleep(1000)
"""
    process, path = started(text, "--ps", 1, "--worker", 1, "--grace", 0.5)
    # A process that has just been started shows no command line for a moment.
    end = time.monotonic() + HANG
    while len(left_behind(path)) != 5 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(left_behind(path)) == 5
    process.terminate()
    out = process.communicate(timeout=HANG)[0]
    assert process.returncode == 143
    assert "worker 0 does not stop and is killed" in out and gone(path)


def test_what_a_shell_has_started_has_the_time_to_end_as_well(tmp_path):
    path = script(tmp_path, TASK + """
def leave(*_):
    await_start(f"end{index}")
    time.sleep(0.5)  # it must not be killed in this time
    print("saved", flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, leave)
print("ready", os.getppid(), flush=True)
time.sleep(1000)
""")
    launch = script(tmp_path, f"{shlex.quote(sys.executable)} {shlex.quote(str(path))}; true", "launch.sh")
    words = [sys.executable, "-m", "starwire", "run", "--worker", "1..2", "--grace", str(HANG), "--logs", f"{tmp_path}/logs", "bash", str(launch)]
    process = subprocess.Popen(words, env=environment(ROOT / "python"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=interruptible)

    def ask(number, index, shell):
        """Signals the launcher; the worker may save once its shell has ended."""
        process.send_signal(number)
        while Path("/proc", shell, "stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.02)
        (tmp_path / f"end{index}").touch()

    try:
        shells = [re.search(r"ready (\d+)", read_until(process, "ready"))[1]]
        process.send_signal(signal.SIGUSR1)
        shells.append(re.search(r"ready (\d+)", read_until(process, "ready"))[1])
        ask(signal.SIGUSR2, 1, shells[1])
        assert "worker 1 | saved" in read_until(process, "worker 1 was removed after")
        ask(signal.SIGTERM, 0, shells[0])
        out = process.communicate(timeout=HANG)[0]
        assert process.returncode == 143 and "worker 0 | saved" in out and "does not stop" not in out, out
        assert gone(path)
    finally:
        process.kill()
        process.communicate()


def test_a_second_ctrl_c_kills_at_once(started):
    text = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(1000)"
    process, path = started(text, "--ps", 1, "--worker", 1, "--grace", 1000)
    process.send_signal(signal.SIGINT)
    read_until(process, "stopping")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG)
    assert process.returncode == 130 and gone(path)


def test_a_terminal_that_goes_may_hang_up_twice(started, tmp_path):
    text = """
def save(*_):
    while not (folder / "save").exists():
        print("not yet saved", flush=True)
        time.sleep(0.02)
    print("saved", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(1000)
"""
    process, path = started(text, "--worker", 2, "--grace", HANG)
    process.send_signal(signal.SIGHUP)
    read_until(process, "not yet", 2)
    process.send_signal(signal.SIGHUP)
    read_until(process, "not yet", 40)  # the launcher goes on after the second one
    (tmp_path / "save").touch()
    out = process.communicate(timeout=HANG)[0]
    assert process.returncode == 129 and out.count("| saved") == 2 and gone(path)


def test_an_ended_task_keeps_its_number_while_its_children_live(started, tmp_path):
    """The number is that of their process group, which is killed in the end: no other group may have got it."""
    text = """
if index == 0:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", __file__], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print("ready", flush=True)
up()
await_start("end" if index == 2 else "worker2")
"""
    process, path = started(text, "--worker", 3)
    read_until(process, "finished after", 2)
    states = {}
    for index in (0, 1):
        stat = Path("/proc", (tmp_path / f"worker{index}").read_text(), "stat")
        states[index] = stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else None
    (tmp_path / "end").touch()
    out = process.communicate(timeout=HANG)[0]
    assert process.returncode == 0 and states == {0: "Z", 1: None}, (states, out)
    assert gone(path)


def test_a_number_that_may_be_of_others_gets_no_signal(monkeypatch):
    port_finder()
    from starwire_run import cluster

    task = cluster._Task("worker", 0, None, subprocess.Popen(["true"], start_new_session=True), None)
    os.waitid(os.P_PID, task.process.pid, os.WEXITED | os.WNOWAIT)
    asked = []
    monkeypatch.setattr(os, "killpg", lambda *what: asked.append(what))
    assert task.poll() == 0 == task.poll()
    task.bury()
    assert asked == []


def test_a_task_of_another_user_is_not_waited_for(monkeypatch):
    port_finder()
    from starwire_run import cluster

    def refuse(*_):
        raise PermissionError

    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    monkeypatch.setattr(os, "killpg", refuse)
    try:
        cluster._Task("worker", 0, None, process, None).bury()
        assert process.returncode is None
    finally:
        process.kill()
        process.wait()


def test_workers_are_added_and_removed(started, tmp_path):
    text = """
print("ready", os.environ["TF_CONFIG"], os.environ["STARWIRE_JOIN"], flush=True)
await_start("end" if job == "worker" and index == 0 else "never")
"""
    process, path = started(text, "--ps", 1, "--worker", "1..2")

    def change(number, words):
        process.send_signal(number)
        return read_until(process, words)

    change(signal.SIGUSR2, "no worker was added that could be removed")
    configs = []
    for _ in range(2):
        said = re.search(r"^worker 1 \| ready (\{.*\}) worker:2$", change(signal.SIGUSR1, "ready"), re.M)
        configs.append(json.loads(said[1]))
        change(signal.SIGUSR1, "there are already 2 workers")
        change(signal.SIGUSR2, "worker 1 was removed after")
    (tmp_path / "end").touch()
    out = process.communicate(timeout=HANG)[0]
    assert process.returncode == 0 and "done after" in out, out
    first = json.loads(re.search(r"ready (\{.*\}) ", (tmp_path / "logs" / "worker-0.log").read_text())[1])
    assert configs[0] == configs[1] and configs[0]["task"] == {"type": "worker", "index": 1}
    assert configs[0]["cluster"]["ps"] == first["cluster"]["ps"] and list(configs[0]["cluster"]["worker"]) == ["1"]
    assert configs[0]["cluster"]["worker"]["1"] not in first["cluster"]["worker"] and len(first["cluster"]["worker"]) == 1
    assert gone(path)


def test_the_tasks_of_a_killed_launcher_end(started):
    process, path = started("print('ready', flush=True)\ntime.sleep(1000)", "--ps", 1, "--worker", 1)
    process.kill()
    process.communicate(timeout=HANG)
    assert gone(path)


def test_output_is_prefixed_coloured_and_complete(tmp_path):
    text = "os.write(1, b'one\\ntw') if index == 0 else 0\ntime.sleep(0.2)\nos.write(2, b'o \\xff\\n10%\\r20%\\r\\n' + b'x' * 200000) if index == 0 else 0"
    path = script(tmp_path, TASK + text)
    result = subprocess.run([sys.executable, "-m", "starwire", "run", "--worker", "2", "--color", "always", "--logs", str(tmp_path / "logs"), str(path)], env=environment(ROOT / "python"), capture_output=True, timeout=HANG)
    lines = [line for line in result.stdout.split(b"\n") if b"worker 0 |" in line]
    prefix = b"\x1b[36mworker 0 |\x1b[0m "
    assert lines[:3] == [prefix + b"one", prefix + b"two \xff", prefix + b"20%"], lines[:3]
    assert all(line.startswith(prefix) for line in lines) and sum(line.count(b"x") for line in lines) == 200000
    assert (tmp_path / "logs" / "worker-0.log").read_bytes() == b"one\ntwo \xff\n10%\r20%\r\n" + b"x" * 200000


def test_quiet_and_a_closed_pipe(cluster, tmp_path):
    status, out = cluster("print('hello')", "--worker", 1, "--quiet")
    assert status == 0 and "hello" not in out and (tmp_path / "logs" / "worker-0.log").read_text() == "hello\n"
    path = script(tmp_path, TASK + "for i in range(3000):\n    print('line', i, flush=True)\nopen(sys.argv[1], 'w').write('done')")
    words = shlex.join([sys.executable, "-m", "starwire", "run", "--worker", "1", "--logs", f"{tmp_path}/logs", f"{path}", f"{tmp_path}/done"])
    command = f"{words} | head -3; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], env=environment(ROOT / "python"), capture_output=True, text=True, timeout=HANG)
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "done").read_text() == "done" and (tmp_path / "logs" / "worker-0.log").read_text().endswith("line 2999\n")
    path.write_text(path.read_text() + "\nsys.exit(3)")
    result = subprocess.run(["bash", "-c", command], env=environment(ROOT / "python"), capture_output=True, text=True, timeout=HANG)
    assert (result.returncode, result.stderr) == (3, "")


def unread(tmp_path, text, *options, **variables):
    """A launcher whose output nobody reads, once the pipe is full. Returns its process, and the end to read from."""
    path = script(tmp_path, TASK + text)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    words = [sys.executable, "-m", "starwire", "run", *options, "--logs", f"{tmp_path}/logs", f"{path}"]
    process = subprocess.Popen(words, env=environment(ROOT / "python", **variables), stdout=writer, preexec_fn=interruptible)
    while select.select([], [writer], [], 0)[1]:
        time.sleep(0.02)
    os.close(writer)
    return process, reader


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_is_slow_gets_everything(tmp_path, unbuffered):
    process, reader = unread(tmp_path, "for i in range(3000 * (index == 0)):\n    print('line', i, 'x' * 100)", "--worker", "1..2", PYTHONUNBUFFERED=unbuffered)
    for _ in range(3):
        process.send_signal(signal.SIGUSR2)
        time.sleep(0.02)
    with open(reader) as lines:
        assert sum("| line" in line and line.endswith("x" * 100 + "\n") for line in lines) == 3000
    assert process.wait(HANG) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_reader_that_does_not_read_keeps_no_run_from_stopping(tmp_path, number):
    process, reader = unread(tmp_path, "while True:\n    print('x' * 100)", "--worker", "1", "--grace", "5")
    process.send_signal(number)
    try:
        assert process.wait(HANG) == 128 + number
    finally:
        process.kill()
        os.close(reader)


def test_a_full_disk_that_has_room_again_gets_the_rest(tmp_path, monkeypatch):
    """Of the output; and a log that cannot be closed is reported as one that cannot be written."""
    port_finder()
    from starwire_run import cluster, output

    write, errors = os.write, [OSError(errno.ENOSPC, "full")]
    with open(tmp_path / "out", "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        printer = output.Printer(["worker 0"], "never", False)
        monkeypatch.setattr(output.os, "write", lambda *words: write(*words) if not errors else (_ for _ in ()).throw(errors.pop()))
        printer.say("lost")
        printer.say("there")
        monkeypatch.undo()
    assert (tmp_path / "out").read_text() == "starwire | there\n"
    task = cluster._Task("worker", 0, "", None, open(tmp_path / "log", "wb", buffering=0))
    os.close(task.log.fileno())
    assert task.close_log().errno == errno.EBADF and task.close_log() is None


def test_a_terminal_that_goes_does_not_end_the_run(tmp_path):
    import pty

    path = script(tmp_path, TASK + "up()\nawait_start('gone')\nprint('more', flush=True)\nopen(sys.argv[1], 'w').write('done')")
    words = [sys.executable, "-m", "starwire", "run", "--worker", "1", "--logs", f"{tmp_path}/logs", f"{path}", f"{tmp_path}/done"]
    leader, follower = pty.openpty()
    how = {"stdin": subprocess.DEVNULL, "stdout": follower, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(words, env=dict(environment(ROOT / "python"), TERM="xterm"), **how)
    os.close(follower)
    os.read(leader, 1)
    os.close(leader)
    (tmp_path / "gone").touch()
    err = process.communicate(timeout=HANG)[1]
    assert (process.returncode, err) == (0, "")
    assert (tmp_path / "done").read_text() == "done" and (tmp_path / "logs" / "worker-0.log").read_text() == "more\n"


def test_a_full_disk_does_not_end_the_run(cluster, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").symlink_to("/dev/full")
    status, out = cluster("print('one', flush=True)\ntime.sleep(0.3)\nprint('two')", "--worker", 1)
    assert status == 0 and "| one" in out and "| two" in out, out
    assert out.count("starwire | worker 0: its log lacks output: [Errno 28] No space left on device") == 1, out


def test_progress_on_a_terminal(tmp_path):
    import pty

    path = script(tmp_path, TASK + "print('begun', flush=True)\nawait_start('go')")
    leader, follower = pty.openpty()
    process = subprocess.Popen([sys.executable, "-m", "starwire", "run", "--ps", "1", "--worker", "1", "--logs", str(tmp_path / "logs"), str(path)], env=dict(environment(ROOT / "python"), TERM="xterm"), stdin=subprocess.DEVNULL, stdout=follower, stderr=follower, start_new_session=True)
    os.close(follower)
    seen = b""
    try:
        while True:
            data = os.read(leader, 65536)
            if not data:
                break
            seen += data
            if b"ps 0 up of 1" in seen:
                (tmp_path / "go").touch()
    except OSError:
        pass
    os.close(leader)
    assert process.wait(timeout=HANG) == 0
    assert b"ps 0 up of 1" in seen and b"worker 1 ended of 1" in seen, seen
    assert b"\x1b[36mps 0     |\x1b[0m begun" in seen and b"\r\x1b[K" in seen


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "what should be run? Give SCRIPT.py, -m MODULE or a command"),
        (["--protocol", "grcp", "x.py"], "starwire: --protocol is 'grcp', which is not a protocol: use grpc++, star_server, star_server_lite, grpc+verbs, or grpc for TensorFlow's own"),
        (["--protocol", "grpc+gdr", "x.py"], "starwire: --protocol is 'grpc+gdr', which starwire does not have: use grpc+verbs"),
        (["nowhere.py"], "'nowhere.py' does not exist"),
        (["no-such-command"], "'no-such-command' is neither a Python script (.py) nor a command on PATH"),
        (["--ps", "2", __file__], "a cluster needs a worker or a chief: give --worker N or --chief"),
        (["--ps", "x", __file__], "argument --ps: 'x' is not a number from 0 to 256"),
        (["--worker", "3..2", __file__], "argument --worker: '3..2': 3 is more than 2"),
        (["--worker", "1", "--wait", "boss", __file__], "--wait: 'boss' is not a job: use ps, chief, worker, evaluator"),
        (["--worker", "1", "--wait", "ps", __file__], "--wait: this cluster has no ps"),
        (["--quiet", __file__], "--quiet needs a local cluster: --ps and --worker"),
    ],
)
def test_mistakes_are_explained(words, message):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.endswith(f"starwire run: error: {message}\n"), err


def test_folders_are_scripts_only_if_python_runs_them(tmp_path):
    (tmp_path / "sh").mkdir()
    (tmp_path / "job").mkdir()
    script(tmp_path / "job", "print('a folder')", "__main__.py")
    assert run("sh", "-c", "echo a command", cwd=tmp_path) == (0, "a command\n", "")
    assert run("job", cwd=tmp_path) == (0, "a folder\n", "")


def test_what_cannot_be_run_is_explained(tmp_path):
    script(tmp_path, "neither a shebang nor a program", "tool").chmod(0o755)
    code, out, err = run(tmp_path / "tool")
    assert (code, out) == (2, "") and err.endswith("tool' cannot be run: Exec format error\n"), err


def test_the_working_directory_stays_on_the_path(tmp_path):
    script(tmp_path, "print('helped')", "helper.py")
    (tmp_path / "sub").mkdir()
    path = script(tmp_path / "sub", "import helper")
    assert run(path, paths=(ROOT / "python", ""), cwd=tmp_path) == (0, "helped\n", "")


def test_a_cluster_inside_a_cluster_is_refused():
    code, _, err = run("--worker", "1", __file__, TF_CONFIG="{}")
    assert code == 2 and "TF_CONFIG is set, which describes another cluster" in err


def test_the_command_itself_loads_no_tensorflow():
    code, out, err = python("-X", "importtime", "-m", "starwire", "--version")
    assert code == 0 and re.fullmatch(r"starwire \d+\.\d+\.\d+\n", out)
    assert "tensorflow" not in err and "starwire_run.command" in err
