"""Unauthenticated peers at a port with TLS: handshakes that cost the server most, and connections that stay in the middle of one. Then a member with too many tunnels."""

import contextlib
import socket
import ssl
import struct

import client
import pytest
import wire
from authority import identity_for_all
from half_open import MOST, half_open, newcomer

TUNNEL = 24
OPEN, SEND, RECEIVE = 0, 1, 3


def hello():
    """Returns the first flight of a client that might be a task."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["starwire/2"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


def connect(target, timeout=5):
    host, port = target.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout, source_address=(target.source, 0))


def test_handshakes_with_a_foreign_certificate(tls_trainer, tmp_path):
    """Each takes an exchange of keys, a signature and a look at the chain, and ends with an alert."""
    context = client.tls_with(identity_for_all(tmp_path / "foreign"))

    def attack(target, pace):
        refused = 0
        for _ in pace(100, least=60):
            with connect(target) as plain, context.wrap_socket(plain) as peer:
                # The client's handshake ends before the server has judged the certificate.
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    assert peer.recv(1) == b"", "the server sent something"
                    raise ConnectionResetError
                refused += 1
        return refused

    assert tls_trainer.under(attack).result >= 60


@pytest.mark.parametrize("protocols", [("starwire/2",), ()], ids=["task", "HTTP"])
def test_sessions_are_not_resumed(tls_trainer, protocols):
    """Each connection proves itself anew: there is nothing to resume, so nothing to steal, and no early data to replay."""
    target = tls_trainer.target()
    context, session = target.tls(protocols), None
    for _ in range(3):
        with connect(target) as plain, context.wrap_socket(plain, session=session) as peer:
            if protocols:
                peer.sendall(wire.block(wire.hello(protocol=target.protocol)))
            else:
                peer.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert peer.recv(65536), "a ticket would have come before the answer"
            assert peer.version() == "TLSv1.3" and not peer.session_reused
            session = peer.session
            assert not session.has_ticket


@pytest.mark.quick(
    lambda of: of["share"] == 1.0,
    reason="after a whole hello, the server has done its part of the handshake as well, and waits for the same client",
)
@pytest.mark.parametrize("share", [0.3, 1.0], ids=["part of a hello", "a hello"])
def test_many_connections_in_the_middle_of_handshakes(tls_trainer, share):
    whole = hello()

    def begin(target):
        raw = connect(target, timeout=2)
        raw.sendall(whole[: int(len(whole) * share)])
        return raw

    # The first time, the allocator keeps 6 KiB for each of almost 5,000 at once; a second time nothing more.
    kept = 24 << 20
    outcome = tls_trainer.under(half_open(200, begin), seconds=6.0, share=0.5, meanwhile=lambda: newcomer(tls_trainer, 2), log_lines=230, kept=kept)
    assert outcome.result >= MOST


def test_records_that_are_not_the_members(tls_trainer):
    """A connection of a member whose next record somebody else has made ends at once."""

    def attack(target, pace):
        ended = 0
        for round_ in pace(50, least=30):
            member = client.Member(target)
            with socket.socket(fileno=member.socket.detach()) as below:
                below.settimeout(30)
                below.sendall(b"\x17\x03\x03" + struct.pack(">H", 64) + bytes([round_ % 256]) * 64)
                with contextlib.suppress(ConnectionError):
                    while below.recv(65536):
                        pass
                ended += 1
        return ended

    assert tls_trainer.under(attack).result >= 30


@pytest.mark.parametrize("proof", ["secret", "tls"])
def test_a_member_with_too_many_tunnels(request, proof):
    """They are connections to TensorFlow's gRPC server: a member has 64 at most, and what it does not read stays there."""

    def attack(target, pace):
        opened, refused = 0, 0
        with client.Member(target) as member:
            preface = client.Http2.PREFACE + client.Http2.frame(client.Http2.SETTINGS)
            for round_ in pace(60, least=20):
                idents = []
                for i in range(8):
                    stream = struct.pack("<Q", round_ * 8 + i)
                    idents.append(member.start(TUNNEL, stream + bytes([OPEN])))
                    member.start(TUNNEL, stream + bytes([SEND]) + preface)
                    member.start(TUNNEL, stream + bytes([RECEIVE]))
                replies = [member.answer(ident) for ident in idents]
                opened += sum(reply.code == 0 for reply in replies)
                refused += sum(reply.code != 0 for reply in replies)
        return opened, refused

    arena = request.getfixturevalue("trainer" if proof == "secret" else "tls_trainer")
    opened, refused = arena.under(attack).result
    assert opened == 64 and refused >= 96, (opened, refused)
