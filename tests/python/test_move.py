"""The state of a parameter server moves to another process, or a standby takes over: no session notices, and every update is there once."""

import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from cluster import START_TIMEOUT, RemoteError, free_port, state
from counting import STARCTL, Counting, counted, environment, flush, stop
from metrics import data_port, metric
from waiting import wait_until

pytestmark = pytest.mark.ours

SHAPE = (("ps", 2), ("worker", 1))


def elsewhere(cluster, index, folder, how="move", begins=False):
    """Starts a process that takes over from the server, at another address. Returns the old and the new one."""
    old, address = cluster["ps", index], cluster.spec["ps"][index]
    servers = [f"127.0.0.1:{free_port()}" if at == index else other for at, other in enumerate(cluster.spec["ps"])]
    settings = {"STARWIRE_STATE": str(folder), "STARWIRE_STATE_FROM": f"{how}={address}"}
    new = cluster.begin_start("ps", index, spec={**cluster.spec, "ps": servers}, **settings)
    if not begins:
        new.result(60)
    return old, new, servers[index]


def health(address):
    try:
        with urllib.request.urlopen(f"http://{address}/healthz", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("mode, use_resource", [("async", True), ("sync", False)])
def test_a_server_moves_while_a_session_trains(compared, tmp_path, mode, use_resource):
    """Server 0 moves to another process, and on to a third, which goes where the first one was. No update is missing in either mode."""
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path / "0", mode)) as cluster:
        counting = Counting(cluster, tmp_path, use_resource)
        first, second, address = elsewhere(cluster, 0, tmp_path / "1")
        assert health(cluster.spec["ps"][0]) == (503, f"moved to {address}\n")
        counting.goes_on()
        first.kill()
        # Whoever asks at the first address is not sent on any more.
        cluster.start("ps", 0, STARWIRE_STATE_FROM=f"move={address}")
        assert health(address) == (503, f"moved to {cluster.spec['ps'][0]}\n")
        counting.goes_on()
        second.kill()
        counting.goes_on()
        steps = counting.stop()
        assert counting.worker.call(counted) == [(steps, 12 * steps)] * 2


def test_workers_that_come_later_are_sent_on(compared, tmp_path):
    """Their ClusterSpec has the old address, where the old process sends them on."""
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path / "0")) as cluster:
        Counting(cluster, tmp_path, True).stop()
        elsewhere(cluster, 0, tmp_path / "1")
        cluster["worker", 0].kill()
        cluster.start("worker", 0)
        assert Counting(cluster, tmp_path, True).stop() > 0
        assert cluster["worker", 0].wait_for_log("/job:ps/replica:0/task:0 has moved to")


def test_a_standby_takes_over_when_the_server_stops(compared, tmp_path):
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path / "0")) as cluster:
        counting = Counting(cluster, tmp_path, True)
        old, standby, _ = elsewhere(cluster, 0, tmp_path / "1", "standby", begins=True)
        standby.wait_for_log("has a copy of the state of", timeout=START_TIMEOUT)
        flush(old)
        counting.goes_on()
        assert not standby.ready()
        old.call(stop)
        standby.result(60)
        old.exit()
        counting.goes_on()
        steps = counting.stop()
        assert counting.worker.call(counted) == [(steps, 12 * steps)] * 2


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_standby_takes_over_from_a_server_that_was_killed(compared, tmp_path, mode):
    """Somebody says that the server has ended, and the endpoint map leads to the standby. A synchronous state lacks nothing."""
    with compared.fresh("star_server", SHAPE, environment={**environment(tmp_path / "0", mode), "STARWIRE_STATE_MODE": mode}) as cluster:
        counting = Counting(cluster, tmp_path, False)
        old, standby, _ = elsewhere(cluster, 0, tmp_path / "1", "standby", begins=True)
        standby.wait_for_log("has a copy of the state of", timeout=START_TIMEOUT)
        flush(old)
        folder = tmp_path / "1" / "ps-0"
        old.kill()
        standby.wait_for_log("It takes over if that has ended for good")
        assert not standby.ready()
        subprocess.run([STARCTL, "state", "promote", folder], check=True, capture_output=True)
        standby.result(60)
        # It moves back to the address that the workers know.
        third = cluster.start("ps", 0, STARWIRE_STATE=str(tmp_path / "2"), STARWIRE_STATE_FROM=f"move={standby.call(address_of)}")
        assert third is not standby
        counting.goes_on()
        steps = counting.stop()
        (first, first_sum), second = counting.worker.call(counted)
        assert second == (steps, 12 * steps)
        assert first_sum == 12 * first
        assert first == steps if mode == "sync" else first <= steps


