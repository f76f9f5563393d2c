"""Thousands of calls that would wait indefinitely, cancelled at once; cancellations of unknown and of finished requests."""

import hashlib

import client
import protobuf
import wire


def attack(target, pace):
    cancelled = 0
    with client.Member(target) as member:
        device, incarnation = next(iter(member.devices().items()))
        prefix = client.key_prefix(device, incarnation)
        for round_ in pace(25, least=15):
            idents, control = [], b""
            for i in range(20):
                # RecvTensorRequest: step and key.
                request = protobuf.number(1, 1 << 41 | round_ << 8 | i) + protobuf.message(2, prefix + b";0:0")
                ident = member.new_id()
                control += client.call(ident, client.RECV_TENSOR, parts=[request])[0]
                idents.append(ident)
            member.send_block(control)
            member.cancel(*idents, *idents, *range(1 << 50, (1 << 50) + 20))
            for ident in idents:
                reply = member.answer(ident)
                assert reply.code != 0, reply
                cancelled += 1
    return cancelled


def recv_attack(target, pace):
    """The same with recvs, each in its own step."""
    cancelled = 0
    with client.Member(target) as member:
        device, incarnation = next(iter(member.devices().items()))
        member.send_block(wire.frame(wire.KEY, ident=0, meta=client.key_prefix(device, incarnation)))
        for round_ in pace(25, least=15):
            idents = [member.new_id() for _ in range(20)]
            member.send_block(b"".join(client.recv(ident, 1 << 42 | ident) for ident in idents))
            member.cancel(*idents)
            for ident in idents:
                reply = member.answer(ident)
                assert reply.code != 0, reply
                cancelled += 1
    return cancelled


def test_cancelled_calls(trainer):
    outcome = trainer.under(attack)
    assert outcome.result >= 300
    assert outcome.peak_threads < outcome.base_threads + 20, outcome.line()


def test_cancelled_requests(each_trainer):
    outcome = each_trainer.under(recv_attack)
    assert outcome.result >= 300
    assert outcome.peak_threads < outcome.base_threads + 20, outcome.line()


def star_attack(target, pace):
    """Star calls that wait on an empty queue: cancelled, or abandoned by a connection that closes."""
    ended, plan = 0, None
    for round_ in pace(25, least=15):
        with client.Member(target, task="/job:worker/replica:0/task:2") as member:
            plan = plan or protobuf.waiting_plan(next(iter(member.devices())), f"empty_{target.source}")
            name = hashlib.sha256(plan).digest()
            reply = member.register(plan)
            assert reply.code == 0, reply
            idents = [member.start(client.STAR_CALL, client.star_head(name, step=step) + client.table([])) for step in range(20)]
            if round_ % 2:
                member.cancel(*idents)
                for ident in idents:
                    reply = member.answer(ident)
                    assert reply.code != 0, reply
            ended += len(idents)
    return ended


def test_cancelled_star_calls(trainer):
    outcome = trainer.under(star_attack)
    assert outcome.result >= 300
    assert outcome.peak_threads < outcome.base_threads + 20, outcome.line()
