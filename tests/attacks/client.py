"""A client of the data port, written from docs/protocol.md without the library's code, that can send arbitrary bytes.

Pure Python, sockets only. tests/python/wire.py provides frames and blocks; this adds a member's part: the keys of a secret, calls and replies,
tensors, star calls and loans; and the HTTP/2 that unauthenticated peers speak to the same port.
"""

import functools
import hashlib
import hmac
import os
import socket
import ssl
import struct
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import protobuf  # noqa: E402
import wire  # noqa: E402

BULK = 1 << 63
LEND, TAKEN = 16, 17
LENDING, DIGESTS = 2, 4  # feature bits
PLAIN_ENCODING, PROTO_ENCODING, SLOT_ENCODING = 1, 4, 17
# Methods: the WorkerService in the order of cc/base/methods.h, with TensorFlow's own request messages; then the star calls.
GET_STATUS, REGISTER_GRAPH, RECV_TENSOR, LOGGING = 1, 4, 9, 10
STAR_CALL, STAR_REGISTER, STAR_END = 16, 17, 18
UNKNOWN_PLAN = 1


class Target(NamedTuple):
    """The target of an attack. Only attacks by members use what an unauthenticated peer cannot know (secret, socket name)."""

    address: str  # of the data port
    grpc: str
    task: str
    protocol: str
    secret: str
    unix: str  # name of the abstract socket
    source: str  # loopback address of the attacker
    certificates: dict = {}  # of a member: the environment of a task with TLS

    def connect(self, timeout=5):
        """Connects to the data port or, if there is none, to TensorFlow's gRPC port."""
        host, port = (self.address or self.grpc).rsplit(":", 1)
        return socket.create_connection((host, int(port)), timeout, source_address=(self.source, 0))

    def tls(self, protocols=("starwire/2",)):
        """TLS as a member has it; None if the server has none. Whether the server is the right one is not looked at."""
        return tls_with(self.certificates, protocols) if self.certificates else None


def tls_with(certificates, protocols=("starwire/2",)):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(certificates["STARWIRE_TLS_CERT"], certificates["STARWIRE_TLS_KEY"])
    if protocols:
        context.set_alpn_protocols(protocols)
    return context


class Reply(NamedTuple):
    code: int
    meta: bytes
    parts: list

    @property
    def text(self):
        return self.meta.decode(errors="replace") if self.code else ""


# Handshake. -----------------------------------------------------------------------------------------------------------


@functools.cache
def stretched(secret):
    return hashlib.pbkdf2_hmac("sha256", secret.encode(), b"starwire 2 secret", 200_000)


def key(secret, sender, client, server):
    """The key of the blocks that the client or the server sends on the connection with these challenges."""
    return hmac.digest(stretched(secret), b"starwire 2 " + sender + b"\0" + client + server, "sha256")


class RawConnection(wire.Peer):
    """A connection that need not complete the handshake."""

    def __init__(self, target, timeout=30, unix=False):
        wire.source = target.source
        self.target = target
        if unix:
            self.socket, self.buffer, self.sequence = socket.socket(socket.AF_UNIX), b"", 0
            self.socket.settimeout(timeout)
            self.socket.connect("\0" + target.unix)
        else:
            super().__init__(target.address, timeout, target.tls())

    def hello(self, **options):
        options.setdefault("protocol", self.target.protocol)
        if self.target.secret:
            options["features"] = options.get("features", 0) | DIGESTS
        return wire.hello(**options)

    def challenge(self):
        """Exchanges challenges; returns both. A peer without the secret gets no further."""
        ours = os.urandom(32)
        self.send_block(wire.frame(wire.CHALLENGE, meta=ours))
        kind, code, _, theirs = self.first_frame()
        if kind != wire.CHALLENGE:
            raise ConnectionRefusedError(code, theirs.decode(errors="replace"))
        return ours, theirs


