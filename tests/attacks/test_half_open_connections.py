"""Unauthenticated peers that exchange challenges but never prove the secret, more than the server keeps: members must still get in."""

import contextlib

import client
import pytest
import wire
from half_open import MOST, half_open, newcomer


@pytest.mark.quick(
    lambda of: of["hosts"] == 1,
    reason="test_tls_connections.py has as many from many hosts, and connections with and without TLS are admitted alike (crates/engine/src/admission)",
)
@pytest.mark.parametrize("hosts", [1, 200], ids=["one host", "many hosts"])
def test_many_unauthenticated_connections(trainer, hosts):
    outcome = trainer.under(half_open(hosts), seconds=6.0, share=0.5, meanwhile=lambda: newcomer(trainer, 2), log_lines=30 + hosts)
    assert outcome.result >= MOST


def test_forged_proofs(trainer):
    """HELLOs with codes that are all zeros, from another connection, for the other direction, for a wrong secret or another HELLO: all are refused."""

    def attack(target, pace):
        tried = 0
        old = bytes(wire.TAG)
        for round_ in pace(100, least=50):
            with client.RawConnection(target) as peer:
                hello = peer.hello()
                challenges = peer.challenge()
                right, reflected, guess = (client.key(*what, *challenges) for what in ((target.secret, b"client"), (target.secret, b"server"), ("a guess of somebody", b"client")))
                code = lambda key, hello=hello: wire.block(hello, 1, key=key)[-wire.TAG :]  # noqa: E731
                forged = [bytes(wire.TAG), old, code(reflected), code(guess), code(right, peer.hello(task="/job:worker/replica:0/task:8"))][round_ % 5]
                old = code(right)
                answered = b""
                with contextlib.suppress(OSError):
                    peer.send(wire.block(hello + forged, 1))
                    peer.send(wire.block(client.call(1, client.GET_STATUS)[0], 2, key=right))
                    peer.socket.settimeout(30)
                    while data := peer.socket.recv(65536):
                        answered += data
                kinds = answered[32:33]
                assert kinds in (b"", bytes([wire.REFUSE])), answered
                tried += 1
        return tried

    outcome = trainer.under(attack)
    assert outcome.result >= 50
