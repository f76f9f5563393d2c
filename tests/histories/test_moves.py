"""A server moves again and again, while the old process, the new one, both, or the network between them fail at a random moment: whoever may own the state then, no
update of the synchronous state is missing or there twice, and no step fails."""

import os
import random
import signal
import subprocess
import time

import pytest

import run  # before the others: it says where they are

import cluster
import counting
import proxy

assert run

COPIED = "has a copy of the state of"


class Moves:
    """Server 0 has two places, which it uses in turn. The worker finds it through a link, which is told where it is."""

    def __init__(self, runner, network, folder, seed):
        self.random, self.network, self.folder = random.Random(seed), network, folder
        settings = {**counting.environment(folder / "0", "sync"), "STARWIRE_UNIX": "off", "STARWIRE_KEEPALIVE": "after_ms=500,timeout_ms=1000"}
        self.cluster = cluster.Cluster(runner, "star_server", {"ps": 2, "worker": 1}, environment=settings, start=False)
        self.places = [self.cluster.spec["ps"][0], f"127.0.0.1:{cluster.free_port()}"]
        self.at, self.known = 0, proxy.Link(network, self.places[0])
        # From the new process to the old one.
        self.between = [proxy.Link(network, place) for place in self.places]
        self.first = {}
        tasks = [self.begin(0, {}), self.cluster.begin_start("ps", 1)]
        tasks.append(self.cluster.begin_start("worker", 0, spec={**self.cluster.spec, "ps": [self.known.address, self.cluster.spec["ps"][1]]}))
        for task in tasks:
            task.result(cluster.START_TIMEOUT)
        self.owner, self.settings = tasks[0], {}

    def begin(self, place, settings):
        spec = {**self.cluster.spec, "ps": [self.places[place], self.cluster.spec["ps"][1]]}
        return self.cluster.begin_start("ps", 0, spec=spec, STARWIRE_STATE=str(self.folder / str(place)), **settings)

    def mark(self, place, name):
        return (self.folder / str(place) / "ps-0" / name).exists()

    def round(self):
        """Returns what has failed."""
        there = 1 - self.at
        settings = {"STARWIRE_STATE_FROM": f"move={self.between[self.at].address}"}
        new = self.begin(there, settings)
        time.sleep(self.random.uniform(0, 1.6))
        fault = self.random.choice(["old", "new", "both", "cut", "reset", "stop_old", "stop_new", "nothing"])
        getattr(self, fault, lambda _: None)(new)
        if fault in ("old", "both"):
            self.owner.kill()
        if fault in ("new", "both"):
            new.kill()
        has_moved = self.mark(self.at, "moved")
        if fault in ("old", "both") and not has_moved:
            # It still has the state.
            self.owner = self.begin(self.at, self.settings)
            self.owner.result(cluster.START_TIMEOUT)
        if fault in ("new", "both"):
            new = self.begin(there, settings)
        if fault in ("old", "both") and has_moved and self.mark(there, "copy"):
            # Its answer was lost: only whoever sees both can say so.
            subprocess.run([counting.STARCTL, "state", "promote", self.folder / str(there) / "ps-0"], check=True, capture_output=True)
        new.result(60)
        assert self.mark(self.at, "moved") and not self.mark(there, "copy")
        self.known.target = self.places[there]
        self.owner.kill()
        self.owner, self.settings, self.at = new, settings, there
        return fault

    def cut(self, _):
        link = self.between[self.at]
        link.cut(self.random.random() < 0.7, self.random.random() < 0.7)
        time.sleep(self.random.uniform(0, 4))
        link.heal()

    def reset(self, _):
        for _ in range(3):
            self.between[self.at].reset()
            time.sleep(self.random.uniform(0, 0.2))

    def stop_old(self, _):
        self.stop(self.owner)

    def stop_new(self, new):
        self.stop(new)

    def stop(self, task):
        os.kill(task.pid, signal.SIGSTOP)
        time.sleep(self.random.uniform(0, 3))
        os.kill(task.pid, signal.SIGCONT)


@pytest.mark.parametrize("seed, rounds", [(1, 6), pytest.param(2, 40, marks=pytest.mark.deep)])
def test_failures_while_a_server_moves(tmp_path, seed, rounds):
    runner, network = cluster.Runner(), proxy.Network()
    moves = Moves(runner, network, tmp_path, seed)
    try:
        worker = moves.cluster["worker", 0]
        worker.call(counting.begin_counting, moves.cluster.target("worker", 0), seed % 2 == 0)
        steps = 0
        for _ in range(rounds):
            worker.begin(counting.count, 2)
            fault = moves.round()
            counted, longest = worker.result(90)
            steps += counted
            assert worker.call(counting.counted) == [(steps, 12 * steps)] * 2, (fault, steps, longest)
        assert steps > 10 * rounds
    finally:
        moves.cluster.close()
        runner.close()
        network.close()
