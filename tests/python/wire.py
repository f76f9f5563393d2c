"""A separate, minimal implementation of docs/protocol.md that can send what a correct peer never would."""

import hashlib
import hmac
import os
import socket
import struct
import time

MAGIC = b"SWB1"
FIRST_READ = 1024
TAG = 16  # bytes of the code that authenticates a block
PAD, HELLO, WELCOME, CHALLENGE, REFUSE, KEY, RECV, CALL, REPLY, DATA, CANCEL, PING, PONG, GOODBYE = 0, 1, 2, 3, 4, 10, 11, 12, 13, 14, 15, 20, 21, 22


def _crc_table():
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC = _crc_table()


def crc32c(data):
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ _CRC[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


assert crc32c(b"123456789") == 0xE3069283


def frame(kind, code=0, ident=0, fixed=b"", meta=b"", flags=0, meta_length=None):
    body = struct.pack("<BBHIQ", kind, flags, code, len(meta) if meta_length is None else meta_length, ident) + fixed + meta
    return body + b"\0" * (-len(body) % 8)


def block(control, sequence=0, bulk=b"", magic=MAGIC, version=3, flags=0, reserved=0, control_length=None, bulk_length=None, crc=None, key=None):
    """`key`: of the code at the end, if there is one."""
    tag = TAG if key else 0
    if bulk or bulk_length:
        control = control + b"\0" * max(0, FIRST_READ - 32 - tag - len(control))
    control += bytes(tag)
    head = lambda checksum: magic + struct.pack(  # noqa: E731
        "<BBHIIQQ", version, flags, reserved, len(control) if control_length is None else control_length, checksum, len(bulk) if bulk_length is None else bulk_length, sequence
    )
    if key:
        control = control[:-TAG] + code(key, head(0), control[:-TAG])
    return head(crc32c(head(0) + control) if crc is None else crc) + control + bulk


def code(key, head, control):
    """What authenticates a block: covers all of its header but the checksum, and its control section."""
    return hmac.digest(key, head[:12] + head[16:] + control, "sha256")[:TAG]


def field(tag, value):
    return struct.pack("<HH", tag, len(value)) + value


def hello(task="/job:worker/replica:0/task:9", protocol="grpc++", expected=None, cluster=None, extra=b"", features=0):
    limits = struct.pack("<IIQIIQ", 1 << 18, 1 << 14, 256 << 20, 1 << 16, 16 << 20, 64 << 30)
    fields = field(1, protocol.encode()) + field(2, task.encode()) + field(3, hashlib.sha256(f"{os.getpid()} {task}".encode()).digest()[:8])
    if expected is not None:
        fields += field(4, expected.encode())
    if cluster is not None:
        fields += field(5, cluster.encode())
    fields += field(9, limits)
    return frame(HELLO, ident=features, meta=fields + extra)


source = "127.0.0.1"  # source address of connections: a server logs an offending host once a minute


class Peer:
    """A connection to a data port."""

    key = None  # of the blocks that this side sends, with a secret
    their_key = None

    def __init__(self, address, timeout=30, tls=None):
        """`tls`: the ssl.SSLContext of a client."""
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host.strip("[]"), int(port)), timeout, source_address=(source, 0))
        if tls:
            self.socket = tls.wrap_socket(self.socket)
        self.buffer = b""
        self.sequence = 0

    def send(self, data):
        self.socket.sendall(data)

    def send_block(self, control, bulk=b"", **options):
        self.send(block(control, self.sequence, bulk, key=self.key, **options))
        self.sequence += 1

    def _take(self, count):
        while len(self.buffer) < count:
            data = self.socket.recv(65536)
            if not data:
                raise ConnectionError("closed")
            self.buffer += data
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        return taken

    def read_block(self):
        """Checks the next block; returns its frames."""
        head = self._take(32)
        assert head[:4] == MAGIC, head
        control_length, crc, bulk_length, _ = struct.unpack("<IIQQ", head[8:32])
        control = self._take(control_length)
        assert crc32c(head[:12] + b"\0" * 4 + head[16:] + control) == crc
        self._take(bulk_length)
        return self.authentic(head, control)

    def authentic(self, head, control):
        """The frames of a control section, whose code must be right."""
        if self.their_key is None:
            return control
        assert hmac.compare_digest(control[-TAG:], code(self.their_key, head, control[:-TAG])), "the server does not know the secret"
        return control[:-TAG]

    def first_frame(self):
        control = self.read_block()
        kind, flags, code, length, ident = struct.unpack("<BBHIQ", control[:16])
        return kind, code, ident, control[16 : 16 + length]

    def handshake(self, **options):
        """Completes the handshake; returns the WELCOME's fields."""
        self.send_block(hello(**options))
        kind, code, _, meta = self.first_frame()
        assert kind == WELCOME, (kind, code, meta)
        return meta

    def wait_closed(self, timeout=30):
        """True if the server closes the connection within the timeout."""
        deadline = time.monotonic() + timeout
        self.socket.settimeout(0.2)
        while time.monotonic() < deadline:
            try:
                if not self.socket.recv(65536):
                    return True
            except TimeoutError:
                continue
            except OSError:
                return True
        return False

    def close(self):
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def http_get(address, path, timeout=30, tls=None):
    """Sends an HTTP/1.1 GET, plain or with the ssl.SSLContext of a client; returns status and body."""
    import http.client

    host, port = address.rsplit(":", 1)
    how = (http.client.HTTPSConnection, {"context": tls}) if tls else (http.client.HTTPConnection, {})
    connection = how[0](host.strip("[]"), int(port), timeout=timeout, **how[1])
    connection.request("GET", path)
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, body
