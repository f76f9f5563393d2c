"""The jobs of `make test` and `make test-deep`: what runs, what it needs first, what it takes of the machine, and its hard limit."""

import os
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_VERSION = "2.21.0"
# Lets pytest find pytest_limits.py.
PLUGIN = {"PYTHONPATH": str(ROOT / "tests" / "runner")}


@dataclass
class Job:
    """`cores` and `memory` (GB) are what the job takes of the machine while it runs; a job that mostly waits takes half a core or less."""

    name: str  # STAGE or STAGE/PART
    command: str
    needs: tuple = ()
    # A job that must not run beside this one, which starts when that has ended, whether it passed or not.
    after: str = ""
    cores: float = 1
    memory: float = 1
    # Seconds after which the job is ended: several times what it takes on a slow machine.
    limit: int = 900
    # Seconds that it is expected to take on two quiet cores: jobs with most work start first, and shares of the deep suite have as much.
    expected: int = 20
    environment: dict = field(default_factory=dict)
    # Who counts its tests: "pytest", "nextest" and "gtest" report each test; any other job counts as one.
    report: str = ""
    # A service runs until the others have ended; the others wait for this file, for `limit` seconds.
    ready_file: str = ""
    # What its random tests begin with, if it has any.
    seed: Optional[int] = None

    @property
    def work(self):
        """Seconds that it takes of a core."""
        return self.expected * self.cores

    @property
    def stage(self):
        return self.name.split("/")[0]


class Settings:
    """How to call the tools, from the environment that the Makefile sets."""

    def __init__(self, socket, seed=1):
        self.socket = socket  # of the shared zygote
        self.seed = seed
        self.venv = os.environ.get("VENV") or ".venv"
        version = os.environ.get("TF_VERSION") or DEFAULT_VERSION
        self.cargo = os.environ.get("CARGO") or "cargo"
        self.make = f"make -s VENV={shlex.quote(self.venv)} TF_VERSION={version}"
        self.python = shlex.quote(os.path.join(self.venv, "bin", "python"))
        self.arguments = os.environ.get("PYTEST_ARGS", "")
        # What `make` was told, and must be told again.
        told = {"TF_VERSION": version} if version != DEFAULT_VERSION else {}
        if self.venv not in (".venv", f".venvs/{version}"):
            told["VENV"] = self.venv
        self.told = "".join(f" {name}={shlex.quote(value)}" for name, value in told.items())
        self.library = f'export STARWIRE_LIBRARY="$({self.make} print-plugin)"'
        self.has_nextest = shutil.which("cargo-nextest") is not None

    def tests(self, path):
        """Arguments of pytest: the tests of `path`, or those that PYTEST_ARGS names."""
        # Names of tests in the records are relative to the root.
        return f"--rootdir . {self.arguments}" if "::" in self.arguments else f"--rootdir . {path} {self.arguments}"

    def pytest(self, name, path, arguments="", **options):
        command = f"{self.library} && {self.python} -m pytest -q -p no:cacheprovider -p pytest_limits {arguments} {self.tests(path)}"
        options["environment"] = {**PLUGIN, **options.get("environment", {})}
        return Job(name, command, report="pytest", **{"needs": ("plugin", "packages"), "memory": 3, **options})

    def end_to_end(self, stage, path, arguments="", **options):
        """Tests with TensorFlow processes, which wait more than they compute and share one import of TensorFlow."""
        environment = {"STARWIRE_TEST_ZYGOTE": self.socket, **options.pop("environment", {})}
        # The library that stands in for libibverbs is one of the core's, and so is starctl.
        core = ("core",) if Path(path).name in ("test_verbs.py", "test_state.py", "test_move.py", "test_moves.py", "test_security.py") else ()
        options = {"cores": 0.5, "needs": ("plugin", "packages", "zygote", *core), "expected": EXPECTED.get(Path(path).name, 20), **options}
        job = self.pytest(f"{stage}/{Path(path).stem[len('test_'):]}", path, arguments, environment=environment, **options)
        job.command = f'keras="$({self.make} print-keras)" && export PYTHONPATH="$PYTHONPATH:$keras" && {job.command}'
        return job

    def swarm(self, name, arguments="", environment=None):
        environment = {"STARWIRE_SWARM": str(ROOT / "target/debug/swarm"), **(environment or {})}
        return self.pytest(name, "tests/swarm", arguments, cores=0.6, needs=("core", "plugin", "packages"), expected=60, environment=environment)

    def fail_points(self, histories):
        """A server is killed at each fail point in turn, then at random ones, in a library of its own."""
        library = f'library="$({self.make} fail-points)" && export STARWIRE_LIBRARY="$PWD/$library"'
        job = self.pytest("fail-points", "tests/histories/fail_points.py", needs=("plugin", "core", "packages"), cores=2, memory=6, limit=2400, expected=600, seed=self.seed)
        protocols = "--protocols star_server+state,star_server_lite+sync"
        job.command = f"{library} && {job.command.replace(self.library, 'true')} && {histories.replace(self.library, 'true')} {protocols}"
        return job

    def with_proof(self, kind, name, **options):
        """Tests that also run with TLS on all connections, or with a secret."""
        environment = {"STARWIRE_TEST_PROOF": kind, **options.pop("environment", {})}
        return self.end_to_end(f"proof-{kind}", f"tests/python/test_{name}.py", environment=environment, **options)


