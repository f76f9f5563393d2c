"""The data port against unauthenticated peers: garbage, truncated, oversized, replayed and slow bytes during training; secrets, cluster ids; and HTTP."""

import contextlib
import itertools
import os
import pathlib
import re
import socket
import struct
import subprocess

import pytest

import steps
import wire
from cluster import RemoteError, worker_call
from counting import STARCTL
from metrics import data_port, metric
from settings import QUICK, SECRET
from steps import attempt, training
from waiting import HANGS, wait_until

pytestmark = pytest.mark.ours


# Attacks. -------------------------------------------------------------------------------------------------------------


def send_and_wait(address, data, timeout=HANGS):
    with wire.Peer(address) as peer:
        with contextlib.suppress(OSError):  # the server may close before it has read everything
            peer.send(data)
        assert peer.wait_closed(timeout), "the connection stays open"


def after_handshake(address, control=b"", raw=b"", timeout=HANGS, **options):
    with wire.Peer(address) as peer:
        peer.handshake(expected=None)
        with contextlib.suppress(OSError):
            if control or options:
                peer.send_block(control, **options)
            peer.send(raw)
        assert peer.wait_closed(timeout), "the connection stays open"


PREFIX = b"/job:worker/replica:0/task:9/device:CPU:0;0000000000000001;/job:ps/replica:0/task:0/device:CPU:0;edge_1_x"

ATTACKS = {
    "random bytes": lambda a: send_and_wait(a, bytes(range(255, 0, -1)) * 40),
    "zeros": lambda a: send_and_wait(a, bytes(4096)),
    "a TLS hello": lambda a: send_and_wait(a, bytes.fromhex("160301020001fc0303") + bytes(500)),
    "wrong magic in a good block": lambda a: send_and_wait(a, wire.block(wire.hello(), magic=b"SWB2")),
    "the wire version before": lambda a: send_and_wait(a, wire.block(wire.hello(), version=1)),
    "another wire version": lambda a: send_and_wait(a, wire.block(wire.hello(), version=9)),
    "wrong checksum": lambda a: send_and_wait(a, wire.block(wire.hello(), crc=12345)),
    "oversized control length": lambda a: send_and_wait(a, wire.block(wire.hello(), control_length=0xFFFFFFF8)),
    "4 GiB hello field": lambda a: send_and_wait(a, wire.block(wire.frame(wire.HELLO, code=1, meta=b"x" * 64, meta_length=0xFFFFFFFF))),
    "hello with garbage fields": lambda a: send_and_wait(a, wire.block(wire.frame(wire.HELLO, code=1, meta=bytes(range(200))))),
    "hello with a field twice": lambda a: send_and_wait(a, wire.block(wire.hello(extra=wire.field(2, b"/job:ps/replica:0/task:0")))),
    "hello with newlines in the name": lambda a: send_and_wait(a, wire.block(wire.hello(task="/job:worker\nstarwire: all is well"))),
    "a request before hello": lambda a: send_and_wait(a, wire.block(wire.frame(wire.RECV, ident=1, fixed=struct.pack("<qQ", 1, 1)))),
    "bulk bytes in the handshake": lambda a: send_and_wait(a, wire.block(wire.hello(), bulk=bytes(10000))),
    "another protocol": lambda a: send_and_wait(a, wire.block(wire.hello(protocol="star_server"))),
    "another task expected": lambda a: send_and_wait(a, wire.block(wire.hello(expected="/job:ps/replica:0/task:5"))),
    "garbage after a good handshake": lambda a: after_handshake(a, raw=b"\xff" * 4096),
    "wrong sequence number": lambda a: after_handshake(a, raw=wire.block(wire.frame(wire.PING, ident=1), sequence=9)),
    "unknown frame kind": lambda a: after_handshake(a, wire.frame(99)),
    "a reply nobody asked for": lambda a: after_handshake(a, wire.frame(wire.REPLY, ident=1, fixed=struct.pack("<II", 0, 0))),
    "a second hello": lambda a: after_handshake(a, wire.hello()),
    "meta length beyond the section": lambda a: after_handshake(a, wire.frame(wire.CALL, code=1, ident=1, fixed=struct.pack("<II", 0, 0), meta=b"abc", meta_length=1 << 20)),
    "absurd part count": lambda a: after_handshake(a, wire.frame(wire.CALL, code=1, ident=1, fixed=struct.pack("<II", 0, 0xFFFFFFFF))),
    "absurd part length": lambda a: after_handshake(a, wire.frame(wire.CALL, code=1, ident=1, fixed=struct.pack("<IIQ", 0, 1, (1 << 62) | (1 << 63)))),
    "bulk bytes that no frame claims": lambda a: after_handshake(a, bulk=bytes(20000)),
    "data for no request": lambda a: after_handshake(a, wire.frame(wire.DATA, ident=5, fixed=struct.pack("<Q", 9000)), bulk=bytes(9000)),
    "a request with an unknown key": lambda a: after_handshake(a, wire.frame(wire.RECV, ident=1, fixed=struct.pack("<qQ", 1, 77))),
    "the same request id twice": lambda a: after_handshake(
        a,
        wire.frame(wire.KEY, ident=0, meta=PREFIX)
        + wire.frame(wire.RECV, ident=1, fixed=struct.pack("<qQ", 123456, 0))
        + wire.frame(wire.RECV, ident=1, fixed=struct.pack("<qQ", 123456, 0)),
    ),
    "a key of 64 KiB": lambda a: after_handshake(a, wire.frame(wire.KEY, ident=0, meta=b"k" * 65536)),
}


