"""``starwire run``, and the replacement of the protocol of scripts that ask for ``grpc``.

Separate from the package ``starwire``, whose import loads TensorFlow: nothing here does. A process that never imports TensorFlow gets one
small import hook and nothing else.
"""
