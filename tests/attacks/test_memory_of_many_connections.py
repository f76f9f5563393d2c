"""The limit on a worker's kept values holds across all its connections, and another one across all workers."""

import hashlib
import struct

import arena
import client
import protobuf
import wire

LIMIT, TOGETHER = 64 << 20, 256 << 20
PIECE = 2 << 20
assert "value_bytes=64M" in arena.ENVIRONMENT["STARWIRE_STAR_LIMITS"] and arena.ENVIRONMENT["STARWIRE_STAR_MAX_TOTAL_BYTES"] == "256M"


def keeper(names):
    def attack(target, pace):
        """Keeps values until the server refuses. Returns the bytes kept per connection."""
        kept = {}
        members = [client.Member(target, task=name) for name in names]
        device = next(iter(members[0].devices()))
        plan = protobuf.identity_plan(device, "kept")
        name = hashlib.sha256(plan).digest()
        feed = client.floats(PIECE // 4)
        for round_ in pace(80, least=240):
            index = round_ % len(members)
            if kept.get(index, 0) < 0 or kept.get(index, 0) > 2 * LIMIT:
                pace.sleep(0.01)
                continue
            member = members[index]
            reply = member.star(name, [feed], step=7, keeps=[(0, round_, 0)])
            if client.registers(reply):
                assert member.register(plan).code == 0
                continue
            if reply.code == 0:
                kept[index] = kept.get(index, 0) + PIECE
            else:
                assert reply.code == 8, reply
                kept[index] = -kept.get(index, 0) or -1
        return {index: abs(value) for index, value in kept.items()}

    return attack


def test_one_worker_with_many_connections(trainer):
    outcome = trainer.under(keeper(["/job:worker/replica:0/task:2"] * 6), seconds=3.0, share=0.5)
    total = sum(outcome.result.values())
    assert total >= LIMIT // 2, outcome.result
    assert total <= 1.25 * LIMIT, f"{total >> 20} MiB kept over {len(outcome.result)} connections: {outcome.result}"
    assert outcome.extra_memory < 2 * LIMIT + (64 << 20), outcome.line()


def test_small_values_of_large_calls(trainer):
    """A value that is kept does not keep the call that brought it."""

    def attack(target, pace):
        with client.Member(target) as member:
            device = next(iter(member.devices()))
            types = {"T": protobuf.of_type(protobuf.FLOAT)}
            nodes = [protobuf.node(f"feed{i}", "_Arg", device, index=protobuf.of_int(i), **types) for i in range(2)]
            plan = protobuf.graph(*nodes, protobuf.node("small", "_Retval", device, ["feed0"], index=protobuf.of_int(0), **types))
            assert member.register(plan).code == 0
            feeds, answers = [client.floats(2), client.floats(PIECE // 4)], []
            for round_ in pace(80, least=100):
                answers.append(member.star(hashlib.sha256(plan).digest(), feeds, step=7, keeps=[(0, round_, 0)]).code)
            return answers

    outcome = trainer.under(attack, seconds=1.5)
    assert len(outcome.result) >= 100 and set(outcome.result) == {0}
    assert outcome.extra_memory < 64 << 20, outcome.line()


def test_many_names(trainer):
    """A client with many made-up names stays below the limit for all workers together."""
    outcome = trainer.under(keeper([f"/job:worker/replica:0/task:{n}" for n in range(20, 32)]), seconds=3.0, share=0.5)
    total = sum(outcome.result.values())
    assert total >= LIMIT, outcome.result
    assert total <= TOGETHER, f"{total >> 20} MiB kept in {len(outcome.result)} names: {outcome.result}"
    assert outcome.extra_memory < TOGETHER + (64 << 20), outcome.line()


def test_unfinished_payloads(trainer):
    """Calls that announce 250 MiB each and send 1 MiB: the server allocates only for what arrived."""
    announced, sent = 250 << 20, 1 << 20

    def attack(target, pace):
        begun = 0
        members = [client.Member(target, task=f"/job:worker/replica:0/task:{n % 4}") for n in range(8)]
        for _ in pace(50, least=8):
            if begun == len(members):
                continue
            member = members[begun]
            fixed = struct.pack("<IIQ", 0, 1, announced | client.BULK)
            control = wire.frame(wire.CALL, code=client.STAR_CALL, ident=member.new_id(), fixed=fixed, meta=client.star_head(bytes(32)))
            member.send_block(control + wire.frame(wire.DATA, ident=member.next_id - 1, fixed=struct.pack("<Q", sent)), bytes(sent))
            begun += 1
        return begun

    outcome = trainer.under(attack, seconds=1.5)
    assert outcome.result == 8
    assert outcome.extra_memory < 8 * sent + (48 << 20), outcome.line()
