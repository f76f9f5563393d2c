"""What the tests of `starwire run` share: fresh interpreters and launchers."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "starwire_run"
SITE = PACKAGE / "site"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}


def environment(*paths, **variables):
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("STARWIRE_", "PYTHON", "CARGO_TARGET_DIR", "TF_CONFIG"))}
    return {**kept, **QUIET, "PYTHONPATH": os.pathsep.join(map(str, paths)), **variables}


def python(*words, paths=(ROOT / "python",), cwd="/", timeout=120, **variables):
    """Runs a fresh interpreter; returns (exit status, stdout, stderr)."""
    result = subprocess.run([sys.executable, *map(str, words)], env=environment(*paths, **variables), cwd=cwd, capture_output=True, text=True, timeout=timeout)
    return result.returncode, result.stdout, result.stderr


def run(*words, **options):
    """`starwire run …`"""
    return python("-m", "starwire", "run", *words, **options)


def script(folder, text, name="train.py"):
    path = folder / name
    path.write_text(text)
    return path


def port_finder():
    sys.path.insert(0, str(PACKAGE.parent))
    from starwire_run import ports

    return ports


def free_port():
    sys.path += [str(PACKAGE.parent), str(ROOT / "tests" / "python")]
    import own_ports

    return own_ports.free_port()