@pytest.fixture
def target(make_cluster):
    return make_cluster(shape=(("ps", 1), ("worker", 1)), environment=QUICK)


SOURCES = itertools.count()


@pytest.fixture
def source(monkeypatch):
    """Gives each test its own source host on the loopback, because an offending host is logged once a minute."""
    number = next(SOURCES)
    address = f"127.{os.getpid() % 250 + 1}.{number // 250}.{number % 250 + 1}"
    monkeypatch.setattr(wire, "source", address)
    return address


def lines_about(log, source):
    # With the colon before the port: another test's 127.0.0.27 is not 127.0.0.2.
    return [line for line in log.splitlines() if "starwire" in line and f" {source}:" in line]


@pytest.mark.parametrize("attack", ATTACKS)
def test_bad_bytes_do_not_disturb_training(target, tmp_path, source, attack):
    """The offender is dropped and logged once, however often it returns; other peers' steps continue with correct results."""
    ps = target["ps", 0]
    address = data_port(ps)
    with training(target, tmp_path):
        for _ in range(3):
            ATTACKS[attack](address)
        ps.wait_for_log(f" {source}:")
    said = lines_about(ps.full_log(), source)
    assert len(said) == 1, said
    # TensorFlow up to 2.18 writes the date before the severity.
    assert re.match(r"W\d{4}|[-\d]+ [:.\d]+: W ", said[0]), f"a warning, not {said[0]}"


def test_replayed_bytes(target, tmp_path):
    """Replays a correct client's bytes on another connection."""
    ps = target["ps", 0]
    address = data_port(ps)
    record = []
    with training(target, tmp_path):
        with wire.Peer(address) as peer:
            peer.send_block(wire.hello())
            peer.read_block()
            ping = wire.block(wire.frame(wire.PING, ident=42), sequence=1)
            peer.send(ping)
            kind = peer.first_frame()[0]
            assert kind == wire.PONG
            record.append(ping)
        # Later bytes of the connection on a new one: no handshake, wrong sequence.
        send_and_wait(address, record[0])
        # And twice on one connection.
        with wire.Peer(address) as peer:
            peer.handshake()
            peer.send(record[0] + record[0])
            assert peer.wait_closed()


def test_truncated_bytes(target, tmp_path):
    """Connections that end within a header, a hello, a block or bulk bytes."""
    address = data_port(target["ps", 0])
    whole = wire.block(wire.hello())
    with training(target, tmp_path):
        for cut in (1, 3, 4, 20, 31, 32, 40, len(whole) - 1):
            with wire.Peer(address) as peer:
                peer.send(whole[:cut])
        with wire.Peer(address) as peer:
            peer.handshake()
            call = wire.frame(wire.CALL, code=1, ident=1, fixed=struct.pack("<IIQ", 0, 1, 1 << 20 | 1 << 63)) + wire.frame(wire.DATA, ident=1, fixed=struct.pack("<Q", 1 << 20))
            peer.send(wire.block(call, 1, bytes(5000), bulk_length=1 << 20))
        # A reset instead of a close.
        with wire.Peer(address) as peer:
            peer.send(whole[:50])
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_slow_bytes(target, tmp_path):
    """A connection that sends an occasional byte is dropped at the handshake timeout and delays no other peer."""
    address = data_port(target["ps", 0])
    whole = wire.block(wire.hello())
    with training(target, tmp_path):
        with wire.Peer(address) as silent, wire.Peer(address) as slow:
            closed = False
            for byte in whole:
                try:
                    slow.send(bytes([byte]))
                    slow.socket.settimeout(0.25)
                    closed = slow.socket.recv(1) == b""
                except TimeoutError:
                    continue
                except OSError:
                    closed = True
                if closed:
                    break
            assert closed
            assert silent.wait_closed(30), "a connection that says nothing stays open"


