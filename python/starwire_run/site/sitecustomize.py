# `starwire run` puts this file's folder at the front of PYTHONPATH, so every Python process of the job reads it at its start, whatever its
# version: only syntax that each of them can read. The sitecustomize that this one hides is run as well.
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


def _install():
    if sys.version_info < (3, 7) or not os.environ.get("STARWIRE_PROTOCOL"):
        return
    # At the end: an installed starwire comes first. Only for this import: other things may lie there.
    sys.path.append(os.path.dirname(os.path.dirname(_here)))
    try:
        from starwire_run import hook
    finally:
        sys.path.pop()
    hook.install()


def _run_hidden():
    if sys.version_info < (3, 5):
        return
    import importlib.machinery
    import importlib.util

    rest = [folder for folder in sys.path if os.path.abspath(folder) != _here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_install()
_run_hidden()
