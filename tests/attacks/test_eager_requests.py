"""Requests of TensorFlow's eager runtime: contexts that do not exist, hostile tensors and functions, many at a time."""

import os

import client
import protobuf

ENQUEUE, RUN_COMPONENT_FUNCTION = 20, 21
MOST_THREADS = 128  # cc/base/background_queue.h
HUGE = protobuf.tensor(protobuf.FLOAT, (1 << 27,), protobuf.one_float())
EMPTY_VARIANT = protobuf.variant("tensorflow::Tensor")


def operation(tensor=b"", name="Identity"):
    return protobuf.number(1, 7) + protobuf.message(2, name) + (protobuf.message(10, protobuf.message(2, tensor)) if tensor else b"")


def enqueue(item, context=0x1234567):
    return protobuf.number(1, context) + protobuf.message(3, item)


def function(tensor):
    node = protobuf.message(1, "c") + protobuf.message(2, "Const") + protobuf.attribute("value", protobuf.message(8, tensor))
    return protobuf.message(3, node)


REQUESTS = {
    "no context": (ENQUEUE, b""),
    "an unknown context": (ENQUEUE, enqueue(protobuf.message(2, operation()))),
    "a handle of an unknown context": (ENQUEUE, enqueue(protobuf.message(1, protobuf.number(1, 1)))),
    "half a gigabyte from one float": (ENQUEUE, enqueue(protobuf.message(2, operation(HUGE)))),
    "the same as a sent tensor": (ENQUEUE, enqueue(protobuf.message(3, protobuf.message(2, HUGE)))),
    "the same as a packed handle": (ENQUEUE, enqueue(protobuf.message(7, protobuf.message(2, protobuf.message(1, protobuf.message(1, HUGE)))))),
    "an empty variant": (ENQUEUE, enqueue(protobuf.message(2, operation(EMPTY_VARIANT)))),
    "an empty variant in a function": (ENQUEUE, enqueue(protobuf.message(4, protobuf.message(1, function(EMPTY_VARIANT))))),
    "empty tensors without end": (ENQUEUE, b"\x1a\x06\x12\x04\x52\x02\x12\x00" * 100_000),
    "garbage": (ENQUEUE, b"\x1a\x20" + os.urandom(32)),
    "a component function without a context": (RUN_COMPONENT_FUNCTION, protobuf.number(1, 99) + protobuf.message(2, operation())),
    "one with half a gigabyte": (RUN_COMPONENT_FUNCTION, protobuf.number(1, 99) + protobuf.message(2, operation(HUGE))),
    "no operation": (RUN_COMPONENT_FUNCTION, b""),
}


def attack(target, pace):
    answers = {name: 0 for name in REQUESTS}
    with client.Member(target) as member:
        for _ in pace(12, least=10):
            idents = [(name, member.start(method, parts=[request])) for _ in range(16) for name, (method, request) in REQUESTS.items() if len(request) < 1 << 16]
            for name, (method, request) in REQUESTS.items():
                if len(request) >= 1 << 16:
                    reply = member.call(method, parts=[request])
                    assert reply.code not in (0, 12), (name, reply)
                    answers[name] += 1
            for name, ident in idents:
                reply = member.answer(ident)
                assert reply.code not in (0, 12) and len(reply.text) > 10, (name, reply)
                answers[name] += 1
    return answers


def test_eager_requests(trainer):
    outcome = trainer.under(attack)
    assert min(outcome.result.values()) >= 10, outcome.result
    # A round has more requests than threads are allowed.
    assert outcome.peak_threads <= outcome.base_threads + MOST_THREADS + 8, outcome.line()
    assert outcome.extra_memory < 64 << 20, outcome.line()
