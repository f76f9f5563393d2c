"""Takes from a task's process what it needs. The functions run in that process."""

import contextlib
import ctypes
import os
import resource
from pathlib import Path

CLONE_NEWNS, MS_REC, MS_PRIVATE, MS_BIND = 0x20000, 0x4000, 1 << 18, 0x1000
libc = ctypes.CDLL(None, use_errno=True)


def become(uid):
    """Root has no limit of threads. Other users' count for all of their processes, so each process gets a user of its own."""
    os.chdir("/")
    os.setgid(uid)
    os.setuid(uid)


def threads():
    return len(os.listdir("/proc/self/task"))


def descriptors():
    """RLIMIT_NOFILE limits their numbers, so this fills the gaps and returns the first number that is free."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while (free := os.open(os.devnull, os.O_RDONLY)) < highest:
        pass
    os.close(free)
    return free


def limit(kind, soft=None):
    """None: as much as is allowed."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (hard if soft is None else soft, hard))


def mount(source, target, kind, flags=0, options=""):
    if libc.mount(source.encode(), target.encode(), kind.encode() if kind else None, flags, options.encode() or None):
        raise OSError(ctypes.get_errno(), f"mount on {target}")


def own_mounts():
    """From now on, what this process mounts is seen by its threads only."""
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    mount("none", "/", None, MS_REC | MS_PRIVATE)


def fill_disks(folders):
    """Puts a file system without room for a file or a directory on each folder."""
    own_mounts()
    for folder in folders:
        mount("full", folder, "tmpfs", options="size=4k,nr_inodes=1,mode=1777")
        with contextlib.suppress(OSError):
            os.mkdir(os.path.join(folder, "x"))
            raise AssertionError(f"{folder} has room")


def mount_file(path, text, folder):
    """Other processes keep their own `path`."""
    own_mounts()
    own = Path(folder) / Path(path).name
    own.write_text(text)
    mount(str(own), path, None, MS_BIND)
