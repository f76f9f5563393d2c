"""A minimal protocol-buffer encoder for messages that a TensorFlow peer could send and for malformed ones: no TensorFlow, no checks."""

import struct

FLOAT, INT32, STRING, VARIANT = 1, 3, 7, 21  # of tensorflow.DataType


def varint(value):
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field, value):
    return varint(field << 3) + varint(value)


def message(field, content):
    content = content.encode() if isinstance(content, str) else content
    return varint(field << 3 | 2) + varint(len(content)) + content


def fields(data):
    """Returns all fields as (number, value): integers, and the bytes of strings and messages."""
    at, found = 0, []

    def take():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = take()
        kind = tag & 7
        if kind == 0:
            value = take()
        elif kind == 1:
            (value,) = struct.unpack_from("<Q", data, at)
            at += 8
        elif kind == 2:
            length = take()
            value = bytes(data[at : at + length])
            at += length
        else:
            (value,) = struct.unpack_from("<I", data, at)
            at += 4
        found.append((tag >> 3, value))
    return found


# Tensors. -------------------------------------------------------------------------------------------------------------


def shape(*sizes):
    return b"".join(message(2, number(1, size)) for size in sizes)


def tensor(dtype, sizes=(), content=b""):
    """A TensorProto; `content`: the encoded value fields."""
    return number(1, dtype) + message(2, shape(*sizes)) + content


def variant(type_name, metadata=b"", tensors=()):
    """A scalar DT_VARIANT that holds one object."""
    held = message(1, type_name) + (message(2, metadata) if metadata else b"") + b"".join(message(3, one) for one in tensors)
    return tensor(VARIANT, (), message(15, held))


def one_float(value=1.0):
    """`float_val` with one element, which TensorFlow repeats to fill the shape."""
    return message(5, struct.pack("<f", value))


# Graphs. --------------------------------------------------------------------------------------------------------------


def attribute(name, value):
    return message(5, message(1, name) + message(2, value))


def node(name, op, device, inputs=(), **attributes):
    head = message(1, name) + message(2, op) + b"".join(message(3, one) for one in inputs) + message(4, device)
    return message(1, head + b"".join(attribute(key, value) for key, value in attributes.items()))


def of_type(dtype):
    return number(6, dtype)


def of_int(value):
    return number(3, value)


def graph(*nodes):
    # Versions: a producer that every TensorFlow accepts.
    return b"".join(nodes) + message(4, number(1, 1087))


def identity_plan(device, name="x", dtype=FLOAT, feed=0, fetch=0):
    """A plan that returns its only feed. Each name makes a different plan. `feed`, `fetch`: their numbers."""
    return graph(
        node(f"{name}_in", "_Arg", device, T=of_type(dtype), index=of_int(feed)),
        node(name, "Identity", device, [f"{name}_in"], T=of_type(dtype)),
        node(f"{name}_out", "_Retval", device, [name], T=of_type(dtype), index=of_int(fetch)),
    )


def fill_plan(device, name):
    """A plan whose reply may be larger than its request: as many copies of its second feed as its first feed says."""
    return graph(
        node(f"{name}_count", "_Arg", device, T=of_type(INT32), index=of_int(0)),
        node(f"{name}_in", "_Arg", device, T=of_type(FLOAT), index=of_int(1)),
        node(name, "Fill", device, [f"{name}_count", f"{name}_in"], T=of_type(FLOAT), index_type=of_type(INT32)),
        node(f"{name}_out", "_Retval", device, [name], T=of_type(FLOAT), index=of_int(0)),
    )


def waiting_plan(device, name):
    """A plan that waits for an element of an empty queue."""
    types = message(1, message(6, varint(FLOAT)))
    return graph(
        node("queue", "FIFOQueueV2", device, component_types=types, capacity=of_int(1), shared_name=message(2, name)),
        node("element", "QueueDequeueV2", device, ["queue"], component_types=types),
        node("out", "_Retval", device, ["element"], T=of_type(FLOAT), index=of_int(0)),
    )
