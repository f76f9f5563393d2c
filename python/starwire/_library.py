"""Finds the library built for the running TensorFlow, and loads it once."""

import os
import pathlib
import threading

_PACKAGE = pathlib.Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent.parent
_lock = threading.Lock()
_loaded = None


def library_path():
    """Returns the library that is loaded or would be loaded: ``$STARWIRE_LIBRARY``, the installed one, or the checkout's.

    Raises ImportError if there is none for the running TensorFlow.
    """
    if _loaded is not None:
        return _loaded
    override = os.environ.get("STARWIRE_LIBRARY")
    if override:
        if not os.path.isfile(override):
            raise ImportError(f"starwire: STARWIRE_LIBRARY names {override!r}, which is not a file")
        return os.path.abspath(override)
    running = _tensorflow_version()
    built = _built_versions()
    if running in built:
        return str(built[running])
    raise ImportError(_advice(running, sorted(built)))


def load():
    """Loads the library into TensorFlow. Further calls have no effect."""
    global _loaded
    with _lock:
        if _loaded is not None:
            return
        import tensorflow as tf

        path = library_path()
        try:
            tf.load_library(path)
        except Exception as error:
            raise ImportError(f"starwire: TensorFlow {_tensorflow_version()} refused {path}: {error}") from error
        _loaded = path


def _built_versions():
    """Maps TensorFlow versions to libraries, of the installed package and of the checkout around this file, if any."""
    found = {}
    folders = [_PACKAGE / "lib"]
    if (_CHECKOUT / "Cargo.toml").is_file():
        folders.append(pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or _CHECKOUT / "target"))
    for folder in folders:
        for path in folder.glob("tf-*/libstarwire.so"):
            found.setdefault(path.parent.name[len("tf-") :], path)
    return found


def _tensorflow_version():
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ImportError(f"starwire needs TensorFlow 1.15.5, or 2.12 or later, which cannot be imported: {error}") from error
    return tf.__version__


def _advice(running, built):
    there = "built for TensorFlow " + ", ".join(built) if built else "not built yet"
    if (_CHECKOUT / "Cargo.toml").is_file():
        command = f"make -C {_CHECKOUT} build TF_VERSION={running}"
    else:
        command = "pip install --force-reinstall --no-deps PATH_OF_THE_STARWIRE_CHECKOUT"
    return f"starwire is {there}, but TensorFlow {running} is running. Build it for that version: {command}"
