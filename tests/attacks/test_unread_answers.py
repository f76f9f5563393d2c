"""Members that send requests and never read the replies."""

import contextlib
import hashlib
import struct

import client
import protobuf
import wire

MOST = 1200 << 20


def attack(target, pace):
    """Requests of a hundred bytes with replies of 128 KiB, on four connections."""
    asked = 0
    members = [client.Member(target, task=f"/job:worker/replica:0/task:{n}") for n in range(4)]
    device = next(iter(members[0].devices()))
    plan = protobuf.identity_plan(device, "unread")
    assert members[0].register(plan).code == 0
    name, feed = hashlib.sha256(plan).digest(), client.floats(32 << 10)
    for member in members:
        member.socket.setblocking(False)
    stuck = set()
    for round_ in pace(200, least=150):
        member = members[round_ % len(members)]
        if member in stuck:
            continue
        control, bulk = client.call(member.new_id(), client.STAR_CALL, client.star_head(name, step=round_) + client.table([feed]), client.parts_of([feed]))
        data = wire.block(control, member.sequence, bulk, key=member.key)
        member.sequence += 1
        try:
            if member.socket.send(data) < len(data):
                stuck.add(member)
        except OSError:
            stuck.add(member)
        asked += 1
    return asked


def test_unread_answers(trainer):
    outcome = trainer.under(attack, seconds=3.0)
    assert outcome.result > 100
    assert outcome.extra_memory < 128 << 20, outcome.line()


def small_requests(target, pace):
    """Requests of a hundred bytes with replies of 40 MiB, 2.4 GiB in all."""
    asked = 0
    with client.Member(target) as member:
        plan = protobuf.fill_plan(next(iter(member.devices())), "large")
        assert member.register(plan).code == 0
        count = client.entry(protobuf.INT32, client.PLAIN_ENCODING, (1,), struct.pack("<i", 10 << 20))
        feeds = [count, client.entry(protobuf.FLOAT, client.PLAIN_ENCODING, (), struct.pack("<f", 1.0))]
        head = client.star_head(hashlib.sha256(plan).digest()) + client.table(feeds)
        for _ in pace(10, least=60):
            if asked == 60:
                break
            member.start(client.STAR_CALL, head, client.parts_of(feeds))
            asked += 1
    return asked


def test_unread_answers_to_small_requests(trainer):
    """256 MiB may wait, and what has been read when the server notices: how much that is depends on the machine."""
    outcome = trainer.under(small_requests, seconds=2.0, kept=MOST)
    assert outcome.result == 60
    assert outcome.extra_memory < MOST, outcome.line()


def pings(target, pace):
    sent = 0
    with client.Member(target) as member:
        member.socket.settimeout(0.2)
        block = b"".join(wire.frame(wire.PING, ident=n) for n in range(100))
        with contextlib.suppress(OSError):
            for _ in pace(300, least=20):
                member.send_block(block)
                sent += 100
        while not pace.stop.wait(0.1):
            pass
    return sent


def test_unread_pongs(trainer):
    outcome = trainer.under(pings)
    assert outcome.result > 1000
    assert outcome.extra_memory < 48 << 20, outcome.line()
