"""starwire: a faster transport for TensorFlow's parameter servers.

Importing this package loads ``libstarwire.so`` into TensorFlow and registers its protocols::

    import starwire
    import tensorflow as tf

    server = tf.distribute.Server(cluster, job_name="ps", task_index=0, protocol="grpc++")

If there is no library for the running TensorFlow, the import raises an ``ImportError`` that explains what to do.

``starwire run train.py`` (or ``python -m starwire run``) and ``STARWIRE_PROTOCOL`` change the protocol of scripts that do not import it.
"""

import os
import sys

from starwire._config import config
from starwire._coordinator import coordinator
from starwire._endpoint_map import endpoint_map
from starwire._estimator import run_config
from starwire._library import library_path, load
from starwire._stop import stop
from starwire._version import __version__
from starwire._work_queue import WorkQueue
from starwire_run import protocols as _protocols

__all__ = ["WorkQueue", "__version__", "config", "coordinator", "endpoint_map", "library_path", "protocols", "run_config", "stop"]


def protocols():
    """Returns the values that starwire adds for ``protocol=`` and ``rpc_layer=``."""
    return _protocols.OURS


def _is_command():
    """Whether this import is that of ``python -m starwire``, which does not need TensorFlow."""
    if sys.argv[:1] != ["-m"]:
        return False
    words = getattr(sys, "orig_argv", None)
    if words is None:  # up to Python 3.9
        with open("/proc/self/cmdline", "rb") as file:
            words = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    return len(words) >= len(sys.argv) and words[-len(sys.argv)] in ("starwire", "-mstarwire")


def _follow_environment():
    try:
        protocol = _protocols.wanted()
    except ValueError as error:
        raise ImportError(str(error)) from None
    if protocol not in (None, _protocols.STOCK):
        from starwire_run import replace

        replace.apply(protocol)


if not _is_command():
    load()
    _follow_environment()
