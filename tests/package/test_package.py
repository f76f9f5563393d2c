"""The Python package: finding the library, refusing wrong ones, installation with pip. Run by `make test` (stage package) with the plug-in built."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python" / "starwire"), str(ROOT / "tests" / "python")]
import _endpoint_map  # noqa: E402  (without loading the library)
from cluster import RemoteError, Runner  # noqa: E402

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}


def python(code, *paths, cwd="/", **variables):
    """Runs code in a fresh interpreter that sees only these paths; returns (exit code, stdout, stderr)."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("STARWIRE_", "PYTHON", "CARGO_TARGET_DIR"))}
    environment.update(QUIET, PYTHONPATH=os.pathsep.join(map(str, paths)), **variables)
    result = subprocess.run([sys.executable, "-c", code], env=environment, cwd=cwd, capture_output=True, text=True, timeout=120)
    return result.returncode, result.stdout.strip(), result.stderr.strip()


FORK = """
import __main__, os, sys
for name in [name for name in os.environ if name.startswith(("STARWIRE_", "CARGO_TARGET_DIR")) and name not in {given}]:
    del os.environ[name]
for name in [name for name in sys.modules if name.startswith("starwire_run")]:
    del sys.modules[name]
sys.path[:] = {paths} + [path for path in sys.path if path != {checkout!r}]
sys.stdout = open("stdout", "w", buffering=1)
exec({code!r}, vars(__main__))
"""


@pytest.fixture(scope="module")
def runner():
    made = Runner()
    yield made
    made.close()


@pytest.fixture
def forked(runner):
    """As `python`, in a fork of a process that has already imported TensorFlow; returns stdout, or raises what the code raises."""

    def run(code, *paths, **variables):
        task = runner.task("script", variables)
        task.call(exec, FORK.format(given=list(variables), paths=list(map(str, paths)), checkout=str(ROOT / "python"), code=code), {})
        assert task.exit() == 0, task.log()
        return (task.directory / "stdout").read_text().strip()

    return run


@pytest.fixture
def refused(forked):
    """Returns the message of the ImportError that `import starwire` raises."""

    def run(*paths, **variables):
        with pytest.raises(RemoteError) as caught:
            forked("import starwire", *paths, **variables)
        assert caught.value.type == "ImportError", caught.value
        return caught.value.message

    return run


SERVE = """
server = tf.distribute.Server({"ps": ["localhost:0"]}, job_name="ps", task_index=0, protocol="grpc++")
print(starwire.library_path())
"""


def test_import_after_tensorflow(forked):
    """Before it: test_import_of_starwire_follows_the_variable_without_the_hook."""
    assert forked("import tensorflow as tf, starwire" + SERVE, ROOT / "python").endswith("libstarwire.so")


def test_every_name_of_protocols_is_registered(forked):
    out = forked(
        "import starwire, tensorflow as tf\n"
        "for name in starwire.protocols():\n"
        "    tf.distribute.Server({'ps': ['localhost:0']}, job_name='ps', task_index=0, protocol=name)\n"
        "print(len(starwire.protocols()), starwire.__version__)",
        ROOT / "python",
    )
    assert re.fullmatch(r"[1-9]\d* \d+\.\d+\.\d+", out)


def test_stop_refuses_stock_servers(forked):
    out = forked(
        "import starwire, tensorflow as tf\n"
        "for protocol in ('grpc++', 'grpc'):\n"
        "    server = tf.distribute.Server({'ps': ['localhost:0']}, job_name='ps', task_index=0, protocol=protocol)\n"
        "    try:\n"
        "        print(starwire.stop(server))\n"
        "    except ValueError as error:\n"
        "        print(error)",
        ROOT / "python",
    )
    assert out == "None\nstarwire: a server with protocol 'grpc' cannot be stopped: it is not one of starwire's (grpc++, star_server, star_server_lite, grpc+verbs)", out


def test_loading_the_library_alone_works(forked):
    library = library_of_checkout()
    forked(f"import tensorflow as tf\nstarwire = None\ntf.load_library({library!r})" + SERVE.replace("starwire.library_path()", "1"))


