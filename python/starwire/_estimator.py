"""Estimator (TensorFlow up to 2.15) with a protocol that its RunConfig does not know."""


def run_config(protocol="grpc++", **arguments):
    """A ``tf.estimator.RunConfig`` for ``protocol``; takes RunConfig's other arguments.

    RunConfig itself accepts no other protocols than ``grpc`` and ``grpc+verbs``, and checks that again whenever something of it is replaced. Everything has to be
    given here therefore, ``model_dir`` too, and not to the Estimator.

    Raises:
      AttributeError: if this TensorFlow has no Estimator.
      ValueError: if ``model_dir`` is missing, here and in TF_CONFIG, or RunConfig refuses an argument.
    """
    import tensorflow as tf

    config = tf.estimator.RunConfig(**arguments)
    if not config.model_dir:
        raise ValueError("starwire.run_config: model_dir is missing; the Estimator cannot add it to a RunConfig with another protocol than grpc")
    if config.session_config is None:
        config = config.replace(session_config=tf.compat.v1.ConfigProto())
    config._protocol = protocol
    return config
