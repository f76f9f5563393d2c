"""The machine that a result was measured on."""

import os
import pathlib
import platform
import subprocess


def describe():
    import tensorflow as tf

    here = pathlib.Path(__file__).parent
    git = lambda *args: subprocess.run(["git", *args], cwd=here, capture_output=True, text=True).stdout.strip()
    with open("/proc/meminfo") as file:
        memory = int(file.readline().split()[1]) / 2**20
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": memory,
        "kernel": ".".join(platform.release().split(".")[:2]),
        "tensorflow": tf.__version__,
        "python": platform.python_version(),
        "revision": (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else ""),
        "load_average": os.getloadavg()[0],
    }