SERVER = "server = tf.distribute.Server({'ps': ['localhost:0']}, job_name='ps', task_index=0, protocol='PROTOCOL')"
CONTEXT = "tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec({'ps': ['localhost:0']}), job_name='ps', task_index=0, protocol='grpc++'); tf.constant(1)"
ASK = """
import os, subprocess, sys, starwire, tensorflow as tf
def ask():
    child = [sys.executable, "-S", "-c", "import os; print(os.environ.get('STARWIRE_SECRET'))"]
    given = [None, {**os.environ, "MORE": "1"}, os.environ.copy()]
    print([subprocess.run(child, env=one, capture_output=True, text=True).stdout.strip() for one in given])
"""


@pytest.mark.parametrize("makes", [SERVER.replace("PROTOCOL", "grpc++"), CONTEXT], ids=["server", "context"])
def test_processes_that_a_server_starts_have_no_secret(forked, makes):
    secret = "known to this process and no other"
    # One that does not read it; one that does; and another one, which still knows it.
    steps = [SERVER.replace("PROTOCOL", "grpc"), "ask()", makes, "ask()", SERVER.replace("PROTOCOL", "grpc++"), "ask()"]
    out = forked(ASK + "\n".join(steps), ROOT / "python", STARWIRE_SECRET=secret)
    assert out.splitlines() == [str([secret] * 3), str([""] * 3), str([""] * 3)]


def test_loading_twice_and_a_copy_is_harmless(forked, tmp_path):
    library = library_of_checkout()
    copy = shutil.copy(library, tmp_path / "another.so")
    forked(f"import starwire, tensorflow as tf\ntf.load_library({library!r})\nstarwire.load()\ntf.load_library({str(copy)!r})" + SERVE, ROOT / "python")


def test_a_missing_override_is_named(refused):
    message = refused(ROOT / "python", STARWIRE_LIBRARY="/nowhere/lib.so")
    assert message == "starwire: STARWIRE_LIBRARY names '/nowhere/lib.so', which is not a file"


def test_an_invalid_library_is_refused_with_its_path(refused, tmp_path):
    bad = tmp_path / "bad.so"
    bad.write_text("not a library")
    message = refused(ROOT / "python", STARWIRE_LIBRARY=str(bad))
    assert message.startswith("starwire: TensorFlow ") and str(bad) in message.splitlines()[-1]


def test_another_version_is_refused_before_loading(refused, tmp_path):
    (tmp_path / "tf-2.99.1").mkdir()
    (tmp_path / "tf-2.99.1" / "libstarwire.so").write_text("")
    message = refused(ROOT / "python", CARGO_TARGET_DIR=str(tmp_path))
    running = version_of_tensorflow()
    assert re.match(
        rf"starwire is built for TensorFlow 2\.99\.1, but TensorFlow {re.escape(running)} is running\. "
        rf"Build it for that version: make -C .* build TF_VERSION={re.escape(running)}$",
        message,
    )


def test_an_installed_package_lists_what_it_supports(refused, tmp_path):
    """Without a checkout around it, and with rows of releases that share a library."""
    package = tmp_path / "site" / "starwire"
    shutil.copytree(ROOT / "python" / "starwire", package)
    shutil.copytree(ROOT / "python" / "starwire_run", tmp_path / "site" / "starwire_run")
    for version in ("2.15.1", "2.9.0", "2.99.1"):
        (package / "lib" / f"tf-{version}").mkdir(parents=True)
        (package / "lib" / f"tf-{version}" / "libstarwire.so").write_text("")
    message = refused(tmp_path / "site")
    assert message.startswith("starwire is built for TensorFlow 2.9.0, 2.15.0, 2.15.0.post1, 2.15.1, 2.99.1, but TensorFlow ")
    assert " is running. Install one of these versions, a newer starwire, or build it from source: pip install " in message


def test_a_library_serves_the_releases_of_its_row(forked, tmp_path):
    """The running release is made one of a row; the library itself, whose list is compiled in, is not loaded."""
    package = tmp_path / "site" / "starwire"
    shutil.copytree(ROOT / "python" / "starwire", package)
    shutil.copytree(ROOT / "python" / "starwire_run", tmp_path / "site" / "starwire_run")
    (package / "releases.inc").write_text(f'{{"2.98.1", "{version_of_tensorflow()}"}},\n')
    (package / "lib" / "tf-2.98.1").mkdir(parents=True)
    shutil.copy(library_of_checkout(), package / "lib" / "tf-2.98.1" / "libstarwire.so")
    assert forked("import starwire; print(starwire.library_path())", tmp_path / "site") == str(package / "lib" / "tf-2.98.1" / "libstarwire.so")


