"""Requests for tensors that are never produced, each in its own step, on a connection that then closes: the server must abort every step cheaply."""

import client
import pytest
import wire

EACH = 1500  # requests per connection
ROUNDS = 2


def attack(target, pace):
    sent = 0
    device, incarnation = None, None
    for round_ in pace(100, least=ROUNDS):
        if round_ >= ROUNDS:
            pace.sleep(0.1)
            continue
        with client.Member(target) as member:
            if device is None:
                device, incarnation = next(iter(member.devices().items()))
            member.send_block(wire.frame(wire.KEY, ident=0, meta=client.key_prefix(device, incarnation)))
            for begin in range(0, EACH, 500):
                step = 1 << 40 | round_ << 20
                member.send_block(b"".join(client.recv(member.new_id(), step | begin + i) for i in range(500)))
                sent += 500
            member.devices()  # a round trip: the server has read all of it
    return sent


@pytest.mark.quick(lambda of: of["each_trainer"] == "star_server", reason="requests for tensors wait in the same engine over both protocols")
def test_abandoned_requests(each_trainer):
    outcome = each_trainer.under(attack, seconds=3.0)
    assert outcome.result == ROUNDS * EACH
    assert outcome.peak_threads < outcome.base_threads + 20, outcome.line()
