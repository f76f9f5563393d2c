"""Connections with a bad start: damaged hellos, single bytes, silence, resets."""

import contextlib
import random
import socket
import struct

import client
import wire


def damaged(target, pace):
    """A valid hello with a few bytes changed, cut, repeated or shuffled."""
    tried, dice = 0, random.Random(4711)
    for _ in pace(400, least=200):
        with contextlib.suppress(OSError), client.RawConnection(target, timeout=2) as peer:
            good = bytearray(wire.block(peer.hello()))
            kind = dice.randrange(5)
            if kind == 0:
                for _ in range(dice.randrange(1, 8)):
                    good[dice.randrange(len(good))] = dice.randrange(256)
            elif kind == 1:
                del good[dice.randrange(len(good)) :]
            elif kind == 2:
                good *= 2
            elif kind == 3:
                good = bytearray(dice.sample(list(good), len(good)))
            else:
                # Damage the fields of the hello, with a valid checksum.
                section = good[32:]
                for _ in range(dice.randrange(1, 6)):
                    section[dice.randrange(len(section))] = dice.randrange(256)
                good = wire.block(bytes(section))
            peer.send(bytes(good))
            if dice.randrange(3) == 0:
                peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            tried += 1
    return tried


def test_damaged_hellos(trainer):
    outcome = trainer.under(damaged)
    assert outcome.result > 150


def byte_by_byte(target, pace):
    """A hundred connections that each send an occasional byte, or nothing."""
    peers = [client.RawConnection(target) for _ in range(100)]
    whole = wire.block(peers[0].hello())
    sent = [0] * len(peers)
    for round_ in pace(1000, least=1000):
        index = round_ % len(peers)
        if index % 4 and sent[index] < len(whole) - 1:
            with contextlib.suppress(OSError):
                peers[index].send(whole[sent[index] : sent[index] + 1])
                sent[index] += 1
    return sum(sent)


def test_byte_by_byte(trainer):
    outcome = trainer.under(byte_by_byte)
    assert outcome.result > 500
