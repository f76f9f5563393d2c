"""Simulated workers (benches/swarm) against real parameter servers: two workers over each protocol, and the failures that a run must report.

Needs STARWIRE_LIBRARY and STARWIRE_SWARM; `make test ONLY=swarm` sets both.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

BENCH = pathlib.Path(__file__).resolve().parents[2] / "benches" / "swarm"
sys.path.insert(0, str(BENCH))

import record  # noqa: E402  (first, because it sets up the environment)
import record_star  # noqa: E402
import model  # noqa: E402
import ps  # noqa: E402
import reconnect  # noqa: E402
import run  # noqa: E402
from cluster import BenchError  # noqa: E402

SWARM, LIBRARY = os.environ["STARWIRE_SWARM"], os.environ["STARWIRE_LIBRARY"]
WORKERS, STEPS, BATCH, TIMEOUT = 2, 20, 8, 60
FLOAT, INT64 = 1, 9


def record_by(recorder, out, *more):
    """Runs a recorder's command in a fork of this process, which has imported TensorFlow and started no thread."""

    def command():
        sys.argv = [recorder.__file__, str(out), "--batch", str(BATCH), "--steps", "2", *more]
        recorder.main()

    running = multiprocessing.get_context("fork").Process(target=command, daemon=True)
    running.start()
    running.join(2 * TIMEOUT)
    assert running.exitcode == 0, running
    return out


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    return record_by(record, tmp_path_factory.mktemp("swarm") / "ctr.recording")


@pytest.fixture(scope="module")
def star_recording(tmp_path_factory):
    return record_by(record_star, tmp_path_factory.mktemp("swarm") / "ctr.star.recording", "--library", LIBRARY)


CONTROL = pytest.mark.deep(reason="stock gRPC is the control: nothing of the library runs")


@pytest.fixture(params=[pytest.param("grpc", marks=CONTROL), "grpc++", "star_server"])
def played(request):
    """A protocol, and the recording to play over it."""
    return request.param, request.getfixturevalue("star_recording" if request.param == "star_server" else "recording")


