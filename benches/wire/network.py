"""An emulated network (relay.c): hosts that are network namespaces, a cable from each to one switch, a delay and a rate.

Needs root, or user namespaces and a /dev/net/tun that this user may open. A process with several threads cannot enter a user namespace: call `become_root` early.
"""

import contextlib
import ctypes
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import socket
import subprocess
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "tf"))

from bare import compiled  # noqa: E402
from cluster import BenchError, free_port  # noqa: E402

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
CAP_SYS_ADMIN, CAP_NET_ADMIN = 21, 12
MOST_SERVERS, MOST_WORKERS = 2, 2
# Those of the parameter servers, of the workers, and of the coordinator.
FIRST_HOST = {"ps": 0, "worker": MOST_SERVERS, "chief": MOST_SERVERS + MOST_WORKERS}
HOSTS = FIRST_HOST["chief"] + 1
# Of the bytes on a cable, TCP's payload: Ethernet, IP and TCP headers, with time stamps.
PAYLOAD = 1448 / 1538
# Bounds TCP's congestion window. The default varies between machines; Reno is always allowed, and cubic behaves like it at the short round trips of a data centre.
CONGESTION = ("cubic", "reno")
ATTEMPTS = 3


class NetworkError(BenchError):
    """The network cannot be emulated here, or not as asked."""


