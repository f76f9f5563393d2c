"""Session configuration that TensorFlow's own ConfigProto has no fields for."""

# DeepRec's ConfigProto.tensor_fuse: a varint field that TensorFlow's ConfigProto does not know, and therefore passes on as it is.
_TENSOR_FUSE = {True: b"\xc8\x0c\x01", False: b"\xc8\x0c\x00"}


def config(proto=None, *, tensor_fuse=None):
    """A ConfigProto for a session, a server, a RunConfig or a MonitoredTrainingSession.

    Args:
      proto: a ``tf.compat.v1.ConfigProto`` to start from; it is not changed.
      tensor_fuse: True: tensors that cross between tasks together travel as one. False: they do not, whatever the server's configuration and
        ``STARWIRE_TENSOR_FUSE`` say. None: as these say.
    """
    import tensorflow as tf

    made = tf.compat.v1.ConfigProto()
    if proto is not None:
        made.CopyFrom(proto)
    if tensor_fuse is not None:
        made.MergeFromString(_TENSOR_FUSE[bool(tensor_fuse)])
    return made