def expected(recording):
    return [step["adds"] for step in record.load(recording)["steps"]]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Servers by protocol, which are kept until a test closes them. One of stock grpc fails steps of workers whose address it knows from others."""
    made, logs = {}, tmp_path_factory.mktemp("servers")

    def make(protocol):
        if protocol == "grpc" and protocol in made:
            made[protocol].close()
        if protocol not in made or not made[protocol].process.pid:
            made[protocol] = ps.Server(protocol, LIBRARY, model.SwarmCtr(BATCH), WORKERS, logs)
        return made[protocol]

    yield make
    for one in made.values():
        one.close()


def test_plans_are_registered_on_demand(star_recording, server):
    """Plans are registered only if the server does not know them, which is the first one here; later sessions reuse them."""
    server = server("star_server")
    first = run.play(SWARM, star_recording, server, "star_server", WORKERS, 0, 1, TIMEOUT)
    plans = len(record.load(star_recording)["plans"])
    assert plans <= first["registrations"] <= plans * WORKERS, first
    again = run.play(SWARM, star_recording, server, "star_server", WORKERS, 0, 1, TIMEOUT)
    assert again["registrations"] == 0, again


def test_every_step_is_applied(played, server):
    protocol, recording = played
    server = server(protocol)
    before = server.pushed()
    result = run.play(SWARM, recording, server, protocol, WORKERS, 0, STEPS, TIMEOUT)
    after = server.pushed()
    # Each worker makes one step for warm-up.
    assert sum(result["made"]) == WORKERS * (STEPS + 1) and result["steps"] == WORKERS * STEPS, result
    # CPU time is counted in ticks of 10 ms, and memory that a server gives back meanwhile counts against its workers.
    assert result["server"]["cpu_s_per_step"] >= 0 and result["server"]["rss_before"] > 0 and result["server"]["rss_peak"] > 0, result
    model.check(before, after, result["made"], expected(recording))
    # The check detects a single step that was not applied, and a variable without updates.
    with pytest.raises(model.NotPushed, match="global step"):
        model.check(before, after, [n + 1 for n in result["made"]], expected(recording))
    forgotten = [[2 * one if index == 3 else one for index, one in enumerate(adds)] for adds in expected(recording)]
    with pytest.raises(model.NotPushed, match="variable 3"):
        model.check(before, after, result["made"], forgotten)


def test_star_calls_carry_what_others_send_separately(recording, star_recording):
    """One pull and one push carry all tensors of a step."""
    for alone, together in zip(record.load(recording)["steps"], record.load(star_recording)["steps"]):
        pull, push = together["operations"]
        pushed = [operation["dtype"] for operation in alone["operations"] if "push" in operation]
        assert pull["fetches"] == sum("pull" in operation for operation in alone["operations"])
        # Ids go with the pull and with the push. The gradients of all wide tables are one tensor, until they are added up by different ids.
        fields, gradients = model.SwarmCtr.FIELDS, pushed.count(FLOAT)
        assert pushed.count(INT64) == 2 * fields and pull["feeds"] == fields
        assert push["feeds"] == fields + gradients - 1 + fields
        assert (push["fetches"], pull["after"], push["after"]) == (0, [], [0])
        assert alone["adds"] == pytest.approx(together["adds"], rel=1e-3)


def test_workers_get_over_the_loss_of_their_server(star_recording, tmp_path):
    """They make their steps with its successor, which has applied each of them."""
    recording = tmp_path / "ctr.recording"
    recording.write_bytes(star_recording.read_bytes())
    arguments = argparse.Namespace(workers=4, library=LIBRARY, swarm=SWARM, steps=3)
    outage = reconnect.turn(arguments, model.SwarmCtr(BATCH), recording, "star_server")
    assert 0 <= outage["first_s"] <= outage["all_s"] < TIMEOUT and outage["attempts_per_worker"] >= 1, outage


def test_a_server_that_is_not_lost_fails_the_simulation_of_an_outage(star_recording, server):
    server = server("star_server")
    command = [
        SWARM, "--recording", star_recording, "--protocol", "star_server", "--server", server.door, "--first-worker", server.first_worker, "--workers", str(WORKERS),
        "--steps", "1", "--outage", "1",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 1 and "the server was not lost in time" in done.stderr, done


def test_star_calls_need_a_star_protocol(star_recording, server):
    with pytest.raises(BenchError, match="the recording has star calls, which grpc\\+\\+ does not have"):
        run.play(SWARM, star_recording, server("grpc++"), "grpc++", WORKERS, 0, 1, TIMEOUT)


@pytest.mark.parametrize("protocol", ["grpc++", "star_server"])
def test_gradients_that_are_not_applied_fail_the_run(protocol, recording, star_recording, server, tmp_path):
    """The steps run, but push only zeros."""
    recording = star_recording if protocol == "star_server" else recording
    head, blob = recording.read_bytes().split(b"\n", 1)
    blob = bytearray(blob)
    for step in json.loads(head)["steps"]:
        for operation in step["operations"]:
            places = operation.get("parts", [operation["content"]] if operation.get("dtype") == FLOAT else [])
            for offset, length in places:
                blob[offset : offset + length] = bytes(length)
    empty = tmp_path / "empty.recording"
    empty.write_bytes(head + b"\n" + blob)
    server = server(protocol)
    before = server.pushed()
    result = run.play(SWARM, empty, server, protocol, WORKERS, 0, STEPS, TIMEOUT)
    with pytest.raises(model.NotPushed, match="the gradients that were pushed add"):
        model.check(before, server.pushed(), result["made"], expected(recording))


def test_a_server_that_dies_is_named(played, server):
    protocol, recording = played
    server = server(protocol)
    before = server.pushed()["steps"]
    command = [
        SWARM, "--recording", recording, "--protocol", protocol, "--server", server.door, "--first-worker", server.first_worker, "--workers", str(WORKERS),
        "--steps", "1000000", "--pid", str(server.process.pid), "--patience", "20",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            until = time.monotonic() + TIMEOUT
            while server.pushed()["steps"] < before + 10 * WORKERS:
                assert time.monotonic() < until and running.poll() is None, "the swarm does not get going"
                time.sleep(0.05)
            os.kill(server.process.pid, signal.SIGKILL)
            _, error = running.communicate(timeout=30)
        finally:
            running.kill()
            server.close()
    assert running.returncode == 1 and "the parameter server exited (worker " in error, error


def test_no_answer(recording, server):
    server = server("grpc")
    door, server.door = server.door, "127.0.0.1:9"
    with pytest.raises(BenchError, match="worker . cannot connect: .*refused"):
        run.play(SWARM, recording, server, "grpc", WORKERS, 0, 1, TIMEOUT)
    # A gRPC port is not a data port.
    server.door = door
    with pytest.raises(BenchError, match="cannot connect: .* is not a server of /job:ps/replica:0/task:0 over grpc\\+\\+"):
        run.play(SWARM, recording, server, "grpc++", WORKERS, 0, 1, TIMEOUT)