class Member(RawConnection):
    """A connection that completes the handshake and makes calls."""

    def __init__(self, target, task="/job:worker/replica:0/task:9", timeout=30, unix=False, features=0):
        super().__init__(target, timeout, unix)
        self.answers, self.open, self.next_id, self.said = {}, {}, 1, []
        if target.secret:
            challenges = self.challenge()
            self.key, self.their_key = (key(target.secret, sender, *challenges) for sender in (b"client", b"server"))
        self.send_block(self.hello(task=task, features=features))
        kind, code, self.features, meta = self.first_frame()
        if kind != wire.WELCOME:
            raise ConnectionRefusedError(code, meta.decode(errors="replace"))

    # Requests.

    def new_id(self):
        self.next_id += 1
        return self.next_id - 1

    def start(self, method, meta=b"", parts=(), deadline_ms=0):
        """Sends a call and its payload in one block; returns its id."""
        ident = self.new_id()
        self.send_block(*call(ident, method, meta + self.digest(method, parts), parts, deadline_ms))
        return ident

    def digest(self, method, parts):
        """What the metadata of a call ends with."""
        payload = b"".join(parts)
        has_one = len(payload) >= 8192 and self.features & DIGESTS and method not in (STAR_CALL, STAR_REGISTER, STAR_END)
        return hashlib.sha256(payload).digest() if has_one else b""

    def call(self, method, meta=b"", parts=(), timeout=30):
        return self.answer(self.start(method, meta, parts), timeout)

    def cancel(self, *idents):
        self.send_block(b"".join(wire.frame(wire.CANCEL, code=1, ident=ident) for ident in idents))

    # Replies.

    def answer(self, ident, timeout=30):
        deadline = time.monotonic() + timeout
        while ident not in self.answers:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer to request {ident} within {timeout} s")
            self.listen(deadline - time.monotonic())
        return self.answers.pop(ident)

    def listen(self, timeout=30):
        """Reads one block and answers pings."""
        self.socket.settimeout(max(0.01, timeout))
        head = self._take(32)
        assert head[:4] == wire.MAGIC, head
        control_length, _, bulk_length, _ = struct.unpack("<IIQQ", head[8:32])
        control, bulk = self.authentic(head, self._take(control_length)), self._take(bulk_length)
        at, pongs = 0, b""
        while at < len(control) and control[at]:
            kind, flags, code, length, ident = struct.unpack_from("<BBHIQ", control, at)
            at += 16
            if kind == wire.REPLY:
                (count,) = struct.unpack_from("<I", control, at)
                lengths = struct.unpack_from(f"<{count}Q", control, at + 8)
                at += 8 + 8 * count
                meta = control[at : at + length]
                at += length + -length % 8
                parts, missing = [], 0
                for size in lengths:
                    if size & BULK:
                        missing += size & ~BULK
                        continue
                    parts.append(control[at : at + size])
                    at += size + -size % 8
                self.open[ident] = [Reply(code, meta, parts), missing]
            elif kind == wire.DATA:
                (piece,) = struct.unpack_from("<Q", control, at)
                at += 8
                if ident in self.open:
                    self.open[ident][0].parts.append(bulk[:piece])
                    self.open[ident][1] = 0 if flags & 1 else self.open[ident][1] - piece
                bulk = bulk[piece:]
            else:
                if kind == wire.PING:
                    pongs = wire.frame(wire.PONG, ident=ident)
                self.said.append((kind, ident, control[at : at + length]))
                at += length + -length % 8
            if ident in self.open and self.open[ident][1] == 0:
                self.answers[ident] = self.open.pop(ident)[0]
        if pongs:
            self.send_block(pongs)

    # Calls that every worker makes.

    def devices(self):
        """Returns {name: incarnation} of the target's devices."""
        reply = self.call(GET_STATUS)
        assert reply.code == 0, reply
        found = {}
        for field, value in protobuf.fields(b"".join(reply.parts)):
            if field == 1:
                device = dict(protobuf.fields(value))
                found[device[1].decode()] = device[6]
        return found

    def register(self, plan, session=b"", name=None):
        name = name or hashlib.sha256(plan).digest()
        return self.call(STAR_REGISTER, struct.pack("<BBHIQ", 1, 0, len(session), 0, 0) + name + session, [plan])

    def known_plan(self):
        """Registers a plan and returns its hash: a server reads only the feeds of calls whose plan it knows."""
        plan = protobuf.identity_plan(next(iter(self.devices())))
        reply = self.register(plan)
        assert reply.code == 0, reply
        return hashlib.sha256(plan).digest()

    def star(self, plan, feeds=(), timeout=30, **options):
        """`plan`: its hash; `feeds`: table entries with their bytes."""
        return self.call(STAR_CALL, star_head(plan, **options) + table(feeds), parts_of(feeds), timeout)


