"""The wheel of `make wheels` where there is no compiler and no checkout: each Python at hand, with the newest TensorFlow in the wheel that it can have.

Environments with TensorFlow are kept in target/wheels/envs/. Run by `make test-wheel`.
"""

import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))

from starwire_run import ports  # noqa: E402

TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
ENVIRONMENTS = TARGET / "wheels" / "envs"
# The first and the last minor release of TensorFlow for each Python.
PYTHONS = {"3.9": (12, 20), "3.10": (12, 99), "3.11": (12, 99), "3.12": (16, 99), "3.13": (20, 99), "3.14": (22, 99)}


def number(version):
    return [int(part) for part in re.findall(r"\d+", version)]


def wheel():
    found = sorted((TARGET / "dist").glob("starwire-*-py3-none-manylinux*.whl"))
    if not found:
        pytest.fail("no wheel in target/dist: run `make wheels` first")
    return found[-1]


def libraries():
    names = zipfile.ZipFile(wheel()).namelist()
    return sorted((name.split("/")[2][len("tf-") :] for name in names if name.endswith("/libstarwire.so")), key=number)


def interpreter(version):
    pyenv = sorted((Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions").glob(f"{version}.*/bin/python"))
    return str(pyenv[-1]) if pyenv else shutil.which(f"python{version}")


class Environment:
    """A virtual environment whose PATH has nothing but itself."""

    def __init__(self, python, tensorflow, name=None):
        self.folder = ENVIRONMENTS / (name or f"py{python}-tf{tensorflow}")
        self.variables = {"PATH": str(self.folder / "bin"), "HOME": os.environ.get("HOME", "/"), "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
        # pip's own settings: where packages are.
        self.variables.update({key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_"))})
        if not (self.folder / "ok").exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            subprocess.run([interpreter(python), "-m", "venv", self.folder], check=True)
            self.install_tensorflow(tensorflow)
            (self.folder / "ok").touch()
        for program in ("cc", "gcc", "g++", "clang", "cargo", "rustc"):
            assert shutil.which(program, path=self.variables["PATH"]) is None

    def install_tensorflow(self, version):
        pins = ["numpy<2"] if number(version) < [2, 18] else []
        pins += ["requests"] if number(version) < [2, 13] else []
        self.run("pip", "install", "--quiet", "--no-compile", f"tensorflow-cpu=={version}", *pins)

    def install(self):
        """Installs the wheel; returns the seconds that it took."""
        begun = time.monotonic()
        self.run("pip", "install", "--quiet", "--no-index", "--no-deps", "--force-reinstall", str(wheel()))
        return time.monotonic() - begun

    def start(self, program, *arguments, **options):
        return subprocess.Popen([self.folder / "bin" / program, *arguments], env=self.variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)

    def run(self, program, *arguments, cwd="/"):
        result = subprocess.run([self.folder / "bin" / program, *arguments], env=self.variables, cwd=cwd, capture_output=True, text=True, timeout=900)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout.strip()

    def python(self, code):
        return self.run("python", "-c", code)


@pytest.fixture(params=list(PYTHONS))
def environment(request):
    if interpreter(request.param) is None:
        pytest.skip(f"no Python {request.param}")
    first, last = PYTHONS[request.param]
    usable = [version for version in libraries() if first <= number(version)[1] <= last]
    if not usable:
        pytest.skip(f"the wheel has no TensorFlow for Python {request.param}")
    made = Environment(request.param, usable[-1])
    # Busy machines take longer; a build would take minutes.
    assert made.install() < 60
    return made


def test_it_trains(environment, tmp_path):
    # A copy, because the original prefers the checkout's package.
    folder = tmp_path / "tests" / "matrix"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "tests/matrix/smoke.py", folder)
    assert environment.run("python", str(folder / "smoke.py"), cwd=tmp_path).splitlines()[-1].startswith("smoke: ok")
    where = environment.python("import starwire; print(starwire.library_path())")
    assert where.startswith(f"{environment.folder.resolve()}/lib/"), where


def test_commands_and_metadata(environment):
    version = wheel().name.split("-")[1]
    assert environment.run("starctl", "--version") == f"starctl {version}"
    assert "Usage: starctl health" in environment.run("starctl", "health", "--help")
    assert "usage: starwire run" in environment.run("starwire", "run", "--help")
    code = "import importlib.metadata as m; d = m.metadata('starwire'); print(d['Version'], d['License'], len(d.get_all('Classifier')) > 10, m.version('tensorflow-cpu'))"
    assert environment.python(code).split()[:3] == [version, "Apache-2.0", "True"]


def test_training_survives_the_kill_of_a_server(environment, tmp_path):
    hosts = [*map(str, ports.free(2)), str(tmp_path / "checkpoints")]
    script = str(Path(__file__).with_name("restart.py"))
    ps = environment.start("python", script, "ps", *hosts, cwd=tmp_path)
    worker = environment.start("python", script, "worker", *hosts, cwd=tmp_path)
    try:
        seen = []
        for line in worker.stdout:
            seen.append(line)
            if line == "step 20\n":
                ps.kill()
                ps.communicate()
                ps = environment.start("python", script, "ps", *hosts, cwd=tmp_path)
        assert worker.wait(120) == 0, "".join(seen)
        assert seen[-1] == "done: 100 steps, 100 updates\n", "".join(seen)
    finally:
        for process in (ps, worker):
            process.kill()
            process.communicate()


def test_it_survives_an_upgrade_of_tensorflow():
    """One installation of the wheel, two releases of TensorFlow underneath."""
    usable = libraries()
    if len(usable) < 2:
        pytest.skip("the wheel has one library")
    old, new = usable[-2:]
    environment = Environment("3.11", old, name="upgraded")
    show = "import starwire, tensorflow as tf; print(tf.__version__, starwire.library_path())"
    try:
        environment.install_tensorflow(old)  # an earlier run has upgraded it
        environment.install()
        for version in (old, new):
            environment.install_tensorflow(version)
            running, path = environment.python(show).split()
            assert running == version and f"/tf-{version}/" in path
    finally:
        (environment.folder / "ok").unlink(missing_ok=True)


def test_a_release_without_library_is_refused_with_those_that_have_one(tmp_path):
    usable = libraries()
    last = usable[-1]
    environment = Environment("3.11", last)
    zipfile.ZipFile(wheel()).extractall(tmp_path)
    shutil.rmtree(tmp_path / "starwire" / "lib" / f"tf-{last}")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\ntry:\n    import starwire\nexcept ImportError as error:\n    print(error)"
    message = environment.python(code)
    assert f"but TensorFlow {last} is running. Install one of these versions, a newer starwire, or build it from source: pip install " in message
    for version in usable[:-1]:
        assert version in message.partition(", but ")[0]
