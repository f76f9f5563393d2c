"""Ports of this machine for a local cluster."""

import random
import socket

_FIRST = 10000
# With TensorFlow 1.15, a task has another port at this distance: STARWIRE_PORT_OFFSET's default.
_OFFSET = 1000


def free(count, environment=None):
    """Returns ports on which, as at their data ports, nothing listens, outside the range from which the kernel takes ports for connections."""
    offset = _offset(environment)
    end = _first_ephemeral(offset) - offset
    found = []
    for port in random.sample(range(_FIRST, end), max(end - _FIRST, 0)):
        if len(found) == count:
            break
        if not {port - offset, port + offset} & set(found) and _is_free(port) and _is_free(port + offset):
            found.append(port)
    if len(found) < count:
        raise OSError(f"only {len(found)} of {count} ports are free between {_FIRST} and {end}")
    return found


def listening():
    """Returns the TCP ports on which anything on this machine listens; without connecting to them."""
    ports = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path, encoding="ascii") as lines:
                next(lines)
                for line in lines:
                    fields = line.split()
                    if fields[3] == "0A":
                        ports.add(int(fields[1].rpartition(":")[2], 16))
        except OSError:
            continue
    return ports


def _offset(environment):
    text = (environment or {}).get("STARWIRE_PORT_OFFSET", "")
    # A task refuses other values, with a reason.
    return int(text) if text.isdecimal() and 0 < int(text) < 65535 else _OFFSET


def _first_ephemeral(offset=_OFFSET):
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            first = int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32768
    return first if first >= _FIRST + 2 * offset else 65536


def _is_free(port):
    for family, host in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((host, port))
        except OSError as error:
            if family == socket.AF_INET6 and error.errno in (97, 99):  # no IPv6 here
                continue
            return False
    return True