def test_many_idle_connections(target, tmp_path):
    """Three hundred silent connections: training continues, and they are dropped in the end."""
    address = data_port(target["ps", 0])
    with training(target, tmp_path):
        peers = [wire.Peer(address) for _ in range(300)]
        made = tmp_path / "stop.steps"
        before = made.stat().st_size
        wait_until(lambda: made.stat().st_size >= before + 20, 60, "the training goes on")
        assert wire.http_get(address, "/healthz")[0] == 200
        for peer in peers:
            peer.close()


def test_reader_that_never_reads(target, tmp_path):
    """A peer that sends requests and reads no replies costs bounded memory and does not affect others."""
    ps = target["ps", 0]
    address = data_port(ps)
    before = ps.call(steps.rss_mib)
    with training(target, tmp_path):
        with wire.Peer(address) as peer:
            peer.handshake()
            peer.socket.settimeout(3)
            sequence = 1
            with contextlib.suppress(OSError):
                for _ in range(2000):
                    peer.send(wire.block(b"".join(wire.frame(wire.PING, ident=n) for n in range(200)), sequence))
                    sequence += 1
    assert ps.call(steps.rss_mib) - before < 200


def corpus(suffix):
    folder = pathlib.Path(__file__).parents[2] / "fuzz" / "corpus" / "decoders"
    files = sorted(folder.glob(f"attack-*{suffix}"))
    assert len(files) >= 3
    return {file.name: file.read_bytes()[1:] for file in files}


def call(peer, ident, method, meta, payload):
    """Returns code and message of the reply to a call with one inline part."""
    padded = meta + bytes(-len(meta) % 8)
    fixed = struct.pack("<IIQ", 0, 1, len(payload))
    peer.send_block(wire.frame(wire.CALL, code=method, ident=ident, fixed=fixed, meta=padded + payload, meta_length=len(meta)))
    peer.socket.settimeout(20)
    while True:
        control = peer.read_block()
        while len(control) >= 16:
            kind, _, code, length, answered = struct.unpack("<BBHIQ", control[:16])
            if kind == wire.REPLY and answered == ident:
                return code, control[24 : 24 + length].decode()
            size = 16 + (8 if kind == wire.REPLY else 0) + length
            control = control[size + (-size % 8) :]
            if kind == wire.PAD:
                break


def test_hostile_tensors_in_calls(target, tmp_path):
    """A member's feeds of a few bytes that would crash TensorFlow's decoders or make them allocate gigabytes: refused with a message, without side effects."""
    ps = target["ps", 0]
    address = data_port(ps)
    run_graph, star_call, complete_instance = 6, 16, 14
    before = ps.call(steps.rss_mib)
    with training(target, tmp_path), wire.Peer(address) as peer:
        peer.handshake(expected=None)
        ident = 0
        for name, request in corpus(".run").items():
            ident += 1
            code, message = call(peer, ident, run_graph, b"", request)
            assert code in (3, 15) and "/job:worker/replica:0/task:9" in message, (name, code, message)
        for name, request in corpus(".call").items():
            ident += 1
            (length,) = struct.unpack("<H", request[:2])
            code, message = call(peer, ident, star_call, request[2 : 2 + length], request[2 + length :])
            assert code in (3, 15) and "/job:worker/replica:0/task:9" in message, (name, code, message)
        # A shape on which TensorFlow's worker would abort.
        ident += 1
        code, message = call(peer, ident, complete_instance, b"", bytes.fromhex("220d120b08ffffffffffffffffff01"))
        assert code == 3 and "shape of collective instance" in message, (code, message)
    assert ps.call(steps.rss_mib) - before < 100
    assert worker_call(target, steps.run_steps, 3) == 3


