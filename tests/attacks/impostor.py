"""A fake parameter server: speaks enough of the protocol for a worker to create a session on it, and returns whatever a test wants."""

import socket
import struct
import threading

import client
import protobuf
import wire

REGISTER_GRAPH = 4
INCARNATION = 4711


class Impostor:
    """Serves connections in threads until it is closed."""

    def __init__(self, address, task, protocol):
        host, port = address.rsplit(":", 1)
        self.task, self.protocol = task, protocol
        self.hostile = b""  # a TensorProto: returned as the value of every tensor
        self.served = []  # the methods called, and "RECV"
        self.listener = socket.create_server((host, int(port)))
        self.thread = threading.Thread(target=self._accept, daemon=True)
        self.thread.start()

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(5)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        connection.settimeout(30)
        try:
            with connection:
                Conversation(self, connection).run()
        except OSError:
            pass


class Conversation(wire.Peer):
    def __init__(self, impostor, connection):
        self.impostor, self.socket, self.buffer, self.sequence = impostor, connection, b"", 0

    def run(self):
        assert self.first_frame()[0] == wire.HELLO
        hello = wire.hello(task=self.impostor.task, protocol=self.impostor.protocol)
        self.send_block(bytes([wire.WELCOME]) + hello[1:])
        while True:
            for answer in self.answers(self.read_block()):
                self.send_block(*answer)

    def answers(self, control):
        at = 0
        while at < len(control) and control[at]:
            kind, flags, code, length, ident = struct.unpack_from("<BBHIQ", control, at)
            at += 16
            if kind == wire.CALL:
                (count,) = struct.unpack_from("<I", control, at + 4)
                lengths = struct.unpack_from(f"<{count}Q", control, at + 8)
                at += 8 + 8 * count + length + -length % 8 + sum(size + -size % 8 for size in lengths if not size & client.BULK)
                self.impostor.served.append(code)
                yield self.reply_to_call(ident, code)
            elif kind == wire.RECV:
                at += 32 if flags & 1 else 16
                self.impostor.served.append("RECV")
                hostile = self.impostor.hostile
                yield reply(ident, client.tensor_meta(protobuf.VARIANT, client.PROTO_ENCODING, (), len(hostile)), [hostile])
            elif kind == wire.DATA:
                at += 8
            else:
                if kind == wire.PING:
                    yield (wire.frame(wire.PONG, ident=ident),)
                at += length + -length % 8

    def reply_to_call(self, ident, method):
        if method == client.GET_STATUS:
            name, incarnation = f"{self.impostor.task}/device:CPU:0", protobuf.varint(6 << 3 | 1) + struct.pack("<Q", INCARNATION)
            device = protobuf.message(1, name) + protobuf.message(2, "CPU") + protobuf.number(4, 1 << 28) + protobuf.message(5, b"") + incarnation
            return reply(ident, parts=[protobuf.message(1, device)])
        if method == REGISTER_GRAPH:
            return reply(ident, parts=[protobuf.message(1, "0000000000000001")])
        if method == client.STAR_CALL:
            fetch = client.objects(self.impostor.hostile)
            return reply(ident, client.star_reply([fetch]), client.parts_of([fetch]))
        return reply(ident)


def reply(ident, meta=b"", parts=(), code=0):
    """Returns the control section and bulk bytes of a REPLY."""
    lengths, inline, bulk = [], b"", b""
    for part in parts:
        if len(part) < 8192:
            lengths.append(len(part))
            inline += part + b"\0" * (-len(part) % 8)
        else:
            lengths.append(len(part) | client.BULK)
            bulk += part
    fixed = struct.pack(f"<II{len(lengths)}Q", len(lengths), 0, *lengths)
    control = wire.frame(wire.REPLY, code=code, ident=ident, fixed=fixed, meta=meta + b"\0" * (-len(meta) % 8) + inline, meta_length=len(meta))
    if bulk:
        control += wire.frame(wire.DATA, ident=ident, fixed=struct.pack("<Q", len(bulk)))
    return control, bulk


