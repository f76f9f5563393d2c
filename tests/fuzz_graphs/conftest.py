import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

import marks  # noqa: E402


def pytest_configure(config):
    config.pluginmanager.register(marks)
