"""Ports for the tests of this process.

A server binds its port some time after it was chosen, so a choice at random now and then hits a port that another cluster, or another test run on this machine,
has chosen too. Each process therefore draws from ports of its own: it holds an abstract unix socket, which exists once per network namespace like the ports
themselves, and no port comes again before all others have been used.
"""

import collections
import random
import socket

from starwire_run import ports

SHARES = 128  # processes at a time; with 85 ports each on a usual machine

_lock = None
_queue = collections.deque()


def _take_share():
    """Returns the number of a share that no other process has. The kernel frees it when this process ends."""
    global _lock
    for share in random.sample(range(SHARES), SHARES):
        _lock = socket.socket(socket.AF_UNIX)
        try:
            _lock.bind(f"\0starwire-test-ports-{share}")
            return share
        except OSError:
            _lock.close()
    raise OSError(f"{SHARES} processes of tests run already")


def free_port():
    """Returns a port on which, as at its data port, nothing listens."""
    if not _queue:
        share = _take_share()
        # With two ports, the data port is at the offset, among those that nobody draws.
        drawn = [port for port in range(ports._FIRST, ports._first_ephemeral() - ports._OFFSET) if port // ports._OFFSET % 2 == 0]
        mine = [port for port in drawn if port % SHARES == share]
        _queue.extend(random.sample(mine, len(mine)))
    for _ in range(len(_queue)):
        _queue.rotate(-1)
        if ports._is_free(_queue[-1]) and ports._is_free(_queue[-1] + ports._OFFSET):
            return _queue[-1]
    raise OSError(f"none of {len(_queue)} ports is free")
