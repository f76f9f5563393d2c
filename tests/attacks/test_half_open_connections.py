"""Strangers that exchange challenges but never prove the secret, more than the server keeps: members must still get in."""

import contextlib

import client
import pytest
import steps
import wire

MOST = 5000


def ask(target):
    """Begins the exchange of challenges."""
    stranger = client.Stranger(target, timeout=2)
    stranger.send(wire.block(wire.frame(wire.CHALLENGE, meta=bytes(32))))
    return stranger


def crowd(hosts, begin=ask):
    """`hosts`: number of addresses that the strangers connect from; `begin(target)`: connects one of them, which then falls silent."""

    def attack(target, pace):
        strangers, refused = [], 0
        prefix = target.source.rsplit(".", 1)[0]
        for round_ in pace(4000, least=MOST):
            if len(strangers) + refused >= MOST:
                pace.sleep(0.1)
                continue
            try:
                strangers.append(begin(target._replace(source=f"{prefix}.{1 + round_ % hosts}")))
            except OSError:
                refused += 1
        return len(strangers) + refused

    return attack


def newcomer(trainer, number):
    """Starts a worker that connects and runs steps."""
    task = trainer.cluster.start("worker", number)
    try:
        assert task.call(steps.run_steps, trainer.cluster.target("worker", number), 3, task=number, name=f"newcomer{number}", filters=True, timeout=60) == 3
    finally:
        task.kill()
    trainer.cluster.tasks.pop(("worker", number))


@pytest.mark.parametrize("hosts", [1, 200], ids=["one host", "many hosts"])
def test_a_crowd_at_the_door(trainer, hosts):
    outcome = trainer.under(crowd(hosts), seconds=6.0, share=0.5, meanwhile=lambda: newcomer(trainer, 2), log_lines=30 + hosts)
    assert outcome.result >= MOST


def test_forged_proofs(trainer):
    """HELLOs with codes that are all zeros, from another connection, for the other direction, for a wrong secret or another HELLO: all are refused."""

    def attack(target, pace):
        tried = 0
        old = bytes(wire.TAG)
        for round_ in pace(100, least=50):
            with client.Stranger(target) as peer:
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