# Frames of requests. --------------------------------------------------------------------------------------------------


def call(ident, method, meta=b"", parts=(), deadline_ms=0):
    """Returns the control section and bulk bytes of a call."""
    lengths, inline, bulk = [], b"", b""
    for part in parts:
        if len(part) < 8192 and len(inline) + len(part) < 1 << 20:
            lengths.append(len(part))
            inline += part + b"\0" * (-len(part) % 8)
        else:
            lengths.append(len(part) | BULK)
            bulk += part
    fixed = struct.pack(f"<II{len(lengths)}Q", deadline_ms, len(lengths), *lengths)
    control = wire.frame(wire.CALL, code=method, ident=ident, fixed=fixed, meta=meta + b"\0" * (-len(meta) % 8) + inline, meta_length=len(meta))
    if bulk:
        control += wire.frame(wire.DATA, ident=ident, fixed=struct.pack("<Q", len(bulk)))
    return control, bulk


def recv(ident, step, key=0):
    return wire.frame(wire.RECV, ident=ident, fixed=struct.pack("<qQ", step, key))


def key_prefix(device, incarnation, edge="edge_1_never"):
    """Returns a rendezvous key up to `;frame:iteration`."""
    return f"{device};{incarnation:016x};/job:worker/replica:0/task:9/device:CPU:0;{edge}".encode()


# Star calls. ----------------------------------------------------------------------------------------------------------


def star_head(plan, step=1, flags=0, session=b"", incarnation=0, keeps=(), keep_count=None, turn=(0, 0, 0)):
    """`keeps`: (fetch, slot, flags) of the values that stay on the server. `turn`: lane, attempt and number of a call that may come again."""
    head = struct.pack("<BBHHHIIqQ", 2, flags, 0, len(session), 0, len(keeps) if keep_count is None else keep_count, 0, step, incarnation)
    return head + plan + struct.pack("<IIQ", *turn) + session + b"".join(struct.pack("<III", *keep) for keep in keeps)


def entry(dtype, encoding, sizes, content, slot=0, length=None):
    described = struct.pack("<HBBIQ", dtype, encoding, len(sizes), slot, len(content) if length is None else length)
    return described + struct.pack(f"<{len(sizes)}q", *sizes), content


def floats(count, content=None):
    return entry(protobuf.FLOAT, PLAIN_ENCODING, (count,), bytes(4 * count) if content is None else content)


def objects(proto):
    """A scalar variant, encoded as a TensorProto."""
    return entry(protobuf.VARIANT, PROTO_ENCODING, (), proto)


def table(feeds, count=None):
    return struct.pack("<II", len(feeds) if count is None else count, 0) + b"".join(described for described, _ in feeds)


def parts_of(feeds):
    """One part per tensor: the payload may be cut between tensors."""
    return [content for _, content in feeds if content]


def tensor_meta(dtype, encoding, sizes, length):
    """Metadata of a rendezvous reply."""
    return struct.pack("<BBHBBHqQ", 1, 0, dtype, encoding, len(sizes), 0, 0, length) + struct.pack(f"<{len(sizes)}q", *sizes)