def test_a_complete_copy_outlives_its_connection(compared, tmp_path):
    """The owner dies and comes back while the standby does something else. The standby copies what it lacks, and does not begin anew."""
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path / "0")) as cluster:
        counting = Counting(cluster, tmp_path, True)
        old, standby, _ = elsewhere(cluster, 0, tmp_path / "1", "standby", begins=True)
        standby.wait_for_log("has a copy of the state of", timeout=START_TIMEOUT)
        # A complete copy gets a new journal, and a server that starts keeps only the newest one.
        journals = [lambda at=at: {path.name for path in (tmp_path / at / "ps-0").glob("journal-*")} for at in "01"]
        wait_until(lambda: [found() for found in journals] == [{"journal-2"}] * 2, 60, "both have the new journal alone")
        standby.stop()
        flush(old)  # the answer waits in the standby's socket, and behind it the end of the connection
        old.kill()
        owner = cluster.start("ps", 0)
        standby.resume()
        counting.goes_on()
        wait_until(lambda: metric(data_port(owner), "starwire_state_copies") == 1, 60, "the standby follows")
        flush(owner)
        owner.call(stop)
        standby.result(60)
        assert standby.full_log().count("has a copy of the state of") == 1
        counting.goes_on()
        steps = counting.stop()
        (first, first_sum), second = counting.worker.call(counted)
        assert second == (steps, 12 * steps)
        assert first_sum == 12 * first and 0 < first <= steps


def test_a_copy_outlives_the_folder_of_its_owner(compared, tmp_path):
    """The owner begins anew, without anything. The standby keeps what it has, and has the state once that server has ended."""
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path / "0")) as cluster:
        counting = Counting(cluster, tmp_path, True)
        owner, standby, _ = elsewhere(cluster, 0, tmp_path / "1", "standby", begins=True)
        standby.wait_for_log("has a copy of the state of", timeout=START_TIMEOUT)
        steps = counting.stop()
        flush(owner)
        wait_until(lambda: metric(data_port(owner), "starwire_state_copies") == 1, 60, "the standby follows")
        position = lambda at: [(path.name, path.stat().st_size) for path in sorted((tmp_path / at / "ps-0").glob("journal-*"))][-1]
        wait_until(lambda: position("0") == position("1"), 60, "the standby has everything")
        owner.kill()
        shutil.rmtree(tmp_path / "0" / "ps-0")
        empty = cluster.start("ps", 0)
        standby.wait_for_log("has begun another one, of which", timeout=START_TIMEOUT)
        promote = [STARCTL, "state", "promote", tmp_path / "1" / "ps-0"]
        subprocess.run(promote, check=True, capture_output=True)
        standby.wait_for_log("was promoted, but stays a standby")
        empty.kill()
        subprocess.run(promote, check=True, capture_output=True)
        standby.result(60)
        cluster.start("ps", 0, STARWIRE_STATE=str(tmp_path / "2"), STARWIRE_STATE_FROM=f"move={standby.call(address_of)}")
        assert counting.worker.call(counted) == [(steps, 12 * steps)] * 2


def test_a_copy_that_was_promoted_by_mistake_stays_one(compared, tmp_path):
    """Its owner answers, so a process that takes the copy up asks it first."""
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path / "0")) as cluster:
        counting = Counting(cluster, tmp_path, True)
        owner, standby, _ = elsewhere(cluster, 0, tmp_path / "1", "standby", begins=True)
        standby.wait_for_log("has a copy of the state of", timeout=START_TIMEOUT)
        standby.stop()
        subprocess.run([STARCTL, "state", "promote", tmp_path / "1" / "ps-0"], check=True, capture_output=True)
        standby.kill()
        _, again, _ = elsewhere(cluster, 0, tmp_path / "1", "standby", begins=True)
        # Or the owner has written so much meanwhile that the copy begins anew, which nobody has promoted.
        told = ("was promoted, but stays a standby", "begins its copy anew")
        wait_until(lambda: any(text in again.full_log() for text in told), START_TIMEOUT, "what the copy is")
        counting.goes_on()
        assert not again.ready()
        owner.call(stop)
        again.result(60)
        steps = counting.stop()
        assert counting.worker.call(counted) == [(steps, 12 * steps)] * 2


def address_of():
    """Of the server of this process."""
    return state["server"].target.removeprefix("grpc://")


def test_two_processes_never_have_one_state(compared, tmp_path):
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path / "0")) as cluster:
        first, _, address = elsewhere(cluster, 0, tmp_path / "1")
        # The old process is started again with its folder.
        first.kill()
        with pytest.raises(RemoteError, match=f"the state has moved to {address}"):
            cluster.start("ps", 0)
        # A state that was never a copy is not given up for one.
        with pytest.raises(RemoteError, match="has a state of its own: to make it a copy of another one, remove the folder"):
            cluster.start("ps", 1, STARWIRE_STATE_FROM=f"move={address}")


def test_folder_of_a_copy_is_not_served(compared, tmp_path):
    with compared.fresh("star_server", SHAPE, environment=environment(tmp_path / "0")) as cluster:
        old, standby, _ = elsewhere(cluster, 0, tmp_path / "1", "standby", begins=True)
        standby.wait_for_log("has a copy of the state of", timeout=START_TIMEOUT)
        standby.kill()
        old.kill()
        with pytest.raises(RemoteError, match="has a copy that has not taken over: set STARWIRE_STATE_FROM"):
            cluster.start("ps", 0, STARWIRE_STATE=str(tmp_path / "1"))
        exported = subprocess.run([STARCTL, "state", "show", tmp_path / "1" / "ps-0"], capture_output=True, text=True)
        assert exported.returncode == 1 and "has a copy that has not taken over" in exported.stderr
        assert Path(tmp_path / "1" / "ps-0" / "copy").exists()
