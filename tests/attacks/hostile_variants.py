"""Variants that TensorFlow's own decoder trusts blindly, or that grow from a few bytes to gigabytes."""

import os

import protobuf

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
