"""PEP 517 backend for `pip install .`: builds libstarwire.so against the TensorFlow of the environment that pip installs into, and packs a wheel.

Build requirements cannot express that dependency: a wheel fits exactly one installed TensorFlow version.
"""

import base64
import hashlib
import os
import pathlib
import runpy
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSION = runpy.run_path(str(ROOT / "python/starwire/_version.py"))["__version__"]
SUMMARY = "A thread-per-core transport and parameter-server runtime that plugs into stock TensorFlow"
DIST_INFO = f"starwire-{VERSION}.dist-info"
PACKAGES = ("starwire", "starwire_run")
# Python runs this line at its start, so that STARWIRE_PROTOCOL works for every script of the environment.
HOOK = "import os; os.environ.get('STARWIRE_PROTOCOL') and __import__('starwire_run.hook').hook.install()\n"


def get_requires_for_build_wheel(config_settings=None):
    return []


def get_requires_for_build_editable(config_settings=None):
    return []


def get_requires_for_build_sdist(config_settings=None):
    return []


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    version, library = _build_library()
    sources = sorted(path for package in PACKAGES for path in (ROOT / "python" / package).rglob("*.py"))
    files = {str(path.relative_to(ROOT / "python")): path.read_bytes() for path in sources}
    files["starwire.pth"] = HOOK.encode()
    files[f"starwire/lib/tf-{version}/libstarwire.so"] = library.read_bytes()
    return _write_wheel(wheel_directory, files)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _build_library()
    return _write_wheel(wheel_directory, {"starwire-checkout.pth": f"{ROOT / 'python'}\n{HOOK}".encode()})


def build_sdist(sdist_directory, config_settings=None):
    name = f"starwire-{VERSION}"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    with tarfile.open(pathlib.Path(sdist_directory) / f"{name}.tar.gz", "w:gz") as archive:
        for path in filter(None, listed):
            archive.add(ROOT / path, f"{name}/{path}")
        info = tarfile.TarInfo(f"{name}/PKG-INFO")
        text = _metadata()
        info.size = len(text)
        import io

        archive.addfile(info, io.BytesIO(text))
    return f"{name}.tar.gz"


def _build_library():
    """Returns (TensorFlow's version, path of the library)."""
    # pip may isolate this process from the environment; a fresh interpreter sees it.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment["STARWIRE_PYTHON"] = sys.executable
    result = subprocess.run([str(ROOT / "scripts/build-plugin"), sys.executable], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if result.returncode != 0:
        sys.exit("starwire: the library was not built; see the error above. The build needs cargo, g++ and, in this environment, TensorFlow 1.15.5, or 2.12 or later")
    library = ROOT / result.stdout.splitlines()[-1].rpartition(": ")[2]
    return library.parent.name[len("tf-") :], library


def _metadata():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    head = [
        "Metadata-Version: 2.1",
        "Name: starwire",
        f"Version: {VERSION}",
        f"Summary: {SUMMARY}",
        "License: Apache-2.0",
        "Requires-Python: >=3.7",
        "Description-Content-Type: text/markdown",
    ]
    return ("\n".join(head) + "\n\n" + readme).encode()


def _write_wheel(directory, files):
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    tag = f"py3-none-{platform}"
    files = dict(files)
    files[f"{DIST_INFO}/METADATA"] = _metadata()
    files[f"{DIST_INFO}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: starwire_build\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    files[f"{DIST_INFO}/entry_points.txt"] = b"[console_scripts]\nstarwire = starwire_run.command:main\n"
    if (ROOT / "LICENSE").is_file():
        files[f"{DIST_INFO}/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    name = f"starwire-{VERSION}-{tag}.whl"
    record = []
    with zipfile.ZipFile(pathlib.Path(directory) / name, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(data)}\n")
        record.append(f"{DIST_INFO}/RECORD,,\n")
        wheel.writestr(f"{DIST_INFO}/RECORD", "".join(record))
    return name