# Seconds of the files of tests/python that take longest.
EXPECTED = {
    "test_joining_tasks.py": 150, "test_failure.py": 140, "test_row_updates.py": 140, "test_state.py": 140, "test_keras.py": 120, "test_device.py": 110,
    "test_star.py": 110, "test_dtypes.py": 90, "test_functions.py": 90, "test_differential.py": 80, "test_fuse.py": 80, "test_addresses.py": 70,
    "test_training.py": 70, "test_star_rows.py": 60, "test_waiting.py": 60, "test_emulated_network.py": 50, "test_loading.py": 50, "test_tf2_killed.py": 50,
    "test_move.py": 50,
}


def files(folder):
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / folder).glob("test_*.py"))


def only_deep(path):
    """True if `make test` leaves out all tests of the file."""
    return any(line.startswith("pytestmark") and "mark.deep" in line for line in (ROOT / path).read_text().splitlines())


def preparation(s):
    """What the tests need. `plugin` and `core` compile in folders of their own, so they run beside each other."""
    zygote = f"exec {s.python} tests/python/zygote.py --serve {shlex.quote(s.socket)}"
    return [
        Job("tools", f"scripts/system-packages build test && {s.make} venv", cores=0.5),
        Job("plugin", f'{s.make} build && scripts/check-exports "$({s.make} print-plugin)"', needs=("tools",), memory=4, limit=2400, expected=330),
        # Together: without the tests, their dependencies' features are off, and everything would be compiled twice.
        Job("core", f"{s.cargo} build --lib --bins --tests --example ibverbs", needs=("tools",), memory=4, limit=1800, expected=150),
        Job("packages", f"scripts/system-packages page deploy && scripts/venv-install {shlex.quote(s.venv)} pytest && {s.make} print-keras", needs=("tools",), cores=0.1, expected=400),
        Job("zygote", zygote, needs=("packages",), cores=0.1, limit=300, ready_file=s.socket),
    ]


def quick(s):
    """What `make test` runs."""
    nextest = f"{s.cargo} nextest run --no-fail-fast --status-level=fail --final-status-level=slow --test-threads 4"
    rust = nextest if s.has_nextest else f"{s.cargo} test --no-fail-fast --lib --bins --tests"
    over_verbs = f"{nextest} --profile verbs --test engine" if s.has_nextest else f"{s.cargo} test --test engine"
    report = "nextest" if s.has_nextest else ""
    shim = f'make -f tests/cc/tests.mk shim decoders FOLDER="$({s.make} print-folder)"'
    return [
        Job("rust", rust, needs=("core",), memory=4, expected=120, report=report),
        Job("rust-verbs", over_verbs, needs=("rust",), memory=2, expected=30, report=report, environment={"STARWIRE_TEST_TRANSPORT": "verbs"}),
        Job("abi", "make -f tests/cc/tests.mk abi", needs=("core",), memory=2, expected=40, report="gtest"),
        Job("shim", shim, needs=("core", "plugin"), memory=4, limit=1800, expected=240, report="gtest"),
        Job("deploy", f"tests/deploy/run {shlex.quote(s.venv)} {s.tests('tests/deploy')}", needs=("packages",), expected=40, report="pytest", environment=PLUGIN),
        Job("examples", f"{s.library} && tests/runner/examples {s.python}", needs=("plugin", "packages"), memory=4, expected=100),
        s.pytest("runner", "tests/runner", needs=("packages",), memory=1),
        s.pytest("package", "tests/package", cores=0.5, expected=170, needs=("plugin", "packages", "zygote"), environment={"STARWIRE_TEST_ZYGOTE": s.socket}),
        s.pytest("page", "tests/page", cores=0.5, expected=40),
        s.swarm("swarm"),
        s.end_to_end("graphs", "tests/fuzz_graphs/test_graphs.py", cores=1, expected=60),
        s.end_to_end("histories", "tests/histories/test_histories.py", expected=100),
        s.end_to_end("histories", "tests/histories/test_moves.py"),
        *(s.end_to_end("python", path) for path in files("python") if not only_deep(path)),
        *(s.end_to_end("attacks", path) for path in files("attacks")),
        s.with_proof("tls", "failure"),
    ]
