"""Writes starwire's wheels, for `pip install .` (starwire_build.py) and for `make wheels` (scripts/wheels).

usage: starwire_wheel.py --tag TAG [--url URL] [--starctl PROGRAM] --out FOLDER VERSION=LIBRARY…
"""

import argparse
import base64
import hashlib
import pathlib
import re
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "python/starwire/_version.py").read_text(), re.M)[1]
PACKAGES = ("starwire", "starwire_run")
# Python runs this line at its start, so that STARWIRE_PROTOCOL works for every script of the environment.
HOOK = "import os; os.environ.get('STARWIRE_PROTOCOL') and __import__('starwire_run.hook').hook.install()\n"
HEAD = """\
Metadata-Version: 2.1
Name: starwire
Version: {version}
Summary: A thread-per-core transport and parameter-server runtime that plugs into stock TensorFlow
{urls}License: Apache-2.0
License-File: LICENSE
Keywords: tensorflow,parameter-server,distributed-training,recommender,rdma
Classifier: Development Status :: 4 - Beta
Classifier: Environment :: Plugins
Classifier: Intended Audience :: Developers
Classifier: Intended Audience :: Science/Research
Classifier: License :: OSI Approved :: Apache Software License
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: C++
Classifier: Programming Language :: Python :: 3
Classifier: Programming Language :: Python :: 3.7
Classifier: Programming Language :: Python :: 3.8
Classifier: Programming Language :: Python :: 3.9
Classifier: Programming Language :: Python :: 3.10
Classifier: Programming Language :: Python :: 3.11
Classifier: Programming Language :: Python :: 3.12
Classifier: Programming Language :: Python :: 3.13
Classifier: Programming Language :: Python :: 3.14
Classifier: Programming Language :: Rust
Classifier: Topic :: Scientific/Engineering :: Artificial Intelligence
Classifier: Topic :: System :: Distributed Computing
Requires-Python: >=3.7
Description-Content-Type: text/markdown

"""


def metadata(version, url=None):
    urls = f"Home-page: {url}\nProject-URL: Changelog, {url}/blob/main/CHANGELOG.md\nProject-URL: Documentation, {url}/tree/main/docs\n" if url else ""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if url:  # links to files of the repository
        readme = re.sub(r"\]\((?!\w+:|#)([^)]+)\)", rf"]({url}/blob/main/\1)", readme)
    return (HEAD.format(version=version, urls=urls) + readme).encode()


def package_files():
    """The files of the Python packages, by their path in the wheel."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / "python" / package).rglob("*") if path.suffix in (".py", ".inc"))
    files = {str(path.relative_to(ROOT / "python")): path.read_bytes() for path in paths}
    files["starwire.pth"] = HOOK.encode()
    return files


def dist_info(version):
    return f"starwire-{version}.dist-info"


def information(version, tag, url=None):
    """The files of the folder .dist-info but RECORD."""
    return {
        "METADATA": metadata(version, url),
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: starwire_wheel\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
        "entry_points.txt": b"[console_scripts]\nstarwire = starwire_run.command:main\n",
        "LICENSE": (ROOT / "LICENSE").read_bytes(),
    }


def write(directory, version, tag, files, url=None):
    """Writes a wheel, the same bytes for the same contents, and returns its name."""
    files = dict(files)
    folder = dist_info(version)
    files.update({f"{folder}/{name}": data for name, data in information(version, tag, url).items()})
    record = []
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(data)}\n")
    files[f"{folder}/RECORD"] = "".join([*record, f"{folder}/RECORD,,\n"]).encode()
    name = f"starwire-{version}-{tag}.whl"
    with zipfile.ZipFile(pathlib.Path(directory) / name, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for path, data in files.items():
            info = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            is_program = ".data/scripts/" in path or path.endswith(".so")
            info.external_attr = (0o100755 if is_program else 0o100644) << 16
            wheel.writestr(info, data)
    return name


def main():
    parser = argparse.ArgumentParser(description="Writes a wheel for several releases of TensorFlow.")
    parser.add_argument("--tag", required=True)
    parser.add_argument("--url")
    parser.add_argument("--starctl", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("libraries", nargs="+", metavar="VERSION=LIBRARY")
    arguments = parser.parse_args()
    files = package_files()
    for one in arguments.libraries:
        version, _, path = one.partition("=")
        files[f"starwire/lib/tf-{version}/libstarwire.so"] = pathlib.Path(path).read_bytes()
    if arguments.starctl:
        files[f"starwire-{VERSION}.data/scripts/starctl"] = arguments.starctl.read_bytes()
    print(arguments.out / write(arguments.out, VERSION, arguments.tag, files, arguments.url))


if __name__ == "__main__":
    main()
