"""Loans from processes that lie about their memory, or change it: the server reads in the process at the other end, and believes only what that vouches for."""

import contextlib
import os
import re
from pathlib import Path

import pytest
from borrowed_memory import LENT, Borrower, Memory, MissingMemory

OWN, CHANGED = b"a" * LENT, b"b" * LENT


def in_child(function, *arguments):
    """Runs `function` in a separate process, because a process that is caught is not trusted again. Returns its exit status."""
    child = os.fork()
    if child == 0:
        end = 99
        try:
            end = function(*arguments)
        finally:
            os._exit(end)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


DROPPED, BELIEVED = 0, 1


def lie(target, address, witness):
    return DROPPED if Borrower(target).echo(address, witness) is None else BELIEVED


def mappings(directory, pattern):
    return [(int(a, 16), int(b, 16)) for a, b in re.findall(rf"^(\w+)-(\w+) {pattern}", (directory / "maps").read_text(), re.M)]


def test_addresses_of_other_processes(trainer):
    """What an address means in the server itself, or in another worker, does not count."""
    memory = Memory(OWN)
    victims = [trainer.server.directory, Path("/proc") / str(trainer.trainer.pid)]

    def attack(target, pace):
        assert Borrower(target).echo(memory.address, memory.witness) == OWN, "an honest loan is not read"
        own = mappings(Path("/proc/self"), "r")
        writable = [mapping for victim in victims for mapping in mappings(victim, "rw-p 00000000 00:00 0")]
        places = [begin for begin, end in writable if end - begin >= LENT and not any(a < begin + LENT and begin < b for a, b in own)]
        assert places
        return [in_child(lie, target, places[round_ % len(places)], memory.witness) for round_ in pace(10, least=5)]

    ends = trainer.under(attack).result
    assert set(ends) == {DROPPED}, ends


def change(target, how):
    """Changes the memory after the server has begun to read it."""
    memory, missing = Memory(OWN), MissingMemory()
    borrower = Borrower(target)
    ident = borrower.lend([(missing.address, LENT)], memory.witness)
    missing.wait_for_reader()
    if how == "vanishes":
        missing.vanish()
    elif how == "is revoked":
        memory.word.value += 1
    if how != "vanishes":
        missing.arrive(CHANGED)
    with contextlib.suppress(ConnectionError):
        assert b"".join(borrower.member.answer(ident, 20).parts) == CHANGED
        return BELIEVED
    return DROPPED


@pytest.mark.parametrize("how, expected", [("arrives", BELIEVED), ("vanishes", DROPPED), ("is revoked", DROPPED)])
def test_memory_that_changes_while_it_is_read(trainer, how, expected):
    try:
        os.close(MissingMemory().fd)
    except OSError as error:
        pytest.skip(f"no userfaultfd(2) for this user: {error}")

    def attack(target, pace):
        return [in_child(change, target, how) for _ in pace(10, least=5)]

    ends = trainer.under(attack).result
    assert set(ends) == {expected}, ends
