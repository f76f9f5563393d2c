"""Waits for the import of TensorFlow, then replaces the protocol."""

import importlib.machinery
import os
import sys

from starwire_run import protocols

_NAME = "tensorflow"


def install():
    """Makes the import of TensorFlow apply STARWIRE_PROTOCOL. Imports nothing heavy and never raises; further calls have no effect."""
    if not any(isinstance(finder, _StarwireFinder) for finder in sys.meta_path):
        sys.meta_path.append(_StarwireFinder())
    if _NAME in sys.modules:
        _after_import()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _StarwireFinder:
    """Finds starwire where this file is, if the other finders do not: an installed one comes first. Nothing else that is there."""

    def find_spec(self, name, path=None, target=None):
        if name not in ("starwire", "starwire_run"):
            return None
        return importlib.machinery.PathFinder.find_spec(name, [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))])


class _Finder:
    """Finds TensorFlow where the other finders do, and adds one step to its import."""

    def find_spec(self, name, path=None, target=None):
        if name != _NAME:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                # A folder that happens to have the name has no loader, and is not TensorFlow.
                if spec.loader is not None:
                    _extend(spec.loader)
                return spec
        return None


def _extend(loader):
    """Only this one method of the loader is replaced: resources, sources and pickles keep working."""
    original = loader.exec_module

    def exec_module(module):
        # A wrong name should not cost the seconds that TensorFlow's import takes.
        _wanted()
        original(module)
        _after_import()

    loader.exec_module = exec_module


def _wanted():
    try:
        return protocols.wanted()
    except ValueError as error:
        raise ImportError(str(error)) from None


def _after_import():
    protocol = _wanted()
    # With TensorFlow's own protocol, only tensor_fuse needs the library.
    if protocol is None or (protocol == protocols.STOCK and not os.environ.get("STARWIRE_TENSOR_FUSE")):
        return
    if protocol != protocols.STOCK:
        from starwire_run import replace

        replace.apply(protocol)
    # Loads the library. If the script imports starwire first, that import is under way and does so itself.
    import starwire  # noqa: F401
