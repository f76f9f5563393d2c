"""Session options that TensorFlow's ConfigProto has no fields for."""

# DeepRec's ConfigProto.tensor_fuse: a varint field. TensorFlow's ConfigProto does not know it and passes it on unchanged.
_FIELD = 201
_TENSOR_FUSE = {True: b"\xc8\x0c\x01", False: b"\xc8\x0c\x00"}
# A device type that does not exist; the server looks for it (cc/star/switch.cc).
_STAR = "STARWIRE_STAR"


def config(proto=None, *, tensor_fuse=None, star=None):
    """Returns a ConfigProto for a session, a server, a RunConfig or a MonitoredTrainingSession.

    Args:
      proto: a ``tf.compat.v1.ConfigProto`` to start from; it is not changed.
      tensor_fuse: True: send tensors that cross between two tasks together as one. False: do not, overriding the server's configuration
        and ``STARWIRE_TENSOR_FUSE``. None: keep those settings, or the one in ``proto``.
      star: False: make no star calls even if the server's protocol is ``star_server`` or ``star_server_lite``; the session runs as over
        ``grpc++``, for example under a debugger. None: follow the protocol.
    """
    import tensorflow as tf

    data = proto.SerializeToString() if proto is not None else b""
    if tensor_fuse is not None:
        data = _without(data, _FIELD) + _TENSOR_FUSE[bool(tensor_fuse)]
    made = tf.compat.v1.ConfigProto.FromString(data)
    if star is not None:
        if star:
            raise ValueError("starwire.config(star=...) can only be False: only the server's protocol (star_server) turns star calls on")
        made.device_count[_STAR] = 0
    return made


def _without(data, field):
    """Returns a serialised message without one of its fields."""
    kept, at = b"", 0
    while at < len(data):
        begin = at
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            _, at = _varint(data, at)
        elif kind == 2:
            size, at = _varint(data, at)
            at += size
        else:
            at += 8 if kind == 1 else 4
        if tag >> 3 != field:
            kept += data[begin:at]
    return kept


def _varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at
