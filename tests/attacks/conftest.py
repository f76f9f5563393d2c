"""Fixtures of the attacks. `pytest tests/attacks` needs the library (STARWIRE_LIBRARY or `make -s print-plugin`) and takes about two minutes.
STARWIRE_DEEP_TESTS=1 also measures the pace of the training (arena.py).
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]
# The TensorFlow processes import the functions they are told to run.
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])

import arena as arenas  # noqa: E402
import cluster as harness  # noqa: E402
import marks  # noqa: E402
import pytest  # noqa: E402

figures = []


def pytest_configure(config):
    config.pluginmanager.register(marks)


@pytest.fixture(scope="session")
def runner():
    os.environ["STARWIRE_LIBRARY"] = harness.library_path()
    runner = harness.Runner()
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def arena_of(runner, tmp_path_factory):
    """Creates one cluster per protocol, and replaces it after a failed test."""
    made = {}

    def make(protocol, **options):
        key = protocol, repr(options)
        if key in made and (made[key].spoilt or not made[key].usable()):
            made.pop(key).cluster.close()
        if key not in made:
            made[key] = arenas.Arena(runner, protocol, tmp_path_factory.mktemp(protocol.replace("+", "p")), **options)
            made[key].spoilt = False
        return made[key]

    yield make
    for one in made.values():
        one.close()


def lend(request, arena):
    """Lends the arena to one test: records its outcomes, and retires the arena if the test fails."""
    arena.outcomes = []
    yield arena
    figures.extend((request.node.name, outcome) for outcome in arena.outcomes)
    arena.spoilt = getattr(request.node, "failed", False)


@pytest.fixture
def trainer(request, arena_of):
    """A star_server cluster that trains."""
    yield from lend(request, arena_of("star_server"))


@pytest.fixture
def tls_trainer(request, arena_of):
    """The same with TLS on all connections."""
    yield from lend(request, arena_of("star_server", tls=True))


@pytest.fixture(params=["star_server", "grpc++"])
def each_trainer(request, arena_of):
    yield from lend(request, arena_of(request.param))


@pytest.fixture
def stock(request, arena_of):
    """A cluster over TensorFlow's own gRPC, for comparison."""
    yield from lend(request, arena_of("grpc"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        item.failed = True
    return report


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("attacks")
    for name, outcome in figures:
        terminalreporter.write_line(f"{name}: {outcome.line()}")