def star_reply(fetches=(), flags=0):
    return struct.pack("<BBHIIIQQ", 1, flags, 0, 0, 0, 0, 0, 0) + (table(fetches) if flags == 0 else b"")


def registers(reply):
    """True if the reply to a star call requests its plan."""
    return reply.code == 0 and reply.meta[1] == UNKNOWN_PLAN


# HTTP/2, as far as the attacks need it. -------------------------------------------------------------------------------


class Http2:
    """An HTTP/2 connection with prior knowledge to the control service."""

    PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7

    def __init__(self, target, timeout=5):
        self.socket = target.connect(timeout)
        self.buffer, self.next_stream = b"", 1
        self.socket.sendall(self.PREFACE + self.frame(self.SETTINGS))

    @staticmethod
    def frame(kind, flags=0, stream=0, content=b""):
        return len(content).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + content

    @staticmethod
    def header(name, value):
        """Encodes a literal header without indexing."""
        return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value

    def request(self, path=b"/healthz"):
        """Returns (next stream id, frame that requests `path` on it)."""
        names = ((b":method", b"GET"), (b":scheme", b"http"), (b":path", path), (b":authority", b"localhost"))
        content = b"".join(self.header(*pair) for pair in names)
        stream, self.next_stream = self.next_stream, self.next_stream + 2
        return stream, self.frame(self.HEADERS, 0x5, stream, content)  # END_HEADERS, END_STREAM

    def reset(self, stream):
        return self.frame(self.RST_STREAM, 0, stream, struct.pack(">I", 8))

    def answer_pings(self):
        """Reads available frames and answers them. Returns their kinds; raises ConnectionError if the server has closed."""
        self.socket.setblocking(False)
        try:
            while data := self.socket.recv(65536):
                self.buffer += data
            raise ConnectionError("closed")
        except BlockingIOError:
            pass
        finally:
            self.socket.settimeout(30)
        kinds = []
        while len(self.buffer) >= 9:
            length = int.from_bytes(self.buffer[:3], "big")
            if len(self.buffer) < 9 + length:
                break
            kind, flags = self.buffer[3], self.buffer[4]
            content, self.buffer = self.buffer[9 : 9 + length], self.buffer[9 + length :]
            kinds.append(kind)
            if kind == self.PING and not flags & 1:
                self.socket.sendall(self.frame(self.PING, 1, 0, content))
            elif kind == self.SETTINGS and not flags & 1:
                self.socket.sendall(self.frame(self.SETTINGS, 1))
        return kinds

    def close(self):
        self.socket.close()


# Pace. ----------------------------------------------------------------------------------------------------------------


class Pace:
    """Paces an attack: at most `share` of a core and `per_second` rounds, until it is stopped.

    On two cores, an attack that used a whole one would slow the training by itself and hide its effect on the server.
    """

    def __init__(self, stop, share=0.25):
        self.stop, self.share, self.rounds = stop, share, 0
        self.begun, self.cpu = time.monotonic(), time.process_time()

    def __call__(self, per_second=1000.0, least=0):
        """`least`: the minimum number of rounds, even if `stop` is set earlier on a busy machine."""
        due = time.monotonic()
        while not self.stop.is_set() or self.rounds < least:
            yield self.rounds
            self.rounds += 1
            due = max(due + 1.0 / per_second, time.monotonic() - 0.1)
            used = (time.process_time() - self.cpu) / self.share
            self.sleep(max(due, self.begun + used) - time.monotonic())

    def sleep(self, seconds):
        if seconds > 0:
            self.stop.wait(seconds)

    def burn(self):
        """The control of every attack: uses the same share of a core and sends nothing."""
        slice_seconds = 0.002
        for _ in self(1e6):
            until = time.process_time() + slice_seconds
            while time.process_time() < until:
                pass


def random_source():
    """Returns a loopback address per attack: the server logs an offending host once a minute and has quotas per host."""
    return f"127.{os.urandom(1)[0] % 200 + 20}.{os.urandom(1)[0]}.{os.urandom(1)[0] % 250 + 1}"
