"""Ends servers, which TensorFlow cannot."""


def stop(server):
    """Ends a ``tf.distribute.Server`` with one of starwire's protocols.

    Closes its ports and ends its threads; sessions and peers that still use it get ``UnavailableError``. Calling it again does nothing. TensorFlow
    has nothing like it: a server whose last reference goes serves on until the process ends, or until another server wants its port.

    Raises ValueError for a server with a protocol of TensorFlow's own.
    """
    import tensorflow as tf
    from tensorflow.python.client import pywrap_tf_session

    protocol = server.server_def.protocol
    from starwire import protocols

    if protocol not in protocols():
        raise ValueError(f"starwire: a server with protocol {protocol!r} is TensorFlow's own, which cannot be stopped; starwire's are {', '.join(protocols())}")
    try:
        pywrap_tf_session.TF_ServerStop(server._server)
    except tf.errors.UnimplementedError:
        # TensorFlow's answer while a server runs. Who asks twice means it.
        pywrap_tf_session.TF_ServerStop(server._server)
