"""Lets Estimator (TensorFlow up to 2.15) use starwire's protocols, which its RunConfig rejects."""


def run_config(protocol="grpc++", **arguments):
    """Returns a ``tf.estimator.RunConfig`` for ``protocol``; takes RunConfig's other arguments.

    RunConfig accepts only ``grpc`` and ``grpc+verbs``, and checks again whenever one of its fields is replaced. So pass everything here,
    including ``model_dir``, and not to the Estimator.

    Raises:
      AttributeError: this TensorFlow has no Estimator.
      ValueError: ``model_dir`` is missing both here and in TF_CONFIG, or RunConfig rejects an argument.
    """
    import tensorflow as tf
    from tensorflow.core.protobuf import rewriter_config_pb2

    config = tf.estimator.RunConfig(**arguments)
    if not config.model_dir:
        raise ValueError("starwire.run_config: model_dir is missing, and the Estimator cannot add it to a RunConfig whose protocol is not grpc: pass model_dir")
    if config.session_config is None:
        # What an Estimator replaces None by.
        rewrites = rewriter_config_pb2.RewriterConfig(meta_optimizer_iterations=rewriter_config_pb2.RewriterConfig.ONE)
        graph_options = tf.compat.v1.GraphOptions(rewrite_options=rewrites)
        config = config.replace(session_config=tf.compat.v1.ConfigProto(allow_soft_placement=True, graph_options=graph_options))
    config._protocol = protocol
    return config
