"""The state that a member can leave on a server is bounded: plans, kept values, keys."""

import hashlib

import client
import metrics
import protobuf
import wire

RESOURCE_EXHAUSTED = 8


def plans(target, pace):
    """Registers a new plan each round, under the names of several workers. A bystander registers one, and the same at the end. Returns also how many plans the
    server compiled meanwhile, of anybody."""
    compiled = lambda: metrics.metric(target.address, "starwire_star_registrations_total")  # noqa: E731
    before, taken, refused = compiled(), 1, 0
    bystander = client.Member(target, task="/job:worker/replica:0/task:1")
    idle = protobuf.identity_plan(next(iter(bystander.devices())), f"idle_{target.source}")
    assert bystander.register(idle).code == 0
    members = [client.Member(target, task=f"/job:worker/replica:0/task:{n}") for n in (2, 3)]
    device = next(iter(members[0].devices()))
    for round_ in pace(150, least=160):
        reply = members[round_ % len(members)].register(protobuf.identity_plan(device, f"flood_{round_}_{target.source}"))
        assert reply.code in (0, RESOURCE_EXHAUSTED), reply
        taken += reply.code == 0
        refused += reply.code != 0
    assert bystander.register(idle).code == 0
    return taken, refused, compiled() - before


def test_plan_flood(trainer):
    """More plans than a worker may have (64 here): its oldest are evicted or new ones refused; other workers' plans stay."""
    outcome = trainer.under(plans, seconds=3.0, visit=False)
    taken, refused, compiled = outcome.result
    assert taken + refused > 150, outcome.result
    # No plan of others was evicted: it would have been compiled again.
    assert compiled == taken, outcome.result


def steps(target, pace):
    """Thousands of steps that each keep a value and never end."""
    kept, refused = 0, 0
    with client.Member(target, task="/job:worker/replica:0/task:2") as member:
        device = next(iter(member.devices()))
        plan = protobuf.identity_plan(device, "stepped")
        assert member.register(plan).code == 0
        name, feed = hashlib.sha256(plan).digest(), client.floats(4)
        for round_ in pace(60, least=120):
            idents, control, bulk = [], b"", b""
            for i in range(40):
                ident = member.new_id()
                step = round_ * 40 + i
                meta = client.star_head(name, step=step, keeps=[(0, 0, 0)]) + client.table([feed])
                control += client.call(ident, client.STAR_CALL, meta, client.parts_of([feed]))[0]
                idents.append(ident)
            member.send_block(control, bulk)
            for ident in idents:
                reply = member.answer(ident)
                assert reply.code in (0, RESOURCE_EXHAUSTED), reply
                kept += reply.code == 0
                refused += reply.code != 0
    return kept, refused


def test_step_flood(trainer):
    """A worker may keep at most 4096 values here."""
    outcome = trainer.under(steps, seconds=4.0, share=0.4)
    kept, refused = outcome.result
    assert 1000 < kept <= 4096 * 1.05, outcome.result


def keys(target, pace):
    """Prefixes of rendezvous keys: valid, malformed and for unknown devices; now and then all are forgotten."""
    sent = 0
    with client.Member(target) as member:
        device, incarnation = next(iter(member.devices().items()))
        known = 0
        for round_ in pace(20, least=11):
            control, forget = b"", round_ % 5 == 4
            for i in range(100):
                foreign = client.key_prefix("/job:ps/replica:0/task:9/device:TPU:7", sent)
                prefix = [client.key_prefix(device, incarnation, f"edge_{sent}_x"), b"%d;no key" % sent, foreign][i % 3]
                known = 0 if forget and i == 0 else known
                control += wire.frame(wire.KEY, ident=known, meta=prefix, flags=int(forget and i == 0))
                known += 1
                sent += 1
            member.send_block(control)
            # A recv with one of the last keys, which is malformed or for an unknown device.
            ident = member.new_id()
            member.send_block(client.recv(ident, 1, known - 2))
            reply = member.answer(ident)
            assert reply.code == 3, reply
    return sent


def test_key_flood(trainer):
    outcome = trainer.under(keys, share=0.4)
    assert outcome.result > 1000
    assert outcome.extra_memory < 48 << 20, outcome.line()
