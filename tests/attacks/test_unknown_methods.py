"""Methods that do not exist, and malformed requests to known methods."""

import os

import client

UNKNOWN = [12, 26, 27, 255, 256, 4711, 65535]
KNOWN = [*range(1, 12), *range(13, 23), 24]


def attack(target, pace):
    unknown, malformed = 0, 0
    with client.Member(target) as member:
        for round_ in pace(200, least=50):
            reply = member.call(UNKNOWN[round_ % len(UNKNOWN)], meta=os.urandom(round_ % 100), parts=[os.urandom(50 * (round_ % 7))])
            assert reply.code == 12, reply
            unknown += 1
            # A field of length 2^60, which no message can have.
            parts = [b"\x0a" + b"\xff" * 8 + b"\x0f" + os.urandom(20)] * (1 + round_ % 2)
            reply = member.call(KNOWN[round_ % len(KNOWN)], parts=parts)
            assert reply.code in (3, 15), (KNOWN[round_ % len(KNOWN)], reply)
            malformed += 1
            # This server has no state that another process could copy; whatever the request is.
            reply = member.call(25, meta=os.urandom(round_ % 60))
            assert reply.code == 9, reply
    return unknown, malformed


def test_unknown_methods(trainer):
    outcome = trainer.under(attack)
    assert min(outcome.result) >= 50
