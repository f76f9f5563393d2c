"""Clusters whose tasks own a device that is not a CPU: the one of tests/device, or the first GPU."""

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import ROOT, Cluster, tf
from compared import WAYS, Compared
from tf2_job import start_chief, start_servers

SOURCES = sorted((ROOT / "tests" / "device").iterdir())
FLAGS = ["-std=c++17", "-O1", "-g1", "-fPIC", "-Wall", "-Wno-sign-compare", "-Wno-deprecated-declarations", "-DNDEBUG", "-DEIGEN_MAX_ALIGN_BYTES=64", "-pthread"]
# Kernels that Intel's library replaces round differently.
ENVIRONMENT = {"TF_ENABLE_ONEDNN_OPTS": "0"}
GPU_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0"), "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
ALL_WAYS = {**WAYS, "grpc+verbs": ("grpc+verbs", {"STARWIRE_VERBS_FALLBACK": "true"})}
OURS = [way for way in ALL_WAYS if way != "grpc"]


# In the test process. -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def build():
    """Returns the path of the library of tests/device for the installed TensorFlow; compiles it if it is not there."""
    version = subprocess.run([ROOT / "scripts" / "venv-tf-version", sys.prefix], check=True, capture_output=True, text=True).stdout.strip()
    tensorflow = Path(importlib.util.find_spec("tensorflow").submodule_search_locations[0])
    if tuple(map(int, version.split(".")[:2])) < (2, 21):
        pytest.skip("the device is written for TensorFlow 2.21")
    digest = hashlib.sha256(b"".join([version.encode(), *map(str.encode, FLAGS), *(source.read_bytes() for source in SOURCES)])).hexdigest()[:16]
    folder = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "test" / "device"
    library = folder / f"libtestdev-{digest}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            sources = [str(source) for source in SOURCES if source.suffix == ".cc"]
            link = [f"-L{tensorflow}", "-l:libtensorflow_framework.so.2", "-l:libtensorflow_cc.so.2"]
            subprocess.run(["g++", *FLAGS, "-isystem", tensorflow / "include", "-shared", "-o", f"{library}.new", *sources, *link], check=True, timeout=1200)
            os.rename(f"{library}.new", library)
    return str(library)


class DeviceCluster(Cluster):
    """A cluster whose tasks, or those of some jobs, load the library of the device first."""

    def __init__(self, *args, library, owners=("ps", "worker", "chief"), **options):
        self._library, self._owners = library, owners
        super().__init__(*args, **options)

    def process(self, job, index, **environment):
        task = super().process(job, index, **environment)
        if self._library and job in self._owners:
            task.call(load_device, self._library)
        return task


class Devices(Compared):
    """Compares clusters whose tasks own a device of this type: TESTDEV or GPU."""

    def __init__(self, runner, kind):
        super().__init__(runner)
        self.kind = kind
        self.environment = {**ENVIRONMENT, **(GPU_ENVIRONMENT if kind == "GPU" else {})}
        self._library = build() if kind == "TESTDEV" else None

    def fresh(self, way, shape, **options):
        protocol, environment = ALL_WAYS[way]
        return DeviceCluster(self.runner, protocol, dict(shape), environment={**self.environment, **environment}, spawn=self.kind == "GPU", library=self._library, **options)

    def task(self, name):
        """A process that owns a device and belongs to no cluster."""
        task = self.runner.task(name, environment=self.environment, spawn=self.kind == "GPU")
        if self._library:
            task.call(load_device, self._library)
        return task


class DeviceChiefs(Devices):
    """The same with a chief of TensorFlow 2 in each cluster."""

    def fresh(self, way, shape, **options):
        cluster = start_servers(super().fresh(way, shape, start=False, **options))
        start_chief(cluster)
        return cluster


# In the task processes. -----------------------------------------------------------------------------------------------

_device = None  # the library


def load_device(path):
    global _device
    tf.config.experimental.list_physical_devices  # noqa: B018 (TensorFlow's modules load at first use)
    from tensorflow.python.framework import load_library

    load_library.load_pluggable_device_library(path)
    _device = ctypes.CDLL(path)


def count_gpus():
    return len(tf.config.list_physical_devices("GPU"))


def counts():
    """Copies and bytes to the device, copies and bytes to the host, since the process began."""
    out = (ctypes.c_uint64 * 4)()
    _device.testdev_counts(out)
    return list(out)


def hold(direction, held):
    """While held, copies to the device (0) or to the host (1) wait."""
    _device.testdev_hold(direction, int(held))


def await_held(direction):
    """Returns once a copy waits."""
    _device.testdev_await_held(direction)


def read_memory():
    """What ends the process."""
    _device.testdev_memory.restype = ctypes.c_void_p
    return ctypes.string_at(_device.testdev_memory(), 1)
