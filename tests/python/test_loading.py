"""Loading the library: through the Python package, directly, twice, into the wrong TensorFlow; and its exports."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from cluster import ROOT, RemoteError, library_path, state, tf

pytestmark = pytest.mark.ours


def python(code, cwd="/", **environment):
    """Runs code in a new interpreter; returns its output."""
    merged = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "1", "PYTHONPATH": str(ROOT / "python"), **environment}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, env=merged, cwd=cwd)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def forked(runner):
    """Runs code in a process that has already imported TensorFlow, but not starwire; returns its output."""

    def run(code, **environment):
        task = runner.task("script", environment)
        # Variables live until the process ends, as those of a script.
        task.call(exec, f"import __main__\nexec({code!r}, vars(__main__))", {}, timeout=120)
        assert task.exit() == 0, task.log()
        return task.full_log()

    return run


SERVE = """
with tf.Graph().as_default():
    server = tf.distribute.Server({"local": ["localhost:0"]}, protocol="grpc++")
    with tf.compat.v1.Session(server.target) as sess:
        print("result", sess.run(tf.compat.v1.placeholder_with_default(20.0, ()) + 1.0))
"""


def test_import_starwire(protocol, forked):
    out = forked("import tensorflow as tf\nimport starwire\nprint('protocols', starwire.protocols())\nprint('path', starwire.library_path())" + SERVE)
    assert "result 21.0" in out, out
    assert f"'{protocol}'" in out
    assert f"path {library_path()}" in out


def test_import_starwire_and_ask_with_the_prefix(forked):
    code = SERVE.replace("grpc++", "starwire+grpc++") + "    starwire.stop(server)\n"
    out = forked("import tensorflow as tf\nimport starwire" + code)
    assert "result 21.0" in out, out


def test_import_starwire_before_tensorflow():
    out = python("import starwire\nimport tensorflow as tf" + SERVE)
    assert "result 21.0" in out, out


def test_import_twice_and_load_by_hand_too(forked):
    """Loading it repeatedly and in different ways yields one library and one set of protocols."""
    out = forked("import os, tensorflow as tf\nimport starwire\nstarwire.load()\nfor _ in range(3): tf.load_library(os.environ['STARWIRE_LIBRARY'])" + SERVE)
    assert "result 21.0" in out, out


@pytest.mark.parametrize("loader", ["tf.load_library", "tf.load_op_library"])
def test_load_by_hand(forked, loader):
    out = forked(f"import os, tensorflow as tf\n{loader}(os.environ['STARWIRE_LIBRARY'])\n{loader}(os.environ['STARWIRE_LIBRARY'])" + SERVE)
    assert "result 21.0" in out, out


def test_a_second_copy_is_harmless(tmp_path, forked):
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
    out = forked(code + SERVE)
    assert "result 21.0" in out, out


def test_missing_library(tmp_path, forked):
    with pytest.raises(RemoteError, match="STARWIRE_LIBRARY.*nothing.so") as caught:
        forked("import starwire", STARWIRE_LIBRARY=tmp_path / "nothing.so")
    assert caught.value.type == "ImportError"


def test_unloaded_protocol_is_unknown_to_tensorflow(runner):
    """Without the library, TensorFlow reports the protocol as unknown: the wheel contains nothing of ours."""
    task = runner.task("bare")
    with pytest.raises(RemoteError) as caught:
        task.call(start_without_loading)
    assert caught.value.type == "NotFoundError" and "grpc++" in caught.value.message


@pytest.mark.parametrize("name, instead", [("grpc+gdr", "grpc+verbs"), ("elastic-grpc", "star_server")])
def test_a_protocol_that_is_nowhere_is_refused_with_a_replacement(forked, name, instead):
    code = f"""
import os, tensorflow as tf
tf.load_library(os.environ['STARWIRE_LIBRARY'])
tf.distribute.Server({{"local": ["localhost:0"]}}, protocol="{name}")
"""
    with pytest.raises(RemoteError) as caught:
        forked(code)
    assert f"starwire: there is no protocol {name} here: use {instead}" in caught.value.message


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


def test_wrong_tensorflow_is_refused(other_version):
    """An exception names both versions; the protocol is not registered; the process continues."""
    built_for = re.search(r"tf-(\d[^/]*)/", library_path())
    # Each way in a process of its own.
    code = """
import os, tensorflow as tf
child = os.fork()
try:
    if child:
        assert os.waitpid(child, 0)[1] == 0
        import starwire
    else:
        tf.load_library(os.environ['STARWIRE_LIBRARY'])
except Exception as error:
    print('refused', type(error).__name__, error)
try:
    tf.distribute.Server({"local": ["localhost:0"]}, protocol="grpc++")
except tf.errors.NotFoundError:
    print('not registered', flush=True)
"""
    # In LD_PRELOAD, a space ends a path.
    out = python(code, cwd=other_version.parent, LD_PRELOAD=f"./{other_version.name}")
    by_hand, by_import = re.findall(r"^refused .*?^not registered$", out, re.M | re.S)
    assert "refused ImportError" in by_import and "refused ImportError" not in by_hand, out
    for refusal in (by_hand, by_import):
        assert "TF_VERSION=2.99.0.dev20990101`" in refusal, out
        if built_for:
            assert built_for.group(1) in refusal, out


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


def test_import_starts_nothing(forked):
    """Loading starts no thread and opens no socket; only a server does."""
    code = """
import os
import tensorflow as tf
before = len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd'))
tf.load_library(os.environ['STARWIRE_LIBRARY'])
after = len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd'))
print('grew', after[0] - before[0], after[1] - before[1])
"""
    assert "grew 0 0" in forked(code)
