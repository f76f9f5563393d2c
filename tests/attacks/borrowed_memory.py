"""Loans whose content comes back: a star call that returns its only feed, which the server copies from this process's memory."""

import ctypes
import fcntl
import hashlib
import mmap
import os
import platform
import select
import struct

import client
import protobuf
import wire

LENT = 1 << 18
VALUE = 4711  # of every witness
USERFAULTFD = {"x86_64": 323, "aarch64": 282}.get(platform.machine(), -1)


class Borrower:
    """A member of this host that lends. `echo` returns what the server has read; None if it has closed the connection."""

    def __init__(self, target, name="echo", task="/job:worker/replica:0/task:2"):
        self.member = client.Member(target, unix=True, features=client.LENDING, task=task)
        device = next(iter(self.member.devices()))
        assert any(kind == client.TAKEN and ident == 0 for kind, ident, _ in self.member.said), "the server does not borrow"
        plan = protobuf.identity_plan(device, name)
        assert self.member.register(plan).code == 0
        self.plan = hashlib.sha256(plan).digest()

    def lend(self, pieces, witness):
        """Sends the call; returns its number. `pieces`: (address, length), LENT bytes in all."""
        ident = self.member.new_id()
        described = client.entry(protobuf.FLOAT, client.PLAIN_ENCODING, (LENT // 4,), bytes(LENT))[0]
        meta = client.star_head(self.plan) + struct.pack("<II", 1, 0) + described
        fixed = struct.pack("<IIQ", 0, 1, LENT | client.BULK)
        control = wire.frame(wire.CALL, code=client.STAR_CALL, ident=ident, fixed=fixed, meta=meta)
        control += wire.frame(wire.DATA, ident=ident, fixed=struct.pack("<Q", LENT))
        lent = b"".join(struct.pack("<QQ", *piece) for piece in pieces)
        self.member.send_block(control + wire.frame(client.LEND, ident=VALUE, fixed=struct.pack("<QQ", witness, len(pieces)) + lent))
        return ident

    def echo(self, address, witness, timeout=20):
        try:
            reply = self.member.answer(self.lend([(address, LENT)], witness), timeout)
        except ConnectionError:
            return None
        assert reply.code == 0, reply
        return b"".join(reply.parts)


class Memory:
    """Memory of this process that it may lend, with its witness."""

    def __init__(self, content):
        self.bytes, self.word = ctypes.create_string_buffer(content, LENT), ctypes.c_uint64(VALUE)
        self.address, self.witness = ctypes.addressof(self.bytes), ctypes.addressof(self.word)


class MissingMemory:
    """Memory whose first reader waits until `arrive` or `vanish`."""

    API, REGISTER, COPY = 0xC018AA3F, 0xC020AA00, 0xC028AA03  # ioctls of userfaultfd(2)

    def __init__(self):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.libc = libc
        self.fd = libc.syscall(USERFAULTFD, os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "userfaultfd")
        self.ask(self.API, "QQQ", 0xAA, 0, 0)
        self.address = libc.mmap(None, LENT, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.ask(self.REGISTER, "QQQQ", self.address, LENT, 1, 0)

    def ask(self, request, layout, *values):
        fcntl.ioctl(self.fd, request, bytearray(struct.pack(layout, *values)))

    def wait_for_reader(self):
        ready, _, _ = select.select([self.fd], [], [], 20)
        assert ready, "nobody reads"
        os.read(self.fd, 32)

    def arrive(self, content):
        source = ctypes.create_string_buffer(content, LENT)
        self.ask(self.COPY, "QQQQq", self.address, ctypes.addressof(source), LENT, 0, 0)

    def vanish(self):
        self.libc.munmap(self.address, LENT)
        os.close(self.fd)  # wakes the reader
