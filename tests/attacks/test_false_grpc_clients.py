"""HTTP/2 clients that pretend to be gRPC's C core at the port of a task with a secret: they are sorted to TensorFlow's gRPC, which is closed to them."""

import contextlib
import socket
import struct

import client

CORE = struct.pack(">HI", 0xFE03, 1)
CONTINUATION, WINDOW_UPDATE = 9, 8
END_STREAM, END_HEADERS = 1, 4
DENIED = b"grpc-status\x017"
LARGEST = 16 << 10


class FalseCore(client.Http2):
    """Begins as a client of TensorFlow's gRPC does."""

    def __init__(self, target, settings=CORE, timeout=5):
        self.socket = target.connect(timeout)
        self.buffer, self.next_stream = b"", 1
        self.socket.sendall(self.PREFACE + self.frame(self.SETTINGS, 0, 0, settings))

    def headers(self, content=b"whatever", flags=END_STREAM | END_HEADERS):
        stream, self.next_stream = self.next_stream, self.next_stream + 2
        return self.frame(self.HEADERS, flags, stream, content)

    def is_denied(self):
        """Whether a request is answered with PERMISSION_DENIED."""
        self.socket.sendall(self.headers())
        seen = b""
        while DENIED not in seen:
            data = self.socket.recv(65536)
            if not data:
                return False
            seen += data
        return True

    def is_closed(self, timeout=5):
        self.socket.settimeout(timeout)
        try:
            while self.socket.recv(65536):
                pass
        except (socket.timeout, TimeoutError):
            return False
        except OSError:
            pass
        return True


def floods(one):
    """What such a client may send without end; none of it is worth more than an answer of its own."""
    return [
        b"".join(one.headers() for _ in range(50)),
        one.headers(bytes(LARGEST), 0) + b"".join(one.frame(CONTINUATION, 0, one.next_stream - 2, bytes(LARGEST)) for _ in range(4)),
        one.headers(client.Http2.header(b"x" * 100, b"y" * 100) * 70),
        b"".join(one.frame(one.PING, 0, 0, bytes(8)) for _ in range(100)),
        b"".join(one.frame(one.SETTINGS, 0, 0, CORE) for _ in range(100)),
        b"".join(one.frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff") for _ in range(100)),
        b"".join(one.frame(one.DATA, 0, 1, bytes(LARGEST)) for _ in range(4)),
        b"".join(one.frame(0xEE, 0xFF, 0x7FFFFFFF, bytes(10)) for _ in range(100)),
    ]


def requests(target, pace):
    """Clients that flood the passage; half of them read nothing. Counts rounds and denials."""
    held, denied, rounds = [], 0, 0
    for round_ in pace(100, least=60):
        with contextlib.suppress(OSError):
            if len(held) < 40:
                held.append(FalseCore(target))
                denied += held[-1].is_denied()
            one = held[round_ % len(held)]
            one.socket.settimeout(0.2)
            one.socket.sendall(floods(one)[round_ % 8])
            if round_ % 2:
                one.answer_pings()
            rounds += 1
            continue
        if len(held) >= 40:
            held.pop(round_ % len(held)).close()
    return rounds, denied


def test_floods_of_the_passage(trainer):
    outcome = trainer.under(requests)
    rounds, denied = outcome.result
    assert rounds > 30 and denied > 10, outcome.result
    assert outcome.extra_memory < 48 << 20, outcome.line()


SERVED = ("the most settings", "byte by byte")


def answer_to(one, patience):
    """What the server says: "denied", "closed", or nothing of either for as long as `patience` (seconds)."""
    one.settimeout(patience)
    seen = b""
    try:
        while DENIED not in seen:
            data = one.recv(65536)
            if not data:
                return "closed"
            seen += data
    except TimeoutError:
        return "waits"
    except OSError:
        return "closed"
    return "denied"


def beginnings(target, pace):
    """Settings frames of every kind. Returns what became of each."""
    frame, seen = client.Http2.frame, {}
    for round_ in pace(20, least=9):
        kinds = {
            "the most settings": frame(4, 0, 0, CORE * 170),
            "too many settings": frame(4, 0, 0, CORE * 171),
            "a frame longer than announced": frame(4, 0, 0, CORE)[:-3],
            "half a setting": frame(4, 0, 0, CORE + CORE[:3]),
            "another frame first": frame(6, 0, 0, bytes(8)) + frame(4, 0, 0, CORE),
            "an acknowledgement first": frame(4, 1, 0, b""),
            "a frame of 16 MiB": b"\xff\xff\xff" + frame(4, 0, 0, CORE)[3:],
            "the setting as a value": frame(4, 0, 0, struct.pack(">HI", 4, 0xFE03)),
            "byte by byte": frame(4, 0, 0, CORE),
        }
        what = list(kinds)[round_ % len(kinds)]
        with contextlib.suppress(OSError), target.connect(5) as one:
            pieces = [client.Http2.PREFACE + kinds[what]]
            if what == "byte by byte":
                pieces = [bytes([byte]) for byte in pieces[0]]
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in pieces:
                one.sendall(piece)
            one.sendall(frame(1, END_STREAM | END_HEADERS, 1, b"whatever"))
            seen.setdefault(what, set()).add(answer_to(one, 5 if what in SERVED else 1))
    return seen


def test_strange_settings(trainer):
    outcome = trainer.under(beginnings)
    for what in SERVED:
        assert outcome.result[what] == {"denied"}, outcome.result
    for what in ("too many settings", "another frame first", "an acknowledgement first", "the setting as a value"):
        assert outcome.result[what] <= {"closed", "waits"}, outcome.result
