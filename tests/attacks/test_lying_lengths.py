"""Wrong lengths and counts in every field that has one: too large, too small, overflowing."""

import contextlib
import struct

import client
import protobuf
import pytest
import wire

WIDE = (1 << 64) - 1


def sections(member):
    """Control sections with one lie each; every one of them ends its connection."""
    ident = member.new_id
    call = lambda fixed, meta=b"", **options: wire.frame(wire.CALL, code=client.STAR_CALL, ident=ident(), fixed=fixed, meta=meta, **options)  # noqa: E731
    return [
        call(struct.pack("<II", 0, 0xFFFFFFFF)),
        call(struct.pack("<II", 0, 65537)),
        call(struct.pack("<IIQ", 0, 1, WIDE)),
        call(struct.pack("<IIQ", 0, 1, 1 << 62)),
        call(struct.pack("<IIQQ", 0, 2, WIDE >> 1 | client.BULK, WIDE >> 1 | client.BULK)),
        call(struct.pack("<IIQ", 0, 1, client.BULK)),
        call(struct.pack("<II", 0, 0), b"x", meta_length=0xFFFFFFFF),
        wire.frame(wire.KEY, ident=0, meta=b"k" * 100_000),
        wire.frame(wire.KEY, ident=77, meta=b"k"),
        wire.frame(wire.DATA, ident=9, fixed=struct.pack("<Q", WIDE)),
        wire.frame(client.LEND, ident=1, fixed=struct.pack("<QQ", 0, 1 << 60)),
        wire.frame(client.TAKEN, ident=WIDE),
        wire.frame(wire.REPLY, ident=1, fixed=struct.pack("<II", 0xFFFFFFFF, 0)),
    ]


def headers():
    """Blocks with a wrong header."""
    ping = wire.frame(wire.PING, ident=1)
    return [
        dict(control=ping, control_length=0xFFFFFFF8), dict(control=ping, control_length=12), dict(control=ping, control_length=8), dict(control=ping, bulk_length=WIDE),
        dict(control=ping, bulk_length=16 << 20), dict(control=ping, crc=0), dict(control=ping, sequence=WIDE),
    ]  # fmt: skip


def tables():
    """Tables of feeds; these are refused, and the connection survives."""
    return [
        client.table([], count=0xFFFFFFFF),
        client.table([], count=1),
        client.table([client.entry(protobuf.FLOAT, 1, (1 << 62,), b"", length=WIDE)]),
        client.table([client.entry(protobuf.FLOAT, 1, (1 << 31, 1 << 31, 4), b"", length=16)]),
        client.table([client.entry(protobuf.FLOAT, 1, (-1,), b"", length=4)]),
        client.table([client.entry(protobuf.FLOAT, 1, (1,) * 255, b"", length=4)]),
        client.table([client.entry(protobuf.STRING, 2, (1 << 40,), b"", length=1 << 42)]),
        client.table([client.entry(protobuf.STRING, 3, (1,), b"", length=7)]),
        client.table([client.entry(protobuf.FLOAT, client.SLOT_ENCODING, (), b"", slot=0xFFFFFFFF)])[:-1],
        client.table([client.entry(9999, 1, (1,), b"", length=4)]),
        client.table([client.entry(protobuf.FLOAT, 5, (1,), b"", length=4)]),
    ]


# String feeds whose lengths disagree with the payload.
STRINGS = [struct.pack("<I", 0xFFFFFFFF), struct.pack("<II", 4, 0xFFFFFFF0) + b"abcd", struct.pack("<I", 0) + b"left over"]


def attack(target, pace):
    ended, refused, plan = 0, 0, None
    kinds = len(headers()) + 13
    for round_ in pace(150, least=20):
        with client.Member(target) as member:
            plan = plan or member.known_plan()
            for index in range(3):
                one = tables()[(3 * round_ + index) % len(tables())]
                reply = member.call(client.STAR_CALL, client.star_head(plan, step=round_) + one)
                assert reply.code == 3, (one, reply)
                content = STRINGS[index]
                reply = member.star(plan, [client.entry(protobuf.STRING, 2, (content.count(b"abcd") + 1,), content)], step=round_)
                assert reply.code in (3, 15), (content, reply)
                refused += 2
            at = round_ % kinds
            with contextlib.suppress(OSError):
                if at < 13:
                    member.send_block(sections(member)[at])
                    member.send(bytes(64))
                else:
                    lie = headers()[at - 13]
                    member.send(wire.block(lie.pop("control"), lie.pop("sequence", member.sequence), key=member.key, **lie))
                    # Half of these headers announce bytes that never come.
                    member.socket.shutdown(1)
            assert member.wait_closed(), f"lie {at} is believed"
            ended += 1
    return ended, refused


@pytest.mark.quick(lambda of: of["each_trainer"] == "star_server", reason="both have one decoder, and over star_server these lies are told with others")
def test_lying_lengths(each_trainer):
    if each_trainer.protocol == "grpc++":
        outcome = each_trainer.under(without_star_calls)
        assert outcome.result >= 20
        return
    outcome = each_trainer.under(attack)
    assert min(outcome.result) >= 20
    assert outcome.extra_memory < 48 << 20, outcome.line()


def without_star_calls(target, pace):
    ended = 0
    for round_ in pace(100, least=20):
        with client.Member(target) as member, contextlib.suppress(OSError):
            member.send_block(sections(member)[round_ % 13])
            member.send(bytes(64))
            assert member.wait_closed(), f"lie {round_ % 13} is believed"
        ended += 1
    return ended
