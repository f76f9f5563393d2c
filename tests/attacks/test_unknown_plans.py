"""Star calls with unknown plans and registrations of forged or damaged ones."""

import hashlib
import os

import client
import protobuf


def attack(target, pace):
    asked, refused = 0, 0
    with client.Member(target) as member:
        device = next(iter(member.devices()))
        plan = protobuf.identity_plan(device)
        for round_ in pace(200, least=60):
            reply = member.star(os.urandom(32), [client.floats(16)], step=round_)
            assert client.registers(reply), reply
            asked += 1
            # A plan under another hash, random bytes, a graph for another task.
            forged = [(plan, os.urandom(32)), (os.urandom(200), None), (protobuf.identity_plan("/job:ps/replica:0/task:7/device:CPU:0"), None)][round_ % 3]
            reply = member.register(*forged[:1], name=forged[1])
            assert reply.code != 0, (round_, reply)
            refused += 1
            # An unknown session, another incarnation of the server, more kept values than the message has bytes.
            head = [{"session": b"forged"}, {"incarnation": 12345}, {"keep_count": 0xFFFFFFFF}][round_ % 3]
            reply = member.star(hashlib.sha256(plan).digest(), [client.floats(16)], step=round_, **head)
            assert reply.code != 0, (round_, reply)
    return asked, refused


def test_unknown_plans(trainer):
    outcome = trainer.under(attack)
    assert min(outcome.result) >= 60
