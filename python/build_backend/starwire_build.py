"""PEP 517 backend for `pip install .`: builds libstarwire.so against the TensorFlow of the environment that pip installs into, and packs a wheel.

Build requirements cannot express that dependency: the wheel fits one release of TensorFlow, which its version names (0.2.0+tf2.21.0). Asking for the metadata
compiles nothing. scripts/build-plugin reports its progress; pip shows it with -v.
"""

import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tarfile

import starwire_wheel
from starwire_wheel import HOOK, ROOT, VERSION


def get_requires_for_build_wheel(config_settings=None):
    return []


get_requires_for_build_editable = get_requires_for_build_sdist = get_requires_for_build_wheel


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    version = _version()
    name = starwire_wheel.dist_info(version)
    folder = pathlib.Path(metadata_directory) / name
    folder.mkdir()
    for file, data in starwire_wheel.information(version, _tag()).items():
        (folder / file).write_bytes(data)
    return name


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    version = _version()
    tensorflow, library = _build_library()
    files = starwire_wheel.package_files()
    files[f"starwire/lib/tf-{tensorflow}/libstarwire.so"] = library.read_bytes()
    return starwire_wheel.write(wheel_directory, version, _tag(), files)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    version = _version()
    _build_library()
    return starwire_wheel.write(wheel_directory, version, _tag(), {"starwire-checkout.pth": f"{ROOT / 'python'}\n{HOOK}".encode()})


def build_sdist(sdist_directory, config_settings=None):
    name = f"starwire-{VERSION}"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    with tarfile.open(pathlib.Path(sdist_directory) / f"{name}.tar.gz", "w:gz") as archive:
        for path in filter(None, listed):
            archive.add(ROOT / path, f"{name}/{path}")
        info = tarfile.TarInfo(f"{name}/PKG-INFO")
        text = starwire_wheel.metadata(VERSION)
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text))
    return f"{name}.tar.gz"


def _environment():
    # pip may isolate this process from the environment; a fresh interpreter sees it.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment["STARWIRE_PYTHON"] = sys.executable
    return environment


def _version():
    # Python 3.7 has no importlib.metadata, and belongs to TensorFlow 1.15.
    ask = "import pkg_resources as p, sys; print(*(d.version for d in p.working_set if d.key in sys.argv[1:]), sep='\\n')"
    if sys.version_info >= (3, 8):
        ask = "import importlib.metadata as m, sys; print(*(d.version for n in sys.argv[1:] for d in m.distributions(name=n)), sep='\\n')"
    names = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "tensorflow-cpu-aws", "intel-tensorflow", "tf-nightly", "tf-nightly-cpu")
    found = subprocess.run([sys.executable, "-c", ask, *names], env=_environment(), stdout=subprocess.PIPE, universal_newlines=True, check=True).stdout.split()
    if not found:
        sys.exit(f"starwire: {sys.executable} has no TensorFlow to build for. Install it there first, or install a wheel of starwire, which needs no build")
    return f"{VERSION}+tf{re.sub(r'[^0-9A-Za-z]+', '.', found[0])}"


def _tag():
    return f"py3-none-{re.sub(r'[-.]', '_', sysconfig.get_platform())}"


def _build_library():
    """Returns (TensorFlow's version, path of the library)."""
    command = [str(ROOT / "scripts/build-plugin"), sys.executable]
    with _terminal() as terminal, subprocess.Popen(command, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as build:
        for line in build.stderr:
            sys.stderr.write(line)
            if terminal is not None and line.startswith("starwire: "):
                terminal.write(f"\r{line}")
                terminal.flush()
        output = build.stdout.read()
    if build.returncode != 0:
        sys.exit("starwire: the library was not built; see the error above. The build needs cargo, g++ and, in this environment, TensorFlow 1.15.5, or 2.12 or later")
    library = ROOT / output.splitlines()[-1].rpartition(": ")[2]
    return library.parent.name[len("tf-") :], library


def _terminal():
    """Where the user sees progress although pip collects the output of this process; None inside if there is no terminal."""
    try:
        return open("/dev/tty", "w")
    except OSError:
        return contextlib.nullcontext()
