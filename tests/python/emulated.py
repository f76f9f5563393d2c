"""Experiments on the emulated network of benches/wire, with plain sockets: `emulated.py NAME` prints JSON, or exits with 3 and a reason if there can be none here.

Each runs in its own process, because a process that may not create namespaces becomes root of a user namespace.
"""

import json
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

# Before this folder: cluster.py is another file there.
sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "benches" / name) for name in ("wire", "tf")]

import network as emulation  # noqa: E402

PORT = 7000


def udp(host):
    with host.visit():
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        sock.bind((host.ip, PORT))
    sock.settimeout(60)
    return sock


def tcp(server, client, port):
    """A connected pair of sockets: the server's, the client's."""
    with server.visit():
        listener = socket.create_server((server.ip, port))
    with client.visit():
        mine = socket.create_connection((server.ip, port), timeout=20)
    theirs, _ = listener.accept()
    listener.close()
    theirs.settimeout(20)
    return theirs, mine


def seconds_for(transfers):
    """Sends `size` bytes over each (from, to, size) at the same time."""

    def receive(sock, size):
        while size > 0:
            data = sock.recv(min(size, 1 << 16))
            assert data, "the sender has ended"
            size -= len(data)

    threads = [threading.Thread(target=source.sendall, args=(bytes(size),)) for source, _, size in transfers]
    threads += [threading.Thread(target=receive, args=(target, size)) for _, target, size in transfers]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - start


def round_trips(network):
    """The shortest of 20 round trips, without delay and with 5 and 10 ms each way."""
    one, other = udp(network.host("ps", 0)), udp(network.host("worker", 1))
    answers = {}
    for name, delay in (("none", 0.0), ("5 ms", 0.005), ("10 ms", 0.010)):
        network.set(0, delay, 1 << 20)
        took = []
        for _ in range(20):
            start = time.monotonic()
            one.sendto(b"?", other.getsockname())
            _, back = other.recvfrom(10)
            other.sendto(b"!", back)
            one.recv(10)
            took.append(time.monotonic() - start)
        answers[name] = min(took)
    return answers


def rates(network):
    """Seconds for a second's worth of bytes at 20 Mb/s: in one direction, in both at once, from two hosts to one; and in one direction at 10 Mb/s."""
    network.set(20e6, 0, 100_000)
    # What else the machine does only adds to it.
    shortest = lambda transfers: min(seconds_for(transfers) for _ in range(3))  # noqa: E731
    size = int(20e6 / 8 * emulation.PAYLOAD)
    a, b, c = network.host("ps", 0), network.host("worker", 0), network.host("worker", 1)
    server, client = tcp(a, b, PORT)
    other_server, other_client = tcp(a, c, PORT + 1)
    took = {
        "one direction": shortest([(client, server, size)]),
        "both directions": shortest([(client, server, size), (server, client, size)]),
        "two to one": shortest([(client, server, size // 2), (other_client, other_server, size // 2)]),
    }
    network.set(10e6, 0, 100_000)
    return {**took, "at half the rate": seconds_for([(client, server, size)])}


def full_queue(network):
    """Of 200 datagrams of 1000 bytes (1066 on the cable) sent at once, those that arrive behind a queue of 32,000 bytes."""
    network.set(1e6, 0, 32_000)
    sender, receiver = udp(network.host("ps", 0)), udp(network.host("worker", 0))
    counted = lambda what: sum(host["sent"][what] for host in network.counters()["hosts"])  # noqa: E731
    start = time.monotonic()
    for _ in range(200):
        sender.sendto(bytes(1000), receiver.getsockname())
    while counted("segments") < 200:
        time.sleep(0.001)
    took = time.monotonic() - start  # by then, the queue has taken or dropped each
    arrived = 0
    while arrived + counted("dropped") < 200:
        receiver.recv(2000)
        arrived += 1
    return {"sent in s": took, "arrived": arrived, "dropped": counted("dropped")}


def main():
    try:
        emulation.become_root()
        with tempfile.TemporaryDirectory() as folder, emulation.Network(Path(folder)) as network:
            print(json.dumps(globals()[sys.argv[1]](network)))
    except emulation.NetworkError as error:
        print(error, file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
