"""Session options that TensorFlow's ConfigProto has no fields for."""

from starwire import _ahead, _pipeline, _runs, _wire

# DeepRec's ConfigProto.tensor_fuse: a varint field. TensorFlow's ConfigProto does not know it and passes it on unchanged.
_FIELD = 201
_TENSOR_FUSE = {True: b"\xc8\x0c\x01", False: b"\xc8\x0c\x00"}
# A device type that does not exist; the server looks for it (cc/star/switch.cc).
_STAR = "STARWIRE_STAR"
# The same (cc/graph/wire_dtype.cc).
_WIRE_DTYPE = "STARWIRE_WIRE_DTYPE"


def config(proto=None, *, tensor_fuse=None, star=None, pipeline=None, ahead=None, wire_dtype=None):
    """Returns a ConfigProto for a session, a server, a RunConfig or a MonitoredTrainingSession.

    Args:
      proto: a ``tf.compat.v1.ConfigProto`` to start from; it is not changed.
      tensor_fuse: True: send tensors that cross between two tasks together as one. False: do not, overriding the server's configuration
        and ``STARWIRE_TENSOR_FUSE``. None: keep those settings, or the one in ``proto``.
      star: False: make no star calls even if the server's protocol is ``star_server`` or ``star_server_lite``; the session runs as over
        ``grpc++``, for example under a debugger. None: follow the protocol.
      pipeline: the number of steps that may be under way when the next one begins (docs/pipeline.md). ``session.run`` of a training step
        then returns the results of an earlier one. 0: none, as always in TensorFlow. None: keep the number in ``proto``.
      ahead: 1: training steps read one batch of their dataset ahead, so that its parameters arrive with the end of the step before
        (docs/ahead.md). 0: they do not. None: keep the setting in ``proto``.
      wire_dtype: ``"bfloat16"`` (or ``tf.bfloat16``): in training steps, float32 parameters and gradients cross the network with 16 bits
        (docs/wire_dtype.md). ``"float32"``: they do not. None: keep the setting in ``proto``.
    """
    import tensorflow as tf

    data = proto.SerializeToString() if proto is not None else b""
    if tensor_fuse is not None:
        data = _wire.without(data, _FIELD) + _TENSOR_FUSE[bool(tensor_fuse)]
    made = tf.compat.v1.ConfigProto.FromString(data)
    if star is not None:
        if star:
            raise ValueError("starwire.config(star=...) can only be False: only the server's protocol (star_server) turns star calls on")
        made.device_count[_STAR] = 0
    if wire_dtype is not None:
        dtype = tf.dtypes.as_dtype(wire_dtype)
        if dtype not in (tf.bfloat16, tf.float32):
            raise ValueError(f"starwire.config(wire_dtype=...) must be bfloat16 or float32, not {dtype.name}")
        made.device_count[_WIRE_DTYPE] = dtype.as_datatype_enum
    if pipeline is not None:
        made.device_count[_runs.PIPELINE] = _pipeline.checked(pipeline)
    if ahead is not None:
        made.device_count[_runs.AHEAD] = _ahead.checked(ahead)
    if any(made.device_count.get(name, 0) > 0 for name in (_runs.PIPELINE, _runs.AHEAD)):
        _runs.apply()
    return made
