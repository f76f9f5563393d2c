"""A name server on a loopback address, and processes that ask no other."""

import os
import socket
import struct
import threading

A = 1


class NameServer:
    """Answers with `addresses[name]`; says nothing while `silent`. `garbage`: sent instead of answers."""

    def __init__(self):
        self.ip = f"127.{os.urandom(1)[0] % 200 + 20}.{os.urandom(1)[0]}.{os.urandom(1)[0] % 250 + 1}"
        self.addresses, self.silent, self.garbage = {}, False, None
        self.asked = threading.Event()
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((self.ip, 53))
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self):
        while True:
            query, client = self.socket.recvfrom(4096)
            if not query:
                return
            self.asked.set()
            if not self.silent:
                self.socket.sendto(self.garbage or self.answer(query), client)

    def answer(self, query):
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode())
            at += 1 + query[at]
        question, (kind,) = query[12 : at + 5], struct.unpack(">H", query[at + 1 : at + 3])
        found = self.addresses.get(".".join(labels))
        records = b"".join(b"\xc0\x0c" + struct.pack(">HHIH", A, 1, 0, 4) + socket.inet_aton(each) for each in found or () if kind == A)
        code = 0 if found is not None else 3
        return query[:2] + struct.pack(">HHHHH", 0x8180 | code, 1, len(records) // 16, 0, 0) + question + records

    def close(self):
        self.socket.sendto(b"", (self.ip, 53))
        self.thread.join(5)
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
