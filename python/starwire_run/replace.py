"""Gives whatever asks TensorFlow for ``grpc`` the protocol of STARWIRE_PROTOCOL.

Every server of a Python process is made by one of a few functions that take a serialised ServerDef: ``tf.distribute.Server`` and
``tf.compat.v1.train.Server`` (and so Estimator), ``connect_to_cluster`` (ParameterServerStrategy, remote eager execution) and collectives.
They are replaced where Python calls them, so that nothing above has to be known.
"""

from starwire_run import protocols

# Functions of pywrap_tfe.
EAGER = (
    "TFE_ContextSetServerDef",
    "TFE_ContextUpdateServerDef",
    "TFE_ContextSetServerDefWithTimeout",
    "TFE_ContextSetServerDefWithTimeoutAndRetries",
    "TFE_EnableCollectiveOps",
)
_REQUIRED = {"TFE_ContextSetServerDef", "TFE_ContextUpdateServerDef", "TFE_EnableCollectiveOps"}
_applied = None


def apply(protocol):
    """Replaces ``grpc`` by ``protocol`` from now on, in this process. Raises ImportError if this TensorFlow is not built as expected."""
    global _applied
    if _applied is not None:
        return
    from tensorflow.core.protobuf import tensorflow_server_pb2
    from tensorflow.python.training import server_lib

    def replaced(server_def):
        if server_def.protocol != protocols.STOCK:
            return server_def
        copy = tensorflow_server_pb2.ServerDef()
        copy.CopyFrom(server_def)
        copy.protocol = protocol
        return copy

    def translated(function):
        def call(*arguments):
            return function(*(replaced(tensorflow_server_pb2.ServerDef.FromString(one)).SerializeToString() if isinstance(one, bytes) else one for one in arguments))

        call.__name__, call.__doc__ = function.__name__, function.__doc__
        return call

    def follow():
        # So that Server.server_def tells the truth. In TensorFlow 1, where nothing else asks for servers, this is all.
        original = server_lib._make_server_def
        server_lib._make_server_def = lambda *arguments, **named: replaced(original(*arguments, **named))

    try:
        from tensorflow.python import pywrap_tfe
        from tensorflow.python.client import pywrap_tf_session
    except ImportError:
        follow()
        _applied = protocol
        return
    found = {name for name in EAGER if hasattr(pywrap_tfe, name)}
    missing = sorted(_REQUIRED - found)
    missing += [name for owner, name in ((pywrap_tf_session, "TF_NewServer"), (server_lib, "_make_server_def")) if not hasattr(owner, name)]
    if missing:
        import tensorflow as tf

        raise ImportError(f"starwire: {protocols.VARIABLE} has no effect with TensorFlow {tf.__version__}, which lacks {', '.join(missing)}: pass protocol= instead")
    for name in found:
        setattr(pywrap_tfe, name, translated(getattr(pywrap_tfe, name)))
    pywrap_tf_session.TF_NewServer = translated(pywrap_tf_session.TF_NewServer)
    follow()
    _applied = protocol
