"""The runner of TensorFlow's own tests (tests/tensorflow/run.py), with a file that prints what such tests print."""

import os
import subprocess
import sys
from pathlib import Path

RUNNER = Path(__file__).resolve().parents[1] / "tensorflow" / "run.py"

# The runner with a clock that goes on as usual, and by 400 s more each time that it is asked while a test hangs.
CLOCK = """
import pathlib, runpy, sys, time
real, folder, more = time.monotonic, pathlib.Path(sys.argv[1]), 0

def monotonic():
    global more
    more += 400 * sum(pathlib.Path("/proc", file.name).exists() for file in folder.iterdir())
    return real() + more

time.monotonic = monotonic
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PATIENCE = 1000
# T.crash and T.hang behave only over grpc; T.broken never.
TESTS = """
import os, sys, time
for name in sys.argv[1:] or ["T.good", "T.crash", "T.hang", "T.broken", "T.last"]:
    print(f"[ RUN      ] {name}", flush=True)
    if os.environ["STARWIRE_PROTOCOL"] != "grpc":
        if name == "T.crash":
            os._exit(3)
        if name == "T.hang":
            open(f"{os.environ['HANGING']}/{os.getpid()}", "w").close()
            time.sleep(1000)
    print(f"[  FAILED  ] {name}" if name == "T.broken" else f"[       OK ] {name}", flush=True)
"""


def run(tmp_path, protocol):
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("")
    folder = tmp_path / "source" / "tensorflow" / "python" / "some"
    folder.mkdir(parents=True)
    (folder / "some_test.py").write_text(TESTS)
    words = ["--source", tmp_path / "source", "--out", tmp_path / "out", "--only", "some/some_test"]
    words += ["--protocols", protocol, "--patience", str(PATIENCE)]
    (tmp_path / "hanging").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HANGING": str(tmp_path / "hanging")}
    command = [sys.executable, "-c", CLOCK, tmp_path / "hanging", RUNNER, *map(str, words)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return result.returncode, result.stdout + result.stderr


def test_what_passes_over_grpc_only_is_named(tmp_path):
    status, output = run(tmp_path, "grpc++")
    assert status == 1, output
    assert "| some/some_test | grpc | 0 | 4 | 1 | 0 |" in output
    assert "| some/some_test | grpc++ | 0 | 2 | 3 | 0 | T.crash crashed; T.hang hung |" in output


def test_a_protocol_that_does_the_same_is_no_difference(tmp_path):
    status, output = run(tmp_path, "grpc")
    assert status == 0, output
