"""The marks of tests that `make test` leaves out. For the conftest.py of a folder: config.pluginmanager.register(marks)."""

import os

import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "quick(predicate): variants whose parameters do not satisfy it are deep; `reason` says why the others suffice")
    config.addinivalue_line("markers", "deep(reason): a variant, or much time or memory; runs with STARWIRE_DEEP_TESTS=1 (`make test-deep`); `reason` says why it may wait")


def pytest_collection_modifyitems(config, items):
    for item in items:
        for mark in item.iter_markers():
            if mark.name in ("deep", "quick") and not mark.kwargs.get("reason"):
                raise pytest.UsageError(f"{item.nodeid}: its mark `{mark.name}` has no reason=")
        quick = item.get_closest_marker("quick")
        if quick and not quick.args[0](item.callspec.params):
            item.add_marker(pytest.mark.deep(reason=quick.kwargs["reason"]))
    if not os.environ.get("STARWIRE_DEEP_TESTS"):
        # Deselected rather than skipped, so that the summary does not mention them.
        deep = [item for item in items if item.get_closest_marker("deep")]
        items[:] = [item for item in items if not item.get_closest_marker("deep")]
        config.hook.pytest_deselected(items=deep)
