"""Fixtures of the end-to-end suite.

    pytest tests/python                              # grpc++, with the library of STARWIRE_LIBRARY or `make -s print-plugin`
    pytest tests/python --protocol grpc              # against stock TensorFlow, which must meet the same expectations
    pytest tests/python --keep-logs
    STARWIRE_DEEP_TESTS=1 pytest tests/python -m deep  # tests that need much time or memory
    STARWIRE_TEST_PROOF=tls pytest tests/python/test_failure.py  # all tasks have TLS, or a secret
"""

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

# Their assertions are about tests.
pytest.register_assert_rewrite("compared", "steps", "tf2_job")

import cluster as harness  # noqa: E402
import marks  # noqa: E402
from compared import OURS, Compared  # noqa: E402
from tf2_job import Chiefs  # noqa: E402


# Functions, strategies and coordinators, which TensorFlow 1 lacks or does not run over several tasks.
TENSORFLOW_2 = ["test_eager_calls.py", "test_functions.py", "test_star_functions.py", "test_tf2.py", "test_tf2_killed.py"]
# One port for everything, which TLS needs: the gRPC server of TensorFlow 1 cannot be moved. Nor has its profiler activities of others.
TENSORFLOW_2 += ["test_one_port.py", "test_profiler.py", "test_tls.py", "test_tunnel.py"]
IS_TENSORFLOW_1 = harness.is_tensorflow_1()
collect_ignore = TENSORFLOW_2 if IS_TENSORFLOW_1 else []


def pytest_addoption(parser):
    parser.addoption("--protocol", default=os.environ.get("STARWIRE_TEST_PROTOCOL", "grpc++"), help="the protocol under test")
    parser.addoption("--keep-logs", action="store_true", help="do not delete the logs of the task processes")


def pytest_configure(config):
    config.addinivalue_line("markers", "ours: tests something that stock gRPC does not have; skipped with --protocol grpc")
    config.addinivalue_line("markers", "star: runs over the star protocols as well; not with --protocol grpc or STARWIRE_TEST_PROOF")
    config.addinivalue_line("markers", "grpc_client: is a client of another task by grpc://, which has no proof; skipped with STARWIRE_TEST_PROOF")
    config.addinivalue_line("markers", "tensorflow2: needs something that TensorFlow 1 lacks")
    config.pluginmanager.register(marks)
    if not harness.is_stock(config.getoption("--protocol")):
        os.environ["STARWIRE_LIBRARY"] = harness.library_path()  # look it up once, for all task processes


def pytest_collection_modifyitems(config, items):
    if harness.is_stock(config.getoption("--protocol")):
        for item in items:
            if item.get_closest_marker("ours"):
                item.add_marker(pytest.mark.skip(reason="not a feature of stock gRPC"))
    if IS_TENSORFLOW_1:
        for item in items:
            if item.get_closest_marker("tensorflow2"):
                item.add_marker(pytest.mark.skip(reason="needs TensorFlow 2"))
    if os.environ.get("STARWIRE_TEST_PROOF"):
        for item in items:
            if item.get_closest_marker("grpc_client"):
                item.add_marker(pytest.mark.skip(reason="TensorFlow's gRPC is closed to clients without proof"))


@pytest.fixture(scope="module")
def protocol(request):
    return getattr(request, "param", request.config.getoption("--protocol"))


@pytest.fixture(scope="session")
def runner(request):
    runner = harness.Runner(keep=lambda: request.config.getoption("--keep-logs"))
    request.config._starwire_runner = runner
    yield runner
    runner.close()
    if request.config.getoption("--keep-logs"):
        print(f"\nlogs: {runner.directory}")


@pytest.fixture(autouse=True)
def _processes_stay_sound(request):
    """After every test: no process may have ended unexpectedly or logged an abort."""
    yield
    runner = getattr(request.config, "_starwire_runner", None)
    if runner is not None:
        complaints = [line for task in runner.tasks for line in task.complaints()]
        runner.tasks = [task for task in runner.tasks if task.poll() is None]
        assert not complaints, "\n".join(complaints)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    runner = getattr(item.config, "_starwire_runner", None)
    if runner is not None:
        if call.when == "setup":
            item._log_starts = {task: task.log_size() for task in runner.tasks}
        if report.failed:
            starts = getattr(item, "_log_starts", {})
            for task in runner.tasks:
                text = task.log(starts.get(task, 0)) if task.log_path.exists() else ""
                if text.strip():
                    report.sections.append((f"log of {task}", text))
    return report


@pytest.fixture(scope="module")
def make_cluster(runner, protocol):
    """Creates clusters that live as long as the module, keyed by their arguments, and replaces those that a failed test left dead or busy."""
    made = {}

    def make(shape=(("ps", 2), ("worker", 2)), protocol=protocol, **options):
        key = (shape, protocol, repr(options))
        if key in made and not made[key].usable():
            made.pop(key).close()
        if key not in made:
            made[key] = harness.Cluster(runner, protocol, dict(shape), **options)
        return made[key]

    yield make
    for one in made.values():
        one.close()


@pytest.fixture
def cluster(make_cluster):
    return make_cluster()


@pytest.fixture
def stock(make_cluster):
    """The same over stock gRPC."""
    return make_cluster(protocol="grpc", environment={"REFERENCE": "1"})


def protocols_of(config):
    """Those that tests marked `star` run over."""
    chosen = config.getoption("--protocol")
    one_only = harness.is_stock(chosen) or os.environ.get("STARWIRE_TEST_PROOF")
    return [chosen] if one_only else list(dict.fromkeys((chosen, "star_server", "star_server_lite")))


def pytest_generate_tests(metafunc):
    """Parametrizes `protocol` of tests marked `star`; and `way` with every way except stock gRPC, unless the test does."""
    if metafunc.definition.get_closest_marker("star"):
        metafunc.parametrize("protocol", protocols_of(metafunc.config), scope="module", indirect=True)
    if "way" in metafunc.fixturenames and not any("way" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")):
        metafunc.parametrize("way", OURS, scope="module")


@pytest.fixture(scope="module")
def compared(runner):
    made = Compared(runner)
    yield made
    made.close()


@pytest.fixture(scope="module")
def chiefs(runner):
    """Like `compared`, with a chief in each cluster."""
    made = Chiefs(runner)
    yield made
    made.close()


@pytest.fixture
def fresh_cluster(runner, protocol):
    """Creates clusters for one test."""
    made = []

    def make(shape=(("ps", 1), ("worker", 1)), protocol=protocol, **options):
        made.append(harness.Cluster(runner, protocol, dict(shape), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def within():
    """`with within(5): …` fails if the block takes longer."""

    class Within:
        def __init__(self, seconds):
            self.seconds = seconds

        def __enter__(self):
            self.start = time.monotonic()
            return self

        def __exit__(self, kind, *_):
            self.took = time.monotonic() - self.start
            if kind is None:
                assert self.took <= self.seconds, f"took {self.took:.1f} s, allowed {self.seconds} s"

    return Within
