"""Strangers that send HELLO but never the proof of the secret, more than the server keeps: members must still get in."""

import contextlib
import time

import client
import pytest
import steps
import wire

MOST = 5000


def crowd(hosts):
    def attack(target, pace):
        """`hosts`: number of addresses that the strangers connect from."""
        strangers, refused = [], 0
        peer = client.Stranger(target)
        block = wire.block(peer.hello())
        strangers.append(peer)
        prefix = target.source.rsplit(".", 1)[0]
        for round_ in pace(4000, least=MOST):
            if len(strangers) + refused >= MOST:
                pace.sleep(0.1)
                continue
            try:
                strangers.append(client.Stranger(target._replace(source=f"{prefix}.{1 + round_ % hosts}"), timeout=2))
                strangers[-1].send(block)
            except OSError:
                refused += 1
        return len(strangers) + refused

    return attack


def newcomer(trainer, number):
    """Starts a worker that connects and runs steps. Returns the seconds that this took."""
    begun = time.monotonic()
    task = trainer.cluster.start("worker", number)
    try:
        assert task.call(steps.run_steps, trainer.cluster.target("worker", number), 3, task=number, name=f"newcomer{number}", filters=True, timeout=30) == 3
    finally:
        task.kill()
    trainer.cluster.tasks.pop(("worker", number))
    return time.monotonic() - begun


@pytest.mark.parametrize("hosts", [1, 200], ids=["one host", "many hosts"])
def test_a_crowd_at_the_door(trainer, hosts):
    took = []
    outcome = trainer.under(crowd(hosts), seconds=4.0, share=0.5, meanwhile=lambda: took.append(newcomer(trainer, 2)), log_lines=30 + hosts)
    assert outcome.result >= MOST
    assert took and took[0] < 20, took


def test_forged_proofs(trainer):
    """Proofs that are all zeros, the server's own, from another connection, or for a wrong secret or hello: all are refused."""

    def attack(target, pace):
        tried = 0
        old = None
        for round_ in pace(100, least=50):
            with client.Stranger(target) as peer:
                hello = peer.hello()
                peer.send_block(hello)
                section = peer.read_block()
                welcome = client.without_padding(section)
                at = len(welcome) + -len(welcome) % 8
                forged = [
                    bytes(32), section[at + 16 : at + 48], old or bytes(range(32)), client.proof("a guess of somebody", client.without_padding(hello), welcome),
                    client.proof(target.secret, client.without_padding(hello)[:-1] + b"x", welcome),
                ][round_ % 5]  # fmt: skip
                old = client.proof(target.secret, client.without_padding(hello), welcome)
                answered = b""
                with contextlib.suppress(OSError):
                    peer.send_block(wire.frame(wire.PROOF, meta=forged[:32]))
                    peer.send_block(client.call(1, client.GET_STATUS)[0])
                    peer.socket.settimeout(5)
                    while data := peer.socket.recv(65536):
                        answered += data
                kinds = answered[32:33]
                assert kinds in (b"", bytes([wire.REFUSE])), answered
                tried += 1
        return tried

    outcome = trainer.under(attack)
    assert outcome.result >= 50