@pytest.mark.parametrize("own, package", [("2.99.0-rc1", "2.99.0rc1"), ("2.99.0-dev20990101", "2.99.0.dev20990101"), ("2.99.0", "2.99.0")])
def test_the_library_of_a_candidate_or_nightly_is_found_by_the_version_of_its_package(tmp_path, own, package):
    (tmp_path / "tensorflow.py").write_text(f"__version__ = {own!r}\n")
    library = tmp_path / f"tf-{package}" / "libstarwire.so"
    library.parent.mkdir()
    library.write_text("")
    code, _, err = python("import starwire", tmp_path, ROOT / "python", CARGO_TARGET_DIR=str(tmp_path))
    assert code != 0 and f"ImportError: starwire: TensorFlow {package} refused {library}: " in err, err


def test_nothing_built_says_how_to_build(refused, tmp_path):
    message = refused(ROOT / "python", CARGO_TARGET_DIR=str(tmp_path))
    assert message.startswith("starwire is not built yet") and "make -C" in message


def test_a_build_that_takes_a_while_succeeds(tmp_path):
    """Progress is looked at every five seconds, also while nothing has been compiled yet."""
    programs, looks, sleep = tmp_path / "bin", tmp_path / "looks", shutil.which("sleep")
    programs.mkdir()
    looks.touch()
    # The pause between two looks is short here, and the compiler takes as long as several of them.
    (programs / "sleep").write_text(f"#!/bin/sh\necho >>'{looks}'\nexec {sleep} 0.05\n")
    wait = f"until [ $(wc -l <'{looks}') -ge 4 ]; do {sleep} 0.05; done"
    (programs / "cargo").write_text(f'#!/bin/bash\n{wait}\nmkdir -p "$CARGO_TARGET_DIR/release"\necho built >"$CARGO_TARGET_DIR/release/libstarwire.so"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    environment = {**os.environ, "CARGO": "cargo", "CARGO_TARGET_DIR": str(tmp_path / "target"), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    run = subprocess.run([ROOT / "scripts/build-plugin", sys.executable], env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert next((tmp_path / "target").glob("tf-*/libstarwire.so")).read_text() == "built\n"


@pytest.mark.limit(1200)  # it may compile everything, or wait for another build
def test_pip_installs_it(forked, tmp_path):
    """Under pip's build isolation, the backend must find the environment's TensorFlow itself."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(tmp_path), str(ROOT)]
    result = subprocess.run(install, capture_output=True, text=True, timeout=590)
    assert result.returncode == 0, result.stdout + result.stderr
    out = forked("import starwire, tensorflow as tf" + SERVE, tmp_path)
    assert out == str(tmp_path / "starwire" / "lib" / f"tf-{version_of_tensorflow()}" / "libstarwire.so")
    protocol = "import site; site.addsitedir({!r}); import tensorflow as tf; print(tf.distribute.Server({{'ps': ['localhost:0']}}, 'ps', 0).server_def.protocol)"
    code, out, err = python(protocol.format(str(tmp_path)), STARWIRE_PROTOCOL="star_server")
    assert (code, out) == (0, "star_server"), err
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run([tmp_path / "bin" / "starwire", "run", "sh", "-c", "echo $STARWIRE_PROTOCOL"], env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "grpc++\n", "")
    (information,) = tmp_path.glob("starwire-*.dist-info")
    assert information.name.endswith(f"+tf{version_of_tensorflow()}.dist-info")
    assert (information / "METADATA").read_text().startswith("Metadata-Version: 2.1\nName: starwire\n")


def test_metadata_is_made_without_compiling(tmp_path):
    """pip asks for it first, and shows nothing meanwhile."""
    backend = f"import sys; sys.path.insert(0, {str(ROOT / 'python' / 'build_backend')!r}); import starwire_build; print(starwire_build.prepare_metadata_for_build_wheel({str(tmp_path)!r}))"
    code, out, err = python(backend, PATH="/nonexistent")
    assert code == 0, err
    version = re.search(r'__version__ = "(.*)"', (ROOT / "python/starwire/_version.py").read_text())[1]
    assert out == f"starwire-{version}+tf{version_of_tensorflow()}.dist-info"
    assert f"\nVersion: {version}+tf{version_of_tensorflow()}\n" in (tmp_path / out / "METADATA").read_text()
    assert "starwire = starwire_run.command:main" in (tmp_path / out / "entry_points.txt").read_text()


def test_a_wheel_is_the_same_bytes_for_the_same_contents(tmp_path):
    sys.path.insert(0, str(ROOT / "python" / "build_backend"))
    import starwire_wheel

    digests = set()
    for n in range(2):
        (tmp_path / str(n)).mkdir()
        name = starwire_wheel.write(tmp_path / str(n), "1.0", "py3-none-any", {"starwire/a.py": b"x", "starwire-1.0.data/scripts/starctl": b"y"})
        digests.add((tmp_path / str(n) / name).read_bytes())
    assert len(digests) == 1
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--target", str(tmp_path / "to"), str(tmp_path / "0" / name)]
    result = subprocess.run(install, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert os.access(tmp_path / "to" / "bin" / "starctl", os.X_OK)
    names = zipfile.ZipFile(tmp_path / "0" / name).namelist()
    assert names[-1] == "starwire-1.0.dist-info/RECORD"


def test_the_list_of_releases_fits_the_table_of_the_documentation():
    rows = [re.findall(r'"(.+?)"', line) for line in (ROOT / "python/starwire/releases.inc").read_text().splitlines() if line.startswith("{")]
    table = (ROOT / "docs/install.md").read_text()
    for first, *others in rows:
        assert re.search(rf"^\| {re.escape(first)} \| {re.escape(', '.join(others))} ?\|$", table, re.M), first


def test_sdist_holds_what_a_build_needs(tmp_path):
    backend = f"import sys; sys.path.insert(0, {str(ROOT / 'python' / 'build_backend')!r}); import starwire_build; print(starwire_build.build_sdist({str(tmp_path)!r}))"
    code, out, err = python(backend)
    assert code == 0, err
    names = tarfile.open(tmp_path / out).getnames()
    top = out[: -len(".tar.gz")]
    for wanted in ("python/starwire_run/site/sitecustomize.py", "Cargo.lock", "build/shim.rs", "cc/server/init.cc", "pyproject.toml", "scripts/build-plugin", "PKG-INFO", "LICENSE"):
        assert f"{top}/{wanted}" in names


def test_versions_agree():
    cargo = re.search(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(), re.M)[1]
    assert f'__version__ = "{cargo}"' in (ROOT / "python/starwire/_version.py").read_text()


def test_endpoint_map_is_written(tmp_path):
    path = _endpoint_map.endpoint_map({"ps": ["h:1000", "[::1]:2000"], "worker": {0: "w-0.svc:3000"}}, tmp_path, offset=5, data={"worker": {0: "w:9"}})
    assert path == str(tmp_path / ".endpoint_map")
    assert Path(path).read_text() == "h:1000=h:1005\n[::1]:2000=[::1]:2005\nw-0.svc:3000=w:9\n"
    # One port.
    _endpoint_map.endpoint_map({"ps": ["h:1000"], "worker": ["w:3000"]}, tmp_path, offset=0, data={"ps": ["outer:1000"]})
    assert Path(path).read_text() == "h:1000=outer:1000\nw:3000=w:3000\n"


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ({"cluster": {"ps": ["h"]}}, "/job:ps/task:0: 'h' is not host:port"),
        ({"cluster": {"ps": ["::1:80"]}}, "is not host:port (IPv6 in brackets)"),
        ({"cluster": {"ps": ["h:0"]}}, "is not host:port"),
        ({"cluster": {"ps": ["h:80\n"]}}, "is not host:port"),
        ({"cluster": {"ps": ["h:65000"]}}, "port 65000 plus offset 1000 is not a port"),
        ({"cluster": {"ps": ["h:1", "h:1001"]}}, "h:1001 is the"),
        ({"cluster": {"ps": ["h:1"]}, "data": {"worker": ["h:2"]}}, "data has /job:worker/task:0, which is not in the cluster"),
    ],
)
def test_endpoint_map_refuses_nonsense(tmp_path, arguments, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        _endpoint_map.endpoint_map(directory=tmp_path, **arguments)
    assert list(tmp_path.iterdir()) == []


def library_of_checkout():
    return subprocess.run(["make", "-s", "print-plugin", f"VENV={sys.prefix}"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def version_of_tensorflow():
    return Path(library_of_checkout()).parent.name[len("tf-") :]
