"""Loans over the unix socket at invalid addresses: the liar is dropped, and other peers' loans continue."""

import ctypes
import os
import struct

import client
import wire

LENT = 1 << 18


def lent_call(member, address, witness_address, witness):
    """A call whose payload is announced as a loan at `address` of this process."""
    ident = member.new_id()
    fixed = struct.pack("<IIQ", 0, 1, LENT | client.BULK)
    digest = member.digest(client.LOGGING, [bytes(LENT)])
    control = wire.frame(wire.CALL, code=client.LOGGING, ident=ident, fixed=fixed, meta=digest)
    control += wire.frame(wire.DATA, ident=ident, fixed=struct.pack("<Q", LENT))
    return control + wire.frame(client.LEND, ident=witness, fixed=struct.pack("<QQQQ", witness_address, 1, address, LENT))


def borrows(member, timeout=5):
    """True if the server reports that it can read this process's memory."""
    member.devices()
    return any(kind == client.TAKEN and ident == 0 for kind, ident, _ in member.said)


NOT_BORROWED, DROPPED, BELIEVED = 0, 1, 2


def forge(target, number):
    memory, witness = ctypes.create_string_buffer(LENT), ctypes.c_uint64(4711)
    addresses = [0, 4096, 1 << 46, (1 << 64) - (1 << 20), ctypes.addressof(memory)]
    address = addresses[number % len(addresses)]
    with client.Member(target, unix=True, features=client.LENDING, task="/job:worker/replica:0/task:2") as member:
        if not borrows(member):
            return NOT_BORROWED
        # The last address is readable, but its witness revokes the loan.
        member.send_block(lent_call(member, address, ctypes.addressof(witness), 4711 + (address == addresses[-1])))
        return DROPPED if member.wait_closed() else BELIEVED


def attack(target, pace):
    """Sends each lie from its own process, because a caught peer is not trusted again. Counts the results."""
    ends = [0, 0, 0]
    for round_ in pace(15, least=5):
        child = os.fork()
        if child == 0:
            end = 99
            try:
                end = forge(target, round_)
            finally:
                os._exit(end)
        ends[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])] += 1
    return ends


def test_forged_loans(trainer):
    def lends():
        with client.Member(trainer.target(), unix=True, features=client.LENDING, task="/job:worker/replica:0/task:3") as member:
            return borrows(member)

    assert lends(), "the server does not borrow at all: nothing to test"
    outcome = trainer.under(attack)
    assert outcome.result[DROPPED] >= 1 and outcome.result[BELIEVED] == 0, outcome.result
    assert lends(), "one liar has ended lending for everybody"
