"""Loading the library: through the Python package, directly, twice, into the wrong TensorFlow; and its exports."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from cluster import ROOT, RemoteError, library_path, state, tf

pytestmark = pytest.mark.ours


def python(code, timeout=120, cwd="/", **environment):
    """Runs code in a new interpreter."""
    # None unsets a variable.
    merged = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "1", "PYTHONPATH": str(ROOT / "python"), **environment}
    merged = {name: str(value) for name, value in merged.items() if value is not None}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, env=merged, cwd=cwd)


SERVE = """
with tf.Graph().as_default():
    server = tf.distribute.Server({"local": ["localhost:0"]}, protocol="grpc++")
    with tf.compat.v1.Session(server.target) as sess:
        print("result", sess.run(tf.compat.v1.placeholder_with_default(20.0, ()) + 1.0))
"""


def assert_served(done):
    assert done.returncode == 0, done.stderr
    assert "result 21.0" in done.stdout, done.stderr


def test_import_starwire(protocol):
    done = python("import tensorflow as tf\nimport starwire\nprint('protocols', starwire.protocols())\nprint('path', starwire.library_path())" + SERVE)
    assert_served(done)
    assert f"'{protocol}'" in done.stdout
    assert f"path {library_path()}" in done.stdout


def test_import_starwire_and_ask_with_the_prefix():
    code = SERVE.replace("grpc++", "starwire+grpc++") + "    starwire.stop(server)\n"
    assert_served(python("import tensorflow as tf\nimport starwire" + code))


def test_import_starwire_before_tensorflow():
    assert_served(python("import starwire\nimport tensorflow as tf" + SERVE))


def test_import_twice_and_load_by_hand_too():
    """Loading it repeatedly and in different ways yields one library and one set of protocols."""
    assert_served(python("import os, tensorflow as tf\nimport starwire\nstarwire.load()\nfor _ in range(3): tf.load_library(os.environ['STARWIRE_LIBRARY'])" + SERVE))


@pytest.mark.parametrize("loader", ["tf.load_library", "tf.load_op_library"])
def test_load_by_hand(loader):
    assert_served(python(f"import os, tensorflow as tf\n{loader}(os.environ['STARWIRE_LIBRARY'])\n{loader}(os.environ['STARWIRE_LIBRARY'])" + SERVE))


def test_a_second_copy_is_harmless(tmp_path):
    """Another copy of the same library is refused with a message or has no effect; never two transports under one name, never an abort."""
    copy = tmp_path / "libstarwire.so"
    shutil.copy(library_path(), copy)
    code = f"""
import os, tensorflow as tf
tf.load_library(os.environ['STARWIRE_LIBRARY'])
try:
    tf.load_library({str(copy)!r})
except Exception as error:
    print('refused', error)
"""
    assert_served(python(code + SERVE))


def test_missing_library(tmp_path):
    done = python("import starwire", STARWIRE_LIBRARY=tmp_path / "nothing.so")
    assert done.returncode == 1
    assert "ImportError" in done.stderr and "STARWIRE_LIBRARY" in done.stderr and "nothing.so" in done.stderr


def test_unloaded_protocol_is_unknown_to_tensorflow(runner):
    """Without the library, TensorFlow reports the protocol as unknown: the wheel contains nothing of ours."""
    task = runner.task("bare")
    with pytest.raises(RemoteError) as caught:
        task.call(start_without_loading)
    assert caught.value.type == "NotFoundError" and "grpc++" in caught.value.message


@pytest.mark.parametrize("name, instead", [("grpc+gdr", "grpc+verbs"), ("elastic-grpc", "star_server")])
def test_a_protocol_that_is_nowhere_is_refused_with_a_replacement(name, instead):
    code = f"""
import os, tensorflow as tf
tf.load_library(os.environ['STARWIRE_LIBRARY'])
tf.distribute.Server({{"local": ["localhost:0"]}}, protocol="{name}")
"""
    done = python(code)
    assert done.returncode == 1 and f"starwire: there is no protocol {name} here: use {instead}" in done.stderr, done.stderr


def start_without_loading():
    state["server"] = tf.distribute.Server({"local": ["localhost:0"]}, protocol="grpc++")


# A TensorFlow of another version. -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_version(tmp_path_factory):
    """A library for LD_PRELOAD whose TF_Version() returns the version of a nightly wheel, standing in for another one."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("version")
    source, library = folder / "version.c", folder / "version.so"
    source.write_text('const char *TF_Version(void) { return "2.99.0-dev20990101"; }\n')
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.mark.parametrize("how", ["tf.load_library(os.environ['STARWIRE_LIBRARY'])", "import starwire"])
def test_wrong_tensorflow_is_refused(other_version, how):
    """An exception names both versions; the protocol is not registered; the process continues."""
    built_for = re.search(r"tf-(\d[^/]*)/", library_path())
    code = f"""
import os, tensorflow as tf
try:
    {how}
except Exception as error:
    print('refused', type(error).__name__, error)
try:
    tf.distribute.Server({{"local": ["localhost:0"]}}, protocol="grpc++")
except tf.errors.NotFoundError:
    print('not registered')
"""
    # In LD_PRELOAD, a space ends a path.
    done = python(code, cwd=other_version.parent, LD_PRELOAD=f"./{other_version.name}")
    assert done.returncode == 0, done.stderr
    assert "refused" in done.stdout and "TF_VERSION=2.99.0.dev20990101`" in done.stdout, done.stdout + done.stderr
    if built_for:
        assert built_for.group(1) in done.stdout, done.stdout
    assert "not registered" in done.stdout, done.stdout + done.stderr


# Exports and dependencies. --------------------------------------------------------------------------------------------


def test_only_sw_symbols_are_exported():
    out = subprocess.run(["nm", "-D", "--defined-only", library_path()], capture_output=True, text=True, check=True).stdout
    exported = {line.split()[-1].split("@")[0] for line in out.splitlines()}
    strange = {name for name in exported if not name.startswith("sw_")}
    assert not strange, sorted(strange)[:20]
    header = (ROOT / "include" / "starwire.h").read_text()
    declared = set(re.findall(r"\b(sw_[a-z0-9_]+)\(", header))
    assert exported <= declared, f"exported but not in the header: {sorted(exported - declared)}"


def test_needs_only_tensorflow_and_the_system():
    out = subprocess.run(["readelf", "-d", library_path()], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", out))
    allowed = {"libtensorflow_framework.so.2", "libtensorflow_cc.so.2", "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2"}
    assert needed <= allowed, needed - allowed
    assert not re.search(r"R(UN)?PATH", out), "a path of the build machine is in the library"


def test_import_starts_nothing():
    """Loading starts no thread and opens no socket; only a server does."""
    code = """
import os
import tensorflow as tf
before = len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd'))
tf.load_library(os.environ['STARWIRE_LIBRARY'])
after = len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd'))
print('grew', after[0] - before[0], after[1] - before[1])
"""
    done = python(code)
    assert "grew 0 0" in done.stdout, done.stdout + done.stderr
