"""What the children of a server's process get of it, however they are started: no descriptor by which they could be the server, or reach what is behind its port."""

import os
import subprocess
import sys

LIST = """
import os
for fd in os.listdir("/proc/self/fd"):
    try:
        print(os.readlink("/proc/self/fd/" + fd))
    except OSError:
        pass  # that of the listing
"""


def children():
    """Runs in the server's process. Returns {how it starts a child: what the child has open}."""
    ask = [sys.executable, "-S", "-c", LIST]

    def forked(pipe):
        pid = os.fork()
        if pid == 0:
            os.dup2(pipe, 1)
            os.execv(ask[0], ask)
        return pid

    def spawned(pipe):
        return os.posix_spawn(ask[0], ask, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, pipe, 1)])

    def output(start):
        read, write = os.pipe()
        pid = start(write)
        os.close(write)
        with os.fdopen(read) as pipe:
            links = pipe.read().split()
        os.waitpid(pid, 0)
        return links

    own = [link for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}") for link in [os.readlink(f"/proc/self/fd/{fd}")]]
    inherits_all = subprocess.run(ask, stdout=subprocess.PIPE, text=True, close_fds=False).stdout.split()
    return {"own": own, "subprocess that closes nothing": inherits_all, "fork and exec": output(forked), "posix_spawn": output(spawned)}


def test_children_inherit_no_socket(trainer):
    found = trainer.ps.call(children)
    assert len([link for link in found.pop("own") if link.startswith("socket:")]) > 3
    for how, links in found.items():
        assert links and not [link for link in links if link.startswith("socket:")], (how, links)