# Secrets and cluster ids. ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [False, True], ids=["variable", "file"])
def test_same_secret(fresh_cluster, tmp_path, file):
    if file:
        path = tmp_path / "secret"
        path.write_text(SECRET + "\n")
        path.chmod(0o600)
        environment = {"STARWIRE_SECRET_FILE": path}
    else:
        environment = {"STARWIRE_SECRET": SECRET}
    cluster = fresh_cluster(environment=environment)
    assert attempt(cluster) == 5
    assert SECRET not in cluster.logs()


@pytest.mark.parametrize(
    "ps, worker, words",
    [
        (SECRET, "a different secret, as long", "secret"),
        (SECRET, None, "secret"),
        (None, SECRET, "secret"),
    ],
    ids=["different", "worker without", "ps without"],
)
def test_wrong_secret(fresh_cluster, ps, worker, words):
    def environment(secret):
        return {"STARWIRE_SECRET": secret} if secret else {}

    cluster = fresh_cluster(per_task={("ps", 0): environment(ps), ("worker", 0): environment(worker)})
    error = attempt(cluster)
    assert isinstance(error, RemoteError), error
    assert error.type in ("UnauthenticatedError", "PermissionDeniedError", "FailedPreconditionError"), error
    assert words in error.message and "/job:ps/replica:0/task:0" in error.message, error.message
    assert SECRET not in cluster.logs() and SECRET not in str(error)


def statistics(address):
    """Returns what the control service says over gRPC."""

    def frame(kind, flags, stream, content=b""):
        return len(content).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + content

    fields = {":method": "POST", ":scheme": "http", ":path": "/starwire.control.v1.Control/Stats", ":authority": "localhost", "content-type": "application/grpc"}
    texts = [text.encode() for pair in fields.items() for text in pair]
    headers = b"".join(b"\0" * (at % 2 == 0) + bytes([len(text)]) + text for at, text in enumerate(texts))
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=60) as one, one.makefile("rb") as answer:
        one.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0) + frame(1, 4, 1, headers) + frame(0, 1, 1, bytes(5)))
        data, ends = b"", False
        while not ends:
            head = answer.read(9)
            content = answer.read(int.from_bytes(head[:3], "big"))
            data += content if head[3] == 0 else b""
            ends = head[3] in (0, 1) and head[4] & 1
    return data


def test_statistics_do_not_show_the_secret(fresh_cluster):
    """Of a server that knows it, as everybody on this host sees them."""
    cluster = fresh_cluster(environment={"STARWIRE_SECRET": SECRET})
    assert attempt(cluster) == 5
    address = data_port(cluster["ps", 0])
    seen = [wire.http_get(address, path) for path in ("/", "/metrics")]
    assert [status for status, _ in seen] == [200, 200] and "starwire_bytes_sent_total" in seen[1][1]
    command = [STARCTL, "top", "--once", "--connections", "--json", address]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    stats = statistics(address)
    assert b"STARWIRE_SECRET" in stats and "starwire_bytes_sent_total" in shown
    assert not [text for text in (stats.decode(errors="replace"), shown, *(body for _, body in seen)) if SECRET in text]


def test_peer_without_the_secret(fresh_cluster, tmp_path):
    cluster = fresh_cluster(environment={"STARWIRE_SECRET": SECRET, **QUICK})
    address = data_port(cluster["ps", 0])
    with training(cluster, tmp_path):
        # Peers that have no secret, another one, or none for their requests. None of them gets more than a challenge.
        with wire.Peer(address) as peer:
            peer.send_block(wire.hello())
            kind, code, _, reason = peer.first_frame()
            assert (kind, code) == (wire.REFUSE, 16) and b"/job:" not in reason
            assert peer.wait_closed()
        requests = wire.frame(wire.KEY, ident=0, meta=PREFIX) + wire.frame(wire.RECV, ident=1, fixed=struct.pack("<qQ", 1, 1))
        for key, frames in ((bytes(32), wire.hello()), (None, wire.hello()), (None, requests)):
            with wire.Peer(address) as peer:
                peer.send_block(wire.frame(wire.CHALLENGE, meta=bytes(32)))
                kind, _, _, challenge = peer.first_frame()
                assert kind == wire.CHALLENGE and len(challenge) == 32
                peer.key = key
                peer.send_block(frames)
                kind, code, _, reason = peer.first_frame()
                assert (kind, code) == (wire.REFUSE, 16) and b"/job:" not in reason
                assert peer.wait_closed()


