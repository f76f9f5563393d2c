"""A relay between a worker and a parameter server's data port that parses the protocol (docs/protocol.md) and records every call with its reply."""

import socket
import struct
import threading

from cluster import BenchError

MAGIC, HEADER, FRAME = b"SWB1", 32, 16
RECV, CALL, REPLY, DATA = 11, 12, 13, 14
ABORT = 1
BULK = 1 << 63


class Message:
    """A CALL or a REPLY: code (method or status), metadata, and the payload's parts."""

    def __init__(self, code, meta, lengths, inline):
        self.code, self.meta, self.parts, self.missing = code, meta, [], []
        for length in lengths:
            self.parts.append(bytearray())
            if length & BULK:
                self.missing.append((self.parts[-1], length & ~BULK))
            else:
                self.parts[-1] += inline[:length]
                inline = inline[length + -length % 8 :]

    def add(self, data):
        """Adds the next bulk bytes."""
        while data:
            if not self.missing:
                raise BenchError("a payload has more bytes than were announced")
            part, length = self.missing[0]
            taken = data[: length - len(part)]
            part += taken
            data = data[len(taken) :]
            if len(part) == length:
                self.missing.pop(0)

    @property
    def is_complete(self):
        return not self.missing


class Direction:
    """One direction of a connection, block by block."""

    def __init__(self, begins, ends):
        self.buffer, self.open, self.begins, self.ends = bytearray(), {}, begins, ends

    def take(self, data):
        self.buffer += data
        while len(self.buffer) >= HEADER:
            if self.buffer[:4] != MAGIC:
                raise BenchError(f"{bytes(self.buffer[:16])!r} is no block")
            (control,), (bulk,) = struct.unpack_from("<I", self.buffer, 8), struct.unpack_from("<Q", self.buffer, 16)
            end = HEADER + control + bulk
            if len(self.buffer) < end:
                return
            block = bytes(self.buffer[HEADER:end])
            del self.buffer[:end]
            self.frames(block[:control], block[control:])

    def frames(self, control, bulk):
        at = 0
        while at < len(control) and control[at] != 0:
            kind, flags, code, length, ident = struct.unpack_from("<BBHIQ", control, at)
            at += FRAME
            if kind in (CALL, REPLY):
                (count,) = struct.unpack_from("<I", control, at + (4 if kind == CALL else 0))
                lengths = struct.unpack_from(f"<{count}Q", control, at + 8)
                at += 8 + 8 * count
                meta = control[at : at + length]
                at += length + -length % 8
                inline = sum(n + -n % 8 for n in lengths if not n & BULK)
                message = Message(code, meta, lengths, control[at : at + inline])
                at += inline
                self.open[ident] = message
                self.begins(ident, message)
            elif kind == DATA:
                (piece,) = struct.unpack_from("<Q", control, at)
                at += 8
                if flags & ABORT:
                    raise BenchError("a payload was given up while it was recorded")
                self.open[ident].add(bulk[:piece])
                bulk = bulk[piece:]
            elif kind == RECV:
                raise BenchError("a tensor was asked for by itself: the model's steps are not star calls alone")
            else:
                at += length
            at += -at % 8
            if ident in self.open and self.open[ident].is_complete:
                self.ends(ident, self.open.pop(ident))


class Recorded:
    """A call, its reply (None until it arrives), and the calls (by index on the tape) that had been answered when it began."""

    def __init__(self, call, after):
        self.method, self.meta, self.parts, self.after, self.reply = call.code, call.meta, call.parts, after, None


class Tap:
    """Relays connections to `target`. `calls`: all calls, in the order in which they began."""

    def __init__(self, address, target):
        self.lock, self.calls, self.failure = threading.Condition(), [], None
        self.target = target
        self.listener = socket.create_server(self._pair(address))
        threading.Thread(target=self._accept, daemon=True).start()

    @staticmethod
    def _pair(address):
        host, port = address.rsplit(":", 1)
        return host, int(port)

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._pair(self.target))
            waiting = {}
            to_server = Direction(lambda ident, call: self._begin(waiting, ident, call), lambda ident, call: None)
            to_client = Direction(lambda ident, reply: None, lambda ident, reply: self._end(waiting, ident, reply))
            for source, sink, direction in ((client, server, to_server), (server, client, to_client)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._relay, args=(source, sink, direction), daemon=True).start()

    def _relay(self, source, sink, direction):
        try:
            while data := source.recv(1 << 18):
                # Before it is forwarded: a reply must not be recorded before its call.
                with self.lock:
                    direction.take(data)
                sink.sendall(data)
        except OSError:
            pass
        except Exception as error:  # reported to the thread that waits for the tape
            with self.lock:
                self.failure = error
                self.lock.notify_all()
        for one in (source, sink):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _begin(self, waiting, ident, call):
        waiting[ident] = len(self.calls)
        self.calls.append(Recorded(call, [index for index, before in enumerate(self.calls) if before.reply is not None]))

    def _end(self, waiting, ident, reply):
        self.calls[waiting.pop(ident)].reply = reply
        self.lock.notify_all()

    def __len__(self):
        with self.lock:
            return len(self.calls)

    def since(self, mark, patience):
        """The calls after `mark`, once all of them are answered."""
        with self.lock:
            if not self.lock.wait_for(lambda: self.failure or all(call.reply for call in self.calls[mark:]), patience):
                raise BenchError("a call was not answered while it was recorded")
            if self.failure:
                raise self.failure
            return self.calls[mark:]

    def close(self):
        self.listener.close()
