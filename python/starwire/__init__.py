"""starwire: a faster transport for TensorFlow's parameter servers.

Importing this package loads ``libstarwire.so`` into TensorFlow and registers its protocols::

    import starwire
    import tensorflow as tf

    server = tf.distribute.Server(cluster, job_name="ps", task_index=0, protocol="grpc++")

If there is no library for the running TensorFlow, the import raises an ``ImportError`` that explains what to do.
"""

from starwire._config import config
from starwire._endpoint_map import endpoint_map
from starwire._estimator import run_config
from starwire._library import library_path, load
from starwire._stop import stop
from starwire._version import __version__

__all__ = ["__version__", "config", "endpoint_map", "library_path", "protocols", "run_config", "stop"]


def protocols():
    """Returns the values that starwire adds for ``protocol=`` and ``rpc_layer=``."""
    return ("grpc++", "star_server", "star_server_lite", "grpc+verbs")


load()
