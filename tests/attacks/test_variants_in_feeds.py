"""Variants in feeds of star calls that TensorFlow's own decoder trusts blindly, or that grow from a few bytes to gigabytes."""

import client
import pytest
from hostile_variants import FEEDS


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
