"""Keeps the secret of a cluster from the processes that this one starts.

A server that has read STARWIRE_SECRET empties it in the environment of its process. ``os.environ`` is a copy that Python made when it started,
and ``subprocess.run(..., env={**os.environ, ...})`` would hand the secret on.
"""

import ctypes
import functools
import os

from starwire_run.replace import EAGER

_NAME = "STARWIRE_SECRET"


def watch():
    """Empties the secret in ``os.environ`` as soon as a server that this process makes has read it."""
    from tensorflow.python.training import server_lib

    server_lib.Server.__init__ = _then_follow(server_lib.Server.__init__)
    try:
        from tensorflow.python import pywrap_tfe
    except ImportError:  # TensorFlow 1
        return
    for name in EAGER:
        if hasattr(pywrap_tfe, name):
            setattr(pywrap_tfe, name, _then_follow(getattr(pywrap_tfe, name)))


def _then_follow(function):
    @functools.wraps(function)
    def call(*arguments, **named):
        try:
            return function(*arguments, **named)
        finally:  # a server that cannot start has read it, too
            _follow()

    return call


def _follow():
    if not os.environ.get(_NAME):
        return
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    if getenv(_NAME.encode()) == b"":
        os.environ[_NAME] = ""