def test_cluster_ids(fresh_cluster):
    same = fresh_cluster(environment={"STARWIRE_CLUSTER_ID": "job-17"})
    assert attempt(same) == 5
    mixed = fresh_cluster(per_task={("ps", 0): {"STARWIRE_CLUSTER_ID": "job-17"}, ("worker", 0): {"STARWIRE_CLUSTER_ID": "job-18"}})
    error = attempt(mixed)
    assert isinstance(error, RemoteError) and error.type == "FailedPreconditionError", error
    assert "job-17" in error.message and "job-18" in error.message


# HTTP on the data port. -----------------------------------------------------------------------------------------------


def test_metrics_and_health(target, tmp_path):
    ps, worker = target["ps", 0], target["worker", 0]
    address = data_port(ps)
    assert worker_call(target, steps.run_steps, 3) == 3
    before = metric(address, "starwire_tensor_requests_received_total")
    assert worker_call(target, steps.run_steps, 20) == 20
    assert metric(address, "starwire_tensor_requests_received_total") >= before + 20
    assert metric(address, "starwire_connections_in") >= 1
    assert metric(data_port(worker), "starwire_payload_bytes_received_total") > 20 * 400_000
    status, body = wire.http_get(address, "/metrics")
    assert status == 200 and 'task="/job:ps/replica:0/task:0"' in body
    assert body.count("# TYPE") > 20
    assert wire.http_get(address, "/healthz") == (200, "ok\n") or wire.http_get(address, "/healthz")[1].strip() == "ok"
    assert wire.http_get(address, "/nothing")[0] == 404


def test_large_tensors_are_not_copied(target):
    """Payloads of 8 KiB and more are copied neither when sent nor when received, as the metrics show."""
    ps, worker = data_port(target["ps", 0]), data_port(target["worker", 0])
    assert worker_call(target, steps.run_steps, 2) == 2
    names = ("starwire_payload_bytes_sent_total", "starwire_copied_bytes_sent_total", "starwire_payload_bytes_received_total", "starwire_copied_bytes_received_total")
    before = {name: metric(ps, name) + metric(worker, name) for name in names}
    assert worker_call(target, steps.run_steps, 51) == 51  # of the last step, one server may not have counted everything yet
    sent, copied_sent, received, copied_received = (metric(ps, name) + metric(worker, name) - before[name] for name in names)
    assert received > 50 * 2 * 400_000
    assert copied_sent <= sent * 0.01 + 200_000 and copied_received <= received * 0.01 + 200_000


def test_tasks_of_one_host_copy_large_tensors_from_process_to_process(fresh_cluster):
    """Both sides count it; with STARWIRE_UNIX=socket the tensors go through the socket."""
    for environment, lends in (({}, True), ({"STARWIRE_UNIX": "socket"}, False)):
        cluster = fresh_cluster(environment=environment)
        ps, worker = data_port(cluster["ps", 0]), data_port(cluster["worker", 0])
        assert worker_call(cluster, steps.run_steps, 3) == 3
        before = [metric(task, f"starwire_{name}_total") for task in (ps, worker) for name in ("lent_bytes", "borrowed_bytes", "bytes_sent")]
        assert worker_call(cluster, steps.run_steps, 21) == 21  # of the last step, one server may not have counted everything yet
        after = [metric(task, f"starwire_{name}_total") for task in (ps, worker) for name in ("lent_bytes", "borrowed_bytes", "bytes_sent")]
        ps_lent, ps_borrowed, ps_sent, worker_lent, worker_borrowed, worker_sent = (new - old for new, old in zip(after, before))
        if lends:
            assert min(ps_lent, ps_borrowed, worker_lent, worker_borrowed) >= 20 * 400_000
            assert max(ps_sent, worker_sent) < 21 * 40_000
        else:
            assert max(ps_lent, ps_borrowed, worker_lent, worker_borrowed) == 0
            assert min(ps_sent, worker_sent) >= 20 * 400_000


def test_control_can_be_switched_off(fresh_cluster):
    cluster = fresh_cluster(environment={"STARWIRE_CONTROL": "off"})
    address = data_port(cluster["ps", 0])
    assert worker_call(cluster, steps.run_steps, 3) == 3
    with pytest.raises(Exception):
        status, _ = wire.http_get(address, "/metrics")
        assert status == 200
    assert worker_call(cluster, steps.run_steps, 3) == 3
