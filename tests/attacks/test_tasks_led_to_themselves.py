"""A name server or a router leads a task to itself, or two tasks to each other: whoever has the secret answers, but not for another."""

import contextlib
import socket
import threading

import cluster as harness
import pytest
import steps
from authority import identity_for_all
from cluster import RemoteError

SECRET = {"STARWIRE_SECRET": "one secret for both", "STARWIRE_UNIX": "off"}


class Relay:
    """Passes connections to `address` on to `other`, byte by byte."""

    def __init__(self, address, other):
        self.other, self.passed = other, 0
        host, port = address.rsplit(":", 1)
        self.listener = socket.create_server((host, int(port)))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            with contextlib.suppress(OSError):
                came, _ = self.listener.accept()
                host, port = self.other.rsplit(":", 1)
                went = socket.create_connection((host, int(port)))
                for one, other in ((came, went), (went, came)):
                    threading.Thread(target=self._pass, args=(one, other), daemon=True).start()
                continue
            return

    def _pass(self, one, other):
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                self.passed += len(data)
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.mark.parametrize("proof", ["secret", "tls"])
def test_a_task_led_to_itself(runner, proof, tmp_path):
    """Its own answers to its own challenges are right in every respect but the name."""
    environment = SECRET if proof == "secret" else identity_for_all(tmp_path / "authority")
    with harness.Cluster(runner, "star_server", {"ps": 1, "worker": 1}, environment=environment, start=False) as cluster:
        worker = cluster.start("worker", 0)
        with Relay(cluster.spec["ps"][0], cluster.spec["worker"][0]) as relay:
            with pytest.raises(RemoteError) as caught:
                worker.call(steps.run_steps, cluster.target("worker", 0), 1)
            assert relay.passed > 100
        assert caught.value.type == "FailedPreconditionError", caught.value
        assert "/job:ps/replica:0/task:0" in caught.value.message and "/job:worker/replica:0/task:0" in caught.value.message, caught.value
        # Nothing is left of it.
        cluster.start("ps", 0)
        assert worker.call(steps.run_steps, cluster.target("worker", 0), 3) == 3
