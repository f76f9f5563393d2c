"""Protocol buffers as bytes, for messages and fields that TensorFlow's Python package does not have."""


def fields(data):
    """Yields (number, kind, begin, value's begin, end) of each field of a serialised message."""
    at = 0
    while at < len(data):
        begin = at
        tag, at = _varint(data, at)
        value, kind = at, tag & 7
        if kind == 0:
            _, at = _varint(data, at)
        elif kind == 2:
            size, value = _varint(data, at)
            at = value + size
        else:
            at += 8 if kind == 1 else 4
        yield tag >> 3, kind, begin, value, at


def without(data, number):
    """Returns a serialised message without one of its fields."""
    return b"".join(data[begin:end] for found, _, begin, _, end in fields(data) if found != number)


def _varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at
