"""Stops servers, which TensorFlow cannot do."""


def stop(server):
    """Stops a ``tf.distribute.Server`` that uses one of starwire's protocols.

    Closes its ports and ends its threads; sessions and peers that still use it get ``UnavailableError``. Further calls have no effect. TensorFlow
    has no equivalent: a server without references keeps serving until the process ends or another server needs its port.

    Raises ValueError for a server that uses one of TensorFlow's own protocols.
    """
    import tensorflow as tf

    try:
        from tensorflow.python.client.pywrap_tf_session import TF_ServerStop
    except ImportError:  # TensorFlow 1
        from tensorflow.python.pywrap_tensorflow import TF_ServerStop
    protocol = server.server_def.protocol
    from starwire_run import protocols

    if not protocols.is_ours(protocol):
        raise ValueError(f"starwire: a server with protocol {protocol!r} cannot be stopped: it is not one of starwire's ({', '.join(protocols.OURS)})")
    try:
        TF_ServerStop(server._server)
    except tf.errors.UnimplementedError:
        # The first stop of a running server fails with Unimplemented, as TensorFlow's does; the second one stops it.
        TF_ServerStop(server._server)
