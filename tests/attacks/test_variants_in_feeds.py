"""Variants in feeds of star calls that TensorFlow's own decoder trusts blindly, or that grow from a few bytes to gigabytes."""

import os

import client
import protobuf
import pytest

HUGE = 1 << 27  # elements: half a gigabyte of floats, which a careless decoder allocates for about 50 bytes


def nested(sizes, content=None):
    inner = protobuf.tensor(protobuf.FLOAT, sizes, protobuf.one_float() if content is None else content)
    return protobuf.variant("tensorflow::Tensor", tensors=[inner])


def tensor_list(metadata, tensors=()):
    return protobuf.variant("tensorflow::TensorList", metadata, tensors)


def deep(levels):
    proto = protobuf.tensor(protobuf.FLOAT, (), protobuf.one_float())
    for _ in range(levels):
        proto = protobuf.variant("tensorflow::Tensor", tensors=[proto])
    return proto


# Metadata of a list: number of missing tensors, their indices, element type, maximum length, element shape.
FEEDS = {
    "a tensor without tensors": protobuf.variant("tensorflow::Tensor"),
    "a list of missing tensors": tensor_list(protobuf.varint(1 << 24) + protobuf.varint(0) * 8),
    "one float for a huge shape": nested((HUGE,)),
    "no float for a huge shape": nested((HUGE,), b""),
    "a shape that overflows": nested((1 << 40, 1 << 40)),
    "a list that ends early": tensor_list(b"\xff\xff"),
    "a list with an element that nobody has": tensor_list(protobuf.varint(1) + protobuf.varint(1 << 40) + protobuf.varint(1) + protobuf.varint(3)),
    "a list of tensors of other types": tensor_list(
        protobuf.varint(0) + protobuf.varint(protobuf.STRING) + protobuf.varint(0), [protobuf.tensor(protobuf.FLOAT, (2,), protobuf.one_float())]
    ),
    "a thousand tensors within each other": deep(1000),
    "an unknown object": protobuf.variant("tensorflow::NoSuchThing", os.urandom(64)),
}


def send(feed):
    def attack(target, pace):
        answers = []
        with client.Member(target) as member:
            plan = member.known_plan()
            for round_ in pace(20, least=6):
                answers.append(member.star(plan, [client.objects(feed)], step=round_))
        return answers

    return attack


def refused(answers):
    """Every answer is InvalidArgument or DataLoss with a message, and requests no plan."""
    for answer in answers:
        assert answer.code in (3, 15), answer
        assert len(answer.text) > 20, answer


def test_a_tensor_without_tensors(trainer):
    """Only 26 bytes long."""
    assert len(FEEDS["a tensor without tensors"]) == 26
    outcome = trainer.under(send(FEEDS["a tensor without tensors"]), seconds=1.0)
    assert len(outcome.result) >= 6
    refused(outcome.result)


@pytest.mark.parametrize("name", ["one float for a huge shape", "a list of missing tensors"])
def test_few_bytes_that_grow(trainer, name):
    assert len(FEEDS[name]) < 64
    outcome = trainer.under(send(FEEDS[name]), seconds=1.0)
    assert len(outcome.result) >= 6
    assert outcome.extra_memory < 64 << 20, outcome.line()
    refused(outcome.result)


def test_other_objects(trainer):
    """One after another on a connection that survives all of them."""

    def attack(target, pace):
        answers = []
        names = [name for name in FEEDS if name not in ("a list of missing tensors", "one float for a huge shape")]
        with client.Member(target) as member:
            plan = member.known_plan()
            for round_ in pace(100, least=3 * len(FEEDS)):
                name = names[round_ % len(names)]
                answers.append((name, member.star(plan, [client.objects(FEEDS[name])], step=round_)))
        return answers

    outcome = trainer.under(attack, seconds=1.0)
    assert len(outcome.result) >= 3 * len(FEEDS)
    for name, answer in outcome.result:
        assert answer.code in (3, 15), (name, answer)
    assert outcome.extra_memory < 64 << 20, outcome.line()
