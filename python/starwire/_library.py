"""Finds the library built for the running TensorFlow, and loads it once."""

import os
import pathlib
import re
import threading

from starwire import _secret

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
    for version in _row(running):
        if version in built:
            return str(built[version])
    raise ImportError(_advice(running, built))


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
        _secret.watch()
        _loaded = path


def _row(version):
    """The releases whose library fits ``version``, itself first: releases.inc."""
    rows = (re.findall(r'"(.+?)"', line) for line in (_PACKAGE / "releases.inc").read_text().splitlines() if line.startswith("{"))
    return [version] + [other for row in rows if version in row for other in row if other != version]


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
    # As its package has it: 2.22.0rc0 and 2.23.0.dev20261026 call themselves 2.22.0-rc0 and 2.23.0-dev20261026.
    return tf.__version__.replace("-rc", "rc").replace("-dev", ".dev")


def _advice(running, built):
    versions = sorted({fits for version in built for fits in _row(version)}, key=lambda version: [int(number) for number in re.findall(r"\d+", version)])
    there = "built for TensorFlow " + ", ".join(versions) if versions else "not built yet"
    if (_CHECKOUT / "Cargo.toml").is_file():
        advice = f"Build it for that version: make -C {_CHECKOUT} build TF_VERSION={running}"
    else:
        advice = "Install one of these versions, a newer starwire, or build it from source: pip install --no-cache-dir --force-reinstall --no-deps PATH_OF_THE_STARWIRE_CHECKOUT"
    return f"starwire is {there}, but TensorFlow {running} is running. {advice}"
