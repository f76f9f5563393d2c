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


def test_plans_that_lie(trainer):
    """Feeds of another type than the plan's, numbers of feeds and fetches beyond all memory, a star call without a task."""
    everything = protobuf.message(4, protobuf.message(1, "*"))

    def attack(target, pace):
        answers = []
        with client.Member(target) as member:
            device = next(iter(member.devices()))
            known = member.known_plan()
            inner = protobuf.message(2, protobuf.graph(protobuf.node("x", "NoOp", device)))
            no_task = protobuf.message(2, protobuf.graph(protobuf.node("call", "StarwireCall", device, plan=inner)))
            for round_ in pace(100, least=30):
                answers.append(member.star(known, [client.entry(3, 1, (16,), bytes(64))], step=round_))
                for large in (2**31 - 1, 2**27, 3):
                    for feed, fetch in ((large, 0), (0, large)):
                        answers.append(member.register(protobuf.identity_plan(device, f"x{round_}", feed=feed, fetch=fetch)))
                answers.append(member.call(client.REGISTER_GRAPH, b"", [no_task + protobuf.message(5, everything)]))
        return answers

    outcome = trainer.under(attack)
    assert len(outcome.result) >= 240
    assert outcome.extra_memory < 64 << 20, outcome.line()
    for answer in outcome.result:
        assert answer.code in (3, 12), answer
        assert len(answer.text) > 20, answer