def _libc(name, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def become_root():
    """Enters a user namespace unless this process may create network namespaces already."""
    with open("/proc/self/status") as file:
        effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    if effective >> CAP_SYS_ADMIN & effective >> CAP_NET_ADMIN & 1:
        return
    user, group = os.geteuid(), os.getegid()
    try:
        _libc("unshare", CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            pathlib.Path("/proc/self", name).write_text(text)
    except OSError as error:
        raise NetworkError(f"network namespaces need root or user namespaces, and this kernel allows user {user} neither: {error}") from None


@dataclasses.dataclass(frozen=True)
class Wire:
    """A rate of each cable in bits per second in each direction, and a round trip time in seconds between two hosts."""

    rate: float
    round_trip: float

    @classmethod
    def parse(cls, text):
        """From `10G/50us`."""
        match = re.fullmatch(r"([\d.]+)([MG])/([\d.]+)(us|ms)", text)
        if not match:
            raise NetworkError(f"{text!r} is not a wire: write its rate and its round trip time like 10G/50us or 100M/2ms")
        rate, prefix, time, unit = match.groups()
        return cls(float(rate) * {"M": 1e6, "G": 1e9}[prefix], float(time) * {"us": 1e-6, "ms": 1e-3}[unit])

    @property
    def queue(self):
        """Bytes in front of each end of a cable: a usual share of a switch's buffer."""
        return max(512 * 1024, int(self.rate / 8 * 1e-3))


def rate_text(rate):
    return f"{rate / 1e9:.3g} Gb/s" if rate >= 1e9 else f"{rate / 1e6:.3g} Mb/s"


def time_text(seconds):
    return f"{seconds * 1e3:.3g} ms" if seconds >= 99.5e-6 else f"{seconds * 1e6:.3g} µs"


class Host:
    """A namespace. Other processes of this user can open `namespace` as long as the network lives."""

    def __init__(self, number, namespace):
        self.ip, self.namespace = f"10.99.0.{number + 1}", namespace

    def enter(self):
        """Moves this thread and its future children there."""
        with open(self.namespace) as file:
            _libc("setns", file.fileno(), CLONE_NEWNET)

    @contextlib.contextmanager
    def visit(self):
        with open("/proc/thread-self/ns/net") as home:
            self.enter()
            try:
                yield
            finally:
                _libc("setns", home.fileno(), CLONE_NEWNET)

    def address(self):
        with self.visit():
            return f"{self.ip}:{free_port()}"


class Network:
    """The relay and its hosts."""

    def __init__(self, folder, congestion=None):
        self.relay = subprocess.Popen([compiled(pathlib.Path(__file__).with_name("relay.c"), folder), str(HOSTS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            head = json.loads(self._line())
            self.priority = head["priority"]
            self.hosts = [Host(number, f"/proc/{self.relay.pid}/fd/{descriptor}") for number, descriptor in enumerate(head["namespaces"])]
            self.congestion = self._choose_congestion((congestion,) if congestion else CONGESTION)
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.relay.kill()
        self.relay.communicate()

    def _line(self):
        line = self.relay.stdout.readline()
        if not line:
            self.relay.wait()
            raise NetworkError(f"no network can be emulated here (needs root or user namespaces, and a /dev/net/tun that can be opened): {self.relay.stderr.read().strip()}")
        return line

    def _ask(self, command):
        self.relay.stdin.write(command + "\n")
        self.relay.stdin.flush()
        return json.loads(self._line())

    def _choose_congestion(self, names):
        for name in names:
            try:
                for host in self.hosts:
                    with host.visit():
                        pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(name)
                return name
            except OSError as error:
                refused = f"{name}: {error.strerror}"
        raise NetworkError(f"congestion control {refused}")

    def set(self, rate, delay, queue):
        """Bits per second (0: unlimited), seconds one way, bytes. Sockets that exist keep the length of segments that suited the wire before."""
        self._ask(f"wire {rate:.0f} {round(delay * 1e9)} {queue}")

    # As cluster.Loopback.

    def host(self, job, index):
        return self.hosts[FIRST_HOST[job] + index]

    def counters(self):
        return self._ask("counters")

    def since(self, before, steps, elapsed):
        after = self.counters()
        received = [host["received"]["payload"] - old["received"]["payload"] for host, old in zip(after["hosts"], before["hosts"])]
        dropped = sum(host["sent"]["dropped"] - old["sent"]["dropped"] for host, old in zip(after["hosts"], before["hosts"]))
        return {
            "pulled_bytes_per_step": sum(received[FIRST_HOST["worker"] : FIRST_HOST["chief"]]) / steps,
            "pushed_bytes_per_step": sum(received[: FIRST_HOST["worker"]]) / steps,
            "dropped_per_step": dropped / steps,
            "relay_cores": (after["cpu_s"] - before["cpu_s"]) / elapsed,
            "relay_late_p99_s": _percentile([new - old for new, old in zip(after["late"], before["late"])], 0.99),
        }


def _percentile(buckets, share):
    """Upper bound in seconds: bucket n counts times below 2^n µs."""
    total, below = sum(buckets), 0
    for index, count in enumerate(buckets):
        below += count
        if below >= share * total:
            return 2**index * 1e-6
    return math.inf


class Probe:
    """Moves bytes between a parameter server's host and a worker's with bare sockets."""

    def __init__(self, network, bare, tolerance):
        self.network, self.bare, self.tolerance = network, bare, tolerance

    def run(self, kind, count, pull, push, seconds):
        server, client = self.network.host("ps", 0), self.network.host("worker", 0)
        return self.bare.run(kind, count, pull, seconds, push, server.ip, server.namespace, client.namespace)

    def round_trip(self, share="p50_s", seconds=0.5):
        return self.run("wire", 1, 0, 0, seconds)[share]

    def rates(self, guess, seconds=0.8):
        """Bits per second on the cable, to the worker and from it."""
        size = int(guess / 8 * 0.1)
        return [self.run("wire", 1, *sizes, seconds)["bytes_per_s"] * 8 / PAYLOAD for sizes in ((size, 0), (0, size))]

    def limits(self, case, warm):
        """The bytes of a step of `case` over bare sockets, one direction after the other and both at once. With several workers: each moves its share at this speed."""
        if case.bare:
            count, pull, _ = case.bare
            push = pull
        else:
            # As many bytes as the column that needs the fewest.
            count = max(1, min(turn.get("tensors_per_s", 0) / turn["steps_per_s"] for turn in warm.values()) // 2)
            pull, push = (math.ceil(min(turn[key] for turn in warm.values()) / count) for key in ("pulled_bytes_per_step", "pushed_bytes_per_step"))

        def limit(kind, seconds):
            result = self.run(kind, int(count), pull, push, seconds)
            return {**result, **{key: result[key] * case.workers for key in ("steps_per_s", "bytes_per_s")}}

        return {kind: functools.partial(limit, kind) for kind in ("wire", "wire+overlap")}

    def machine(self):
        """The shortest round trip and the highest rate that this relay reaches, without delay and limit."""
        self.network.set(0, 0, 1 << 20)
        return {"round_trip_s": self.round_trip(), "bits_per_s": min(self.rates(10e9))}

    def set(self, wire, machine):
        """Sets the wire and measures it, a few times if the machine is busy; raises NetworkError unless it is as asked. A wire that the machine cannot do is named for
        what was measured."""
        for attempt in range(ATTEMPTS):
            setting, problems = self._try(wire, machine)
            if not problems:
                return setting
        raise NetworkError(f"the wire has {' and '.join(problems)}: is the machine busy?")

    def _try(self, wire, machine):
        delay = wire.round_trip / 2
        self.network.set(wire.rate, delay, wire.queue)
        # The kernel and the relay take time themselves, which is part of the delay; other work on the machine, which makes some round trips longer, is not.
        for _ in range(2):
            delay = max(0.0, delay + (wire.round_trip - self.round_trip("p10_s")) / 2)
            self.network.set(wire.rate, delay, wire.queue)
        round_trip = self.round_trip()
        rates = self.rates(wire.rate)
        rate = min(rates)
        names, problems = [rate_text(wire.rate), time_text(wire.round_trip)], []
        if rate < (1 - self.tolerance) * wire.rate and machine["bits_per_s"] < 2 * wire.rate:
            names[0] = f"{rate_text(rate)} (of {names[0]})"
        elif not all(abs(rate / wire.rate - 1) <= self.tolerance for rate in rates):
            worst = max(rates, key=lambda rate: abs(rate - wire.rate))
            problems.append(f"{rate_text(worst)} instead of {rate_text(wire.rate)}")
        if round_trip > (1 + self.tolerance) * wire.round_trip and machine["round_trip_s"] > wire.round_trip / 2:
            names[1] = f"{time_text(round_trip)} (instead of {names[1]})"
        elif abs(round_trip / wire.round_trip - 1) > self.tolerance:
            problems.append(f"a round trip of {time_text(round_trip)} instead of {time_text(wire.round_trip)}")
        setting = {
            "title": ", ".join(names),
            "bits_per_s": wire.rate,
            "round_trip_s": wire.round_trip,
            "delay_s": delay,
            "queue_bytes": wire.queue,
            "measured": {"round_trip_s": round_trip, "bits_per_s_to_worker": rates[0], "bits_per_s_from_worker": rates[1]},
        }
        return setting, problems
