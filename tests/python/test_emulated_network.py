"""The emulated network that `make bench-wire` measures on: it delays, limits and drops, and a benchmark runs over it. Skipped where no namespaces can be made."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import ROOT, is_stock, library_path

RUN = ROOT / "benches" / "wire" / "run.py"


def experiment(name):
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("emulated.py")), name], capture_output=True, text=True, timeout=120)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_round_trip_takes_both_delays():
    took = experiment("round_trips")
    # The relay may deliver a few microseconds early. A delay that counts twice would take as long as twice the delay.
    assert took["none"] < took["5 ms"] < took["10 ms"]
    assert took["5 ms"] >= 0.00998 and took["10 ms"] >= 0.01996


def test_a_cable_has_its_rate_in_each_direction():
    took = experiment("rates")
    # Queues and socket buffers take some bytes at once, so a transfer may seem shorter. At half the rate it takes as long as half duplex would. The switch has
    # one cable to the receiver.
    slow = took.pop("at half the rate")
    assert slow >= 1.9 and all(0.9 <= seconds < slow for seconds in took.values()), (took, slow)


def test_a_full_queue_drops():
    seen = experiment("full_queue")
    assert seen["arrived"] + seen["dropped"] == 200
    # 30 fit into the queue; others leave it (117 a second) while the datagrams are sent.
    assert 30 <= seen["arrived"] <= 31 + 118 * seen["sent in s"]


def run(tmp_path, *arguments, **environment):
    command = [sys.executable, str(RUN), "--out", str(tmp_path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    """Returns a function of protocols: the folder of the results of a benchmark with them, which runs once."""

    def measure(protocols):
        experiment("round_trips")  # skips
        folder = tmp_path_factory.mktemp("benchmark")
        library = [] if is_stock(protocols) else ["--library", library_path()]
        # Other tests may keep the machine busy: round trips may take longer, but not less.
        arguments = ("--tolerance", "1", "--quick", "--rounds", "1", "--cases", "100x4KB", "--wires", "100M/20ms", "--protocols", protocols)
        done = run(folder, *arguments, *library, TF_CPP_MIN_LOG_LEVEL="0")
        assert done.returncode == 0, done.stdout + done.stderr
        return folder

    return functools.lru_cache(maxsize=None)(measure)


@pytest.mark.deep(reason="takes a minute: a whole run of the benchmark, which is no part of the library")
@pytest.mark.parametrize("ours", ["star_server", "grpc++"])
def test_a_benchmark_runs_over_it(benchmark, protocol, ours):
    protocols = protocol if is_stock(protocol) else f"grpc,{ours}"
    folder = benchmark(protocols)
    wire = json.loads((folder / "results.json").read_text())["wires"][0]
    assert wire["title"] == "100 Mb/s, 20 ms"
    assert 0.018 <= wire["measured"]["round_trip_s"] <= 0.04
    case = wire["cases"]["100x4KB"]
    assert case["checked"]
    assert set(case["columns"]) == set(protocols.split(","))
    for column in case["columns"].values():
        # A step pulls and pushes 100 times 4096 bytes, one after the other.
        assert column["p50_s"]["median"] >= 2 * 0.018
        assert column["pulled_bytes_per_step"]["median"] >= 409_600
        assert column["pushed_bytes_per_step"]["median"] >= 409_600
    # 400 KB take 33 ms in each direction, beside the two round trips.
    assert case["bare"]["wire"]["p50_s"]["median"] >= 2 * 0.018 + 0.06
    assert "100 variables × 4 KB" in (folder / "table.md").read_text()


@pytest.mark.ours
@pytest.mark.deep(reason="takes a run of the benchmark, and measures this machine as well")
@pytest.mark.parametrize("protocol", ["star_server", "star_server_lite"])
def test_parts_of_star_calls_suit_the_wire(benchmark, protocol):
    log = (benchmark(protocol) / "logs" / f"100x4KB.{protocol}.worker0.log").read_text()
    plans = re.findall(r"(\d+) calls in .*, in parts of 32 KiB for a path of (\d+) Mb/s and (\d+) us", log)
    # 13 parts of 400 KB pulled, as many pushed, and the counter. Measured is what TCP gets in the first moments.
    calls, megabits, micros = max((int(calls), int(rate), int(time)) for calls, rate, time in plans)
    assert 20 <= calls <= 30
    assert 20 <= megabits <= 110
    # A relay that is kept from running counts a packet's delay from its last look, which may be before the packet came.
    assert 5_000 <= micros <= 60_000


def test_a_wire_that_is_not_as_asked_fails_the_run(tmp_path):
    experiment("round_trips")  # skips
    done = run(tmp_path, "--only-wires", "--wires", "100M/20ms", "--tolerance", "0.00001")
    assert done.returncode == 1
    assert "instead of 100 Mb/s" in done.stdout and "instead of 20 ms" in done.stdout
    assert json.loads((tmp_path / "results.json").read_text())["wires"] == []


@pytest.mark.parametrize("wires", ["1G", "1T/1ms", "1G/1ms,fast"])
def test_an_unknown_wire_is_refused(tmp_path, wires):
    done = run(tmp_path, "--only-wires", "--wires", wires)
    assert done.returncode == 1
    assert "is not a wire" in done.stderr and "10G/50us" in done.stderr


def test_a_machine_without_tun_is_told(tmp_path):
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "--fork"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode or not os.path.exists("/dev/net/tun"):
        pytest.skip("no user and mount namespaces here")
    command = 'mount --bind /dev/null /dev/net/tun && exec "$@"'
    words = [sys.executable, RUN, "--only-wires", "--out", tmp_path]
    done = subprocess.run([*unshare, "sh", "-c", command, "sh", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "no network can be emulated here (needs root or user namespaces, and a /dev/net/tun that can be opened)" in done.stderr
