"""A server moves again and again, while the old process, the new one, both, or the network between them fail at a random moment: whoever may own the state then, no
update of the synchronous state is missing or there twice, and no step fails."""

import os
import random
import signal
import time

import pytest

import run  # before the others: it says where they are

import cluster
import counting
import moves
import proxy

assert run


class RandomMoves(moves.Moves):
    def __init__(self, runner, network, folder, seed):
        super().__init__(runner, network, folder)
        self.random = random.Random(seed)

    def round(self):
        """Returns what has failed."""
        new = self.begin_move()
        # Here and below, the time is a part of the fault: how long a move, a cut or a stop has lasted when something else happens.
        time.sleep(self.random.uniform(0, 1.6))
        fault = self.random.choice(["old", "new", "both", "cut", "reset", "stop_old", "stop_new", "nothing"])
        getattr(self, fault, lambda _: None)(new)
        if fault in ("old", "both"):
            self.owner.kill()
        if fault in ("new", "both"):
            new.kill()
        self.end_move(new)
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


MORE_ROUNDS = pytest.mark.deep(reason="more random faults of the same kinds")


@pytest.mark.parametrize("seed, rounds", [(1, 6), pytest.param(2, 40, marks=MORE_ROUNDS)])
def test_failures_while_a_server_moves(tmp_path, seed, rounds):
    runner, network = cluster.Runner(), proxy.Network()
    job = RandomMoves(runner, network, tmp_path, seed)
    try:
        worker = job.cluster["worker", 0]
        worker.call(counting.begin_counting, job.cluster.target("worker", 0), seed % 2 == 0)
        steps = 0
        for _ in range(rounds):
            worker.begin(counting.count, 2)
            fault = job.round()
            counted, longest = worker.result(90)
            steps += counted
            assert worker.call(counting.counted) == [(steps, 12 * steps)] * 2, (fault, steps, longest)
        assert steps > rounds
    finally:
        job.close()
        runner.close()
        network.close()
