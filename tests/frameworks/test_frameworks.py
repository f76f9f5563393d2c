"""Frameworks that build their own servers, unmodified, under `starwire run`: `make test-frameworks`.

Each gets its own environment in .venvs/, which shares TensorFlow with .venvs/VERSION. EasyRec needs Python 3.9 and TensorFlow 2.12.
"""

import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
VENVS = ROOT / ".venvs"
# What each needs besides TensorFlow. Their own requirements name other versions of TensorFlow, or none.
FRAMEWORKS = {
    "deepctr": ("2.15.1", ["--no-deps", "deepctr==0.9.4"]),
    "tfra": ("2.15.1", ["--no-deps", "tensorflow-recommenders-addons==0.7.2", "typeguard==2.13.3"]),
    "keras": ("2.15.1", []),
    "easyrec": ("2.12.1", ["pai-easy-rec==0.7.1", "numpy==1.23.*", "protobuf==3.20.3", "pandas<2.1"]),
}


def installed(name):
    """Returns the interpreter of a framework's environment and its library."""
    version, packages = FRAMEWORKS[name]
    library = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / f"tf-{version}" / "libstarwire.so"
    if not library.is_file():
        pytest.fail(f"there is no library for TensorFlow {version}: make build TF_VERSION={version}")
    base = VENVS / version / "bin" / "python"
    if name == "easyrec":
        # It uses names that Python 3.10 has removed.
        found = shutil.which("python3.9")
        if not found or subprocess.run([found, "-c", "import venv, ensurepip"], capture_output=True).returncode:
            pytest.skip("EasyRec 0.7.1 needs Python 3.9, which is not on PATH")
        base, packages = Path(found), [f"tensorflow-cpu=={version}", "requests", *packages]
    venv = VENVS / f"framework-{name}"
    done = venv / ".done"
    if not done.exists():
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([base, "-m", "venv", venv], check=True)
        if name != "easyrec":
            site = next((venv / "lib").glob("python3*/site-packages"))
            (site / "tensorflow.pth").write_text(f"{next((VENVS / version / 'lib').glob('python3*/site-packages'))}\n")
        if packages:
            subprocess.run([venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], check=True, stdin=subprocess.DEVNULL)
        done.touch()
    return venv / "bin" / "python", library


@pytest.fixture
def train(tmp_path):
    """Runs a framework's script as a cluster; returns the tasks' logs."""

    def call(name, protocol, *words, workers=2):
        interpreter, library = installed(name)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("STARWIRE_", "PYTHON", "TF_"))}
        environment.update(PYTHONPATH=str(ROOT / "python"), STARWIRE_LIBRARY=str(library), CUDA_VISIBLE_DEVICES="-1")
        command = [interpreter, "-m", "starwire", "run", "--protocol", protocol, "--ps", "2", "--worker", workers, "--chief", "--linger", "20", "--logs", tmp_path / "logs"]
        result = subprocess.run([*map(str, command), *map(str, words)], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
        assert result.returncode == 0, result.stdout[-6000:]
        logs = {path.stem: path.read_text() for path in (tmp_path / "logs").iterdir()}
        assert sorted(logs) == ["chief-0", "ps-0", "ps-1", "worker-0", "worker-1"][: 3 + workers]
        for task, log in logs.items():
            # Every task that came far enough to have a server has one of the protocol.
            servers = re.findall(r"starwire: (\S+) on \d+ reactor", log)
            assert set(servers) <= ({protocol} if protocol != "grpc" else set()), (task, servers)
            assert bool(servers) == (protocol != "grpc"), f"{task}: {log[-3000:]}"
        return logs

    return call


PROTOCOLS = pytest.mark.parametrize("protocol", ["grpc", "grpc++", "star_server"])


@PROTOCOLS
def test_deepctr_estimator(train, protocol, tmp_path):
    logs = train("deepctr", protocol, HERE / "deepctr_estimator.py", tmp_path / "model")
    assert int(re.search(r"result: global step (\d+)", logs["chief-0"])[1]) >= 1000


@PROTOCOLS
def test_tfra_estimator(train, protocol, tmp_path):
    logs = train("tfra", protocol, HERE / "tfra_estimator.py", tmp_path / "model", 1000)
    assert int(re.search(r"result: global step (\d+)", logs["chief-0"])[1]) >= 1000
    if protocol == "star_server":
        assert "an operation that starwire does not know" not in logs["chief-0"], "TFRA's tables are in star calls"


def test_tfra_has_the_same_losses(train, tmp_path):
    """A chief alone, whose steps are the same in every run."""
    losses = {}
    for protocol in ("grpc", "star_server", "star_server_lite"):
        logs = train("tfra", protocol, HERE / "tfra_estimator.py", tmp_path / protocol, 200, workers=0)
        losses[protocol] = re.findall(r"loss ([\d.]+)$", logs["chief-0"], re.MULTILINE)
        shutil.rmtree(tmp_path / "logs")
    assert len(losses["grpc"]) == 200
    assert losses["star_server"] == losses["star_server_lite"] == losses["grpc"]


@PROTOCOLS
def test_keras_parameter_server_tutorial(train, protocol):
    logs = train("keras", protocol, HERE / "keras_parameter_servers.py")
    assert re.search(r"result: loss \d", logs["chief-0"])
    assert f"ps 0 serves {protocol}" in logs["ps-0"]


@PROTOCOLS
def test_easyrec(train, protocol, tmp_path):
    """EasyRec's own main module with TF_CONFIG, as its documentation runs it."""
    dice = random.Random(1)
    for name, rows in (("train", 4096), ("eval", 512)):
        lines = []
        for _ in range(rows):
            user, item = dice.randrange(100), dice.randrange(150)
            lines.append(f"{float((user + item) % 2)},u{user},i{item},{dice.random():.3f}\n")
        (tmp_path / f"{name}.csv").write_text("".join(lines))
    config = tmp_path / "pipeline.config"
    config.write_text((HERE / "easyrec.config").read_text().replace("FOLDER", str(tmp_path)))
    logs = train("easyrec", protocol, "-m", "easy_rec.python.train_eval", "--pipeline_config_path", config)
    assert "Loss for final step" in logs["chief-0"]
    steps = [int(path.stem.rpartition("-")[2]) for path in (tmp_path / "model").glob("model.ckpt-*.index")]
    assert max(steps) >= 1000, steps
