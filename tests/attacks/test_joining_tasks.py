"""Tasks that join (STARWIRE_JOIN) and lie about their name, their address or themselves; and many that come and go."""

import contextlib
import hashlib
import os
import shutil
import socket
import struct
import time

import arena as arenas
import client
import cluster as harness
import joining
import protobuf
import pytest
import scarcity
import steps
import wire
from authority import Authority
from conftest import lend
from joining import HONEST, LEAVE, LIARS, PS, Door, Joiner, join, name, refusal
from name_server import NameServer
from waiting import wait_until

NEEDS = pytest.mark.skipif(not shutil.which("openssl"), reason="needs the openssl command")
WAYS = ["nothing", "secret", pytest.param("TLS", marks=NEEDS)]
FAILED_PRECONDITION, UNAUTHENTICATED = 9, 16
REFUSALS = (FAILED_PRECONDITION, UNAUTHENTICATED)
TOGETHER = 256 << 20
assert arenas.ENVIRONMENT["STARWIRE_STAR_MAX_TOTAL_BYTES"] == "256M"


@pytest.fixture(scope="module")
def kind(request):
    """The tests of one kind of job run one after the other."""
    return request.param


@pytest.fixture(scope="module")
def made(runner, tmp_path_factory):
    """Creates the arena of a kind, in place of the last one if that was of another kind, or if a test has failed."""
    current = []

    def make(kind):
        if current and (current[0].kind != kind or current[0].spoilt or not current[0].usable()):
            last = current.pop()
            last.cluster.close() if last.spoilt or not last.usable() else last.close()
        if not current:
            protocol = "star_server" if kind == "star_server" else "grpc++"
            way, members = kind if kind in ("secret", "TLS") else "nothing", 700 if kind == "crowd" else joining.LIST
            folder = tmp_path_factory.mktemp(f"joining-{kind}")
            current.append(joining.Arena(runner, protocol, folder, way, members))
            current[0].kind, current[0].spoilt = kind, False
        return current[0]

    yield make
    for last in current:
        last.close()


@pytest.fixture
def arena(request, made, kind):
    """Over grpc++, whose servers connect to tasks that have joined, unless the kind says otherwise."""
    yield from lend(request, made(kind))


def of_kind(*kinds, deep=()):
    """`deep`: more of them where the pace is measured. The code for joining depends on TLS, a secret and the protocol
    only where a name is proven, a handshake is checked or a step is run, and the others come by all of that."""
    kinds = [*kinds, *deep] if arenas.MEASURES else kinds
    return pytest.mark.parametrize("kind", kinds, indirect=True, scope="module")


plain, secret, tls = WAYS


def count():
    """A number that the attacker's process shares."""
    return arenas.fork.Value("q", 0)


def add(counter, number=1):
    with counter.get_lock():
        counter.value += number


# Names. ---------------------------------------------------------------------------------------------------------------

BAD_NAMES = {
    "just past the end": name(joining.LIST),
    "far past the end": name(65535),
    "as many as fit into 32 bits": name(2**32 + 4),
    "as many as fit into 64 bits": name(2**64 + 4),
    "a negative number": name(-1),
    "minus nothing": name("-0"),
    "a sign": name("+4"),
    "a leading zero": name("04"),
    "a space in front": name(" 4"),
    "a space behind": name("4 "),
    "an exponent": name("4e0"),
    "a fraction": name("4.0"),
    "a hexadecimal number": name("0x4"),
    "digits of another script": name("\u0664"),
    "wide digits": name("\uff14"),
    "no number": name(""),
    "a device": f"{name(4)}/device:CPU:0",
    "another replica": "/job:worker/replica:1/task:4",
    "no replica": "/job:worker/task:4",
    "two names": f"{name(4)},{name(5)}",
    "a name in a name": f"/job:worker{name(4)}",
    "another job": name(4, "evaluator"),
    "the other job of the cluster": name(1, "ps"),
    "a job in capitals": name(4, "WORKER"),
    "the beginning of a job": name(4, "work"),
    "a job of no name": name(4, ""),
    "short": "worker:4",
    "nothing": "",
    "a zero byte behind": f"{name(4)}\0",
    "a line break": f"{name(4)}\n",
    "a format": "/job:%s%n{}/replica:0/task:4",
    "markup": '<img src=x>"\\',
    "not UTF-8": b"/job:\xff\xfe/replica:0/task:4",
    "as long as may be": "/job:" + "w" * 507,
    "too long": "/job:" + "w" * 508,
}


@of_kind(tls, deep=[plain, secret])
def test_names_that_may_not_join(arena):
    def attack(target, pace):
        seen, own = {}, arena.member(target, 4)
        if arena.way == "TLS":
            # A certificate for more than the list has.
            more = [("worker", joining.LIST), ("worker", 65535), ("worker", 4), ("evaluator", 4), ("ps", 1)]
            own = own._replace(certificates=arena.issue(f"more-{os.getpid()}", *more))
        for _ in pace(20, least=1):
            for what, task in BAD_NAMES.items():
                seen.setdefault(what, set()).add(refusal(own, task))
            with join(own, name(4)):
                add(good)
        return seen

    good = count()
    outcome, joined = arena.attacked(attack)
    assert joined == good.value > 0, "the same client, with a name on the list"
    assert set(outcome.result) == set(BAD_NAMES)
    accepted = [what for what, answers in outcome.result.items() if None in answers]
    assert not accepted, accepted
    for what in ("just past the end", "far past the end", "another job", "the other job of the cluster"):
        for code, reason in outcome.result[what]:
            assert code == FAILED_PRECONDITION and "cannot join: it is not in the ClusterSpec" in reason, (code, reason)
    assert outcome.extra_memory < 16 << 20, outcome.line()


@of_kind(secret, deep=[plain, tls])
def test_names_of_tasks_that_are_there(arena):
    """A name that has joined is refused, with any other address or process. Over nothing and with a secret, everyone
    may call itself like a task of the ClusterSpec, to no effect on where that is reached."""
    number = HONEST[0]
    spec = arena.cluster.spec["worker"][1]

    def attack(target, pace):
        seen, steps_ended = {}, 0
        own, of_spec = arena.member(target, number), arena.member(target, 1)
        with Door(own, name(number)) as door, Door(of_spec, name(1)) as other, Door(of_spec, PS) as third:
            for _ in pace(20, least=10):
                for address in (door.address, honest_address, spec, "127.0.0.1:1"):
                    seen.setdefault("joined", set()).add(refusal(own, name(number), address))
                for task, address in ((name(1), other.address), (PS, third.address)):
                    if arena.way == "TLS":
                        seen.setdefault("others", set()).add(refusal(own, task, address))
                        continue
                    with Joiner(own, task, address) as liar:
                        handle = liar.fetching(name(1))
                        # It waits for a tensor of the right task, which never makes it.
                        assert liar.fetch(handle, timeout=0.2).code != 0
                        liar.forget(handle)
                        steps_ended += 1
            return seen, steps_ended, len(door.open + other.open + third.open)

    with arena.beside(number) as honest_address:
        wait_until(lambda: arena.counted()[0] == arena.counted()[1] + 1, 30, "the honest one has joined")
        joined = arena.counted()[0]
        outcome = arena.under(attack, share=0.5, seconds=2.0)
        assert arena.counted()[0] == joined
    arena.honest(number)
    seen, steps_ended, connections = outcome.result
    assert connections == 0, "the server went to an address of the liar"
    for answer in seen["joined"]:
        assert answer, "it has taken the name"
        assert answer[0] == FAILED_PRECONDITION and "has joined and is still connected" in answer[1], answer
    if arena.way == "TLS":
        assert all(a and a[0] == UNAUTHENTICATED and "does not speak for" in a[1] for a in seen["others"]), seen
    else:
        assert steps_ended >= 20


@of_kind(plain, deep=[tls])
def test_one_name_for_many_at_once(arena):
    """Of eight processes that say the same name at the same moment, one joins."""
    each = 8

    def attack(target, pace):
        winners, reasons = [], set()
        for round_ in pace(20, least=20):
            number = LIARS[round_ % len(LIARS)]
            own = arena.member(target, number)
            with contextlib.ExitStack() as stack:
                peers = [stack.enter_context(client.RawConnection(own)) for _ in range(each)]
                for peer in peers:
                    if own.secret:
                        challenges = peer.challenge()
                        sides = (b"client", b"server")
                        peer.key, peer.their_key = (client.key(own.secret, side, *challenges) for side in sides)
                features = client.DIGESTS if own.secret else 0
                blocks = []
                for n, peer in enumerate(peers):
                    said = joining.hello(own.protocol, name(number), f"127.0.0.1:{n + 1}", None, features)
                    blocks.append(wire.block(said, peer.sequence, key=peer.key))
                for peer, block in zip(peers, blocks):
                    peer.send(block)
                answers = [peer.first_frame() for peer in peers]
            welcome = sum(kind == wire.WELCOME for kind, *_ in answers)
            winners.append(welcome)
            add(joins, welcome)
            reasons |= {(code, meta.decode()) for kind, code, _, meta in answers if kind == wire.REFUSE}
        return winners, reasons

    joins = count()
    outcome, joined = arena.attacked(attack, log_lines=2 * len(LIARS) + 30)
    winners, reasons = outcome.result
    assert set(winners) == {1}, winners
    assert joined == joins.value >= 20, (joined, joins.value)
    assert reasons and all(code == FAILED_PRECONDITION and "still connected" in why for code, why in reasons), reasons


# Addresses. -----------------------------------------------------------------------------------------------------------

BAD_ADDRESSES = {
    "none": None,
    "an empty one": "",
    "no host": ":2222",
    "no port": "127.0.0.1",
    "an empty port": "127.0.0.1:",
    "port 0": "127.0.0.1:0",
    "port 00000": "127.0.0.1:00000",
    "port 65536": "127.0.0.1:65536",
    "a negative port": "127.0.0.1:-1",
    "a port with a sign": "127.0.0.1:+1",
    "two ports": "127.0.0.1:1:2",
    "every address": "0.0.0.0:2222",
    "every address of IPv6": "[::]:2222",
    "a short address": "127.1:2222",
    "a large number": "2130706433:2222",
    "five numbers": "127.0.0.0.1:2222",
    "an open bracket": "[::1:2222",
    "a zone that is too long": "[fe80::1%aaaaaaaaaaaaaaaaaaaaaaaa]:2222",
    "a unix socket": "unix:/tmp/x",
    "an abstract socket": "unix-abstract:x",
    "a scheme": "grpc://127.0.0.1:2222",
    "a path": "127.0.0.1:2222/x",
    "a user": "x@127.0.0.1:2222",
    "a space": "127.0.0.1 :2222",
    "a line break": "127.0.0.1:2222\n",
    "a zero byte": "127.0.0.1\0.example:2222",
    "a command": "$(id):2222",
    "a format": "%s%n{}:2222",
    "another script": "\u0661\u0662\u0667.0.0.1:2222",
    "not UTF-8": b"\xff\xfe:2222",
    "empty labels": "a..b:2222",
    "a label that is too long": "a" * 64 + ":2222",
    "as long as a field may be": "a." * 253 + "a:2222",
    "one byte longer": "a." * 253 + "aa:22222",
    "as long as the length may say": b"a" * 65535,
}


@of_kind(secret, deep=[plain])
def test_addresses_that_are_none(arena):
    def attack(target, pace):
        seen, own = {}, arena.member(target, 4)
        for _ in pace(20, least=1):
            for what, address in BAD_ADDRESSES.items():
                seen.setdefault(what, set()).add(refusal(own, name(4), address))
            # Ten megabytes, announced and sent.
            with contextlib.suppress(OSError), client.RawConnection(own) as raw:
                if own.secret:
                    raw.challenge()
                field = struct.pack("<HH", joining.ADDRESS, 65535) + b"a" * (10 << 20)
                raw.send(wire.MAGIC + struct.pack("<BBHIIQQ", 3, 0, 0, len(field), 0, 0, raw.sequence) + field)
            with join(own, name(4), "127.0.0.1:1"):
                add(good)
        return seen

    good = count()
    outcome, joined = arena.attacked(attack)
    assert joined == good.value > 0, "the same client, with an address"
    assert set(outcome.result) == set(BAD_ADDRESSES)
    accepted = [what for what, answers in outcome.result.items() if None in answers]
    assert not accepted, accepted
    for what in ("none", "port 0", "every address", "no port"):
        for code, reason in outcome.result[what]:
            assert code == FAILED_PRECONDITION and "cannot join" in reason, (what, code, reason)
    assert outcome.extra_memory < 16 << 20, outcome.line()


READ = ("silent", "a web server", "garbage")


@of_kind(secret, deep=[tls])
def test_addresses_of_others(arena):
    """The server goes to each address, and asks for a tensor only where a task with the joiner's name answers."""

    def attack(target, pace):
        answers, heard, read = {}, {}, {}
        own = arena.member(target, 4)
        with contextlib.ExitStack() as stack:
            door = lambda *a, **b: stack.enter_context(Door(*a, **b))  # noqa: E731
            doors = {
                "silent": door(own), "a web server": door(own, says=b"HTTP/1.1 400 Bad Request\r\n\r\n"),
                "garbage": door(own, says=bytes(range(256)) * 16), "of another name": door(own, name(19)),
                "of no name": door(own, ""), "of the server's name": door(own, PS), "right": door(own, name(4)),
            }  # fmt: skip
            if own.secret:
                doors["without the secret"] = door(own._replace(secret=""), name(4))
                doors["with another secret"] = door(own._replace(secret="another one, also long enough"), name(4))
            if own.certificates:
                doors["without TLS"] = door(own._replace(certificates={}), name(4))
                doors["with the certificate of another"] = door(arena.member(target, 5), name(4))
                doors["with a certificate of another authority"] = door(own._replace(certificates=foreign), name(4))
            places = {
                **{what: one.address for what, one in doors.items()}, "another joiner": other,
                "a task of the ClusterSpec": arena.cluster.spec["worker"][0], "the server": arena.address,
                "a closed port": "127.0.0.1:1", "nobody": "192.0.2.1:1",
            }  # fmt: skip
            for round_ in pace(20, least=1):
                if round_:
                    continue
                for what, address in places.items():
                    with join(own, name(4), address) as joiner:
                        add(joins)
                        reply = joiner.fetch(joiner.fetching(name(4)), timeout=60 if what in answering else 1.5)
                        answers[what] = reply.code, reply.text
                        if what in READ:
                            wait_until(lambda what=what: doors[what].read, 60, f"the server says something to {what}")
            for what, one in doors.items():
                heard[what], read[what] = one.heard, one.read
        return answers, heard, read

    answering = {"right", "another joiner", "a task of the ClusterSpec", "the server", "of another name", "of no name"}
    joins, foreign = count(), {}
    if arena.way == "TLS":
        foreign = Authority(arena.directory / f"foreign-{arena.honest_runs}").issue("w", "URI:" + joining.URI)
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(arena.beside(HONEST[0]))
        wait_until(lambda: arena.counted()[0] == arena.counted()[1] + 1, 30, "the honest one has joined")
        before = arena.counted()[0]
        # The tasks that are visited log it, too.
        outcome = arena.under(attack, share=0.5, seconds=3.0, log_lines=60)
        wait_until(lambda: arena.counted()[0] == arena.counted()[1] + 1, 30, "the liar has left")
        assert arena.counted()[0] - before == joins.value
    arena.honest()
    answers, heard, read = outcome.result
    assert answers["right"][0] == 0, f"a door at which the right task answers: {answers} {heard} {read}"
    answers.pop("right")
    assert wire.RECV in heard.pop("right")
    assert all(code != 0 for code, _ in answers.values()), answers
    asked = [what for what, kinds in heard.items() if wire.RECV in kinds or wire.CALL in kinds]
    assert not asked, asked
    for what in answering - {"right"}:
        code, reason = answers[what]
        assert code in REFUSALS and name(4) in reason, (what, code, reason)
    assert "but found " + name(19) in answers["of another name"][1], answers["of another name"]
    for what in READ:
        assert 0 < read[what] < 4096, f"{what}: {read[what]} bytes were said to it"
    assert wire.HELLO not in heard.get("without the secret", ()), "the server has said who it is"
    for what in ("without TLS", "with the certificate of another", "with a certificate of another authority"):
        assert not heard.get(what), f"{what}: the server has said something"


# Proofs. --------------------------------------------------------------------------------------------------------------


class Recorded(client.RawConnection):
    """Keeps what it sends."""

    def __init__(self, target):
        self.sent = []
        super().__init__(target)

    def send(self, data):
        self.sent.append(data)
        super().send(data)


def says_hello(peer, key=True, task=name(4)):
    """A challenge, and a hello with the right code or, if `key` is a function of both challenges, with a key of it."""
    challenges = peer.challenge()
    client_key, peer.their_key = (client.key(peer.target.secret, side, *challenges) for side in (b"client", b"server"))
    peer.key = client_key if key is True else key(*challenges)
    peer.send_block(joining.hello(peer.target.protocol, task, "127.0.0.1:1", None, client.DIGESTS))
    peer.their_key = peer.their_key if key is True else None
    return peer.first_frame()


def replay(target, blocks):
    """Sends the blocks; returns the server's answer to them."""
    with client.RawConnection(target, timeout=60) as peer:
        for block in blocks:
            peer.send(block)
        while (answer := peer.first_frame())[0] == wire.CHALLENGE:
            pass
        return answer


def forge(target, key):
    with client.RawConnection(target, timeout=60) as peer:
        return says_hello(peer, key)


def verdict(function, *arguments):
    """Returns what a peer is answered, if only by a closed connection."""
    try:
        kind, code, _, meta = function(*arguments)
        return "accepted" if kind == wire.WELCOME else f"{code} {meta.decode()}"
    except TimeoutError:
        return "silence"
    except ConnectionError:
        return "closed"


@of_kind("secret")
def test_handshakes_that_are_replayed(arena):
    """Nobody joins by a recorded handshake, nor with codes that are made without the secret."""
    keys = {
        "no code": lambda ours, theirs: None, "the server's challenge": lambda ours, theirs: theirs,
        "zeros": lambda ours, theirs: bytes(32), "no secret": lambda *both: client.key("", b"client", *both),
        "the other direction": lambda *both: client.key(arena.secret, b"server", *both),
        "challenges exchanged": lambda ours, theirs: client.key(arena.secret, b"client", theirs, ours),
    }  # fmt: skip

    def attack(target, pace):
        seen = {}
        for _ in pace(20, least=20):
            with Recorded(target) as peer:
                assert says_hello(peer)[0] == wire.WELCOME
                add(good)
            for what, blocks in (("whole", peer.sent), ("hello", peer.sent[1:]), ("backwards", peer.sent[::-1])):
                seen.setdefault(what, set()).add(verdict(replay, target, blocks))
            for what, key in keys.items():
                seen.setdefault(what, set()).add(verdict(forge, target, key))
            for what, secret in (("another secret", "another one, also long enough"), ("none", "")):
                answer = refusal(target._replace(secret=secret), name(4))
                seen.setdefault(what, set()).add("accepted" if answer is None else str(answer))
        return seen

    good = count()
    outcome, joined = arena.attacked(attack)
    assert joined == good.value >= 20, "the same client, with the secret"
    assert len(outcome.result) == 5 + len(keys)
    assert not [what for what, verdicts in outcome.result.items() if "accepted" in verdicts], outcome.result
    assert any("STARWIRE_SECRET" in verdict for verdict in outcome.result["whole"]), outcome.result["whole"]


@of_kind(tls)
def test_certificates_that_are_not_the_joiners(arena):
    def attack(target, pace):
        seen = {}
        for _ in pace(20, least=5):
            for what, certificates in cases.items():
                seen.setdefault(what, set()).add(refusal(target._replace(certificates=certificates), name(4)))
            with join(arena.member(target, 4), name(4)):
                add(good)
        return seen

    folder, of = arena.directory, arena.identities
    uri = joining.URI.format(job="worker", task=4)
    issue = lambda file, *names: arena.authority.issue(f"{file}-{arena.honest_runs}", *names)  # noqa: E731
    cases = {
        "another joiner's": of["worker", 5], "that of a task of the ClusterSpec": of["worker", 0],
        "the server's": of["ps", 0], "one for the host": issue("host", "IP:127.0.0.1", "DNS:localhost"),
        "one for the pattern": issue("pattern", f"URI:{joining.URI}"),
        "one for the beginning": issue("short", f"URI:{uri[:-1]}"),
        "one for more": issue("long", f"URI:{uri}0", f"URI:{uri}/"),
        "one of another authority": Authority(folder / f"other-{arena.honest_runs}").issue("w", f"URI:{uri}"),
    }  # fmt: skip
    good = count()
    outcome, joined = arena.attacked(attack)
    assert joined == good.value >= 5, "the same client, with its own certificate"
    assert set(outcome.result) == set(cases)
    for answer in outcome.result.pop("one of another authority"):
        assert answer and answer[0] == "closed", answer
    for what, answers in outcome.result.items():
        for answer in answers:
            assert answer and answer[0] == UNAUTHENTICATED and "does not speak for" in answer[1], (what, answer)


@of_kind(tls, deep=[plain, secret])
def test_half_a_handshake_takes_no_name(arena):
    """Connections that stop in the middle of saying a name keep nobody from joining with it."""
    number = HONEST[1]

    def attack(target, pace):
        held, own = [], arena.member(target, number)
        for round_ in pace(200, least=60):
            if round_ >= 60:
                continue
            peer = client.RawConnection(own)
            key, features = None, 0
            if own.secret:
                features, key = client.DIGESTS, client.key(own.secret, b"client", *peer.challenge())
            said = joining.hello(own.protocol, name(number), "127.0.0.1:1", None, features)
            block = wire.block(said, peer.sequence, key=key)
            peer.send(block[: (0, 8, 32, len(block) // 2, len(block) - 1)[round_ % 5]])
            held.append(peer)
            add(begun)
        return len(held)

    def meanwhile():
        wait_until(lambda: begun.value >= 60, 30, "the attack")
        arena.honest(number)

    begun = count()
    outcome, joined = arena.attacked(attack, meanwhile=meanwhile)
    assert outcome.result >= 60 and joined == 0


# Coming and going. ----------------------------------------------------------------------------------------------------


def crowd(arena, joins, least):
    def attack(target, pace):
        waited = 0.0
        for round_ in pace(2000, least=least):
            number = LIARS[round_ % len(LIARS)]
            begun = time.monotonic()
            joiner = join(arena.member(target, number), name(number), f"127.0.{round_ % 256}.1:{1 + round_ % 60000}")
            waited = max(waited, time.monotonic() - begun)
            add(joins)
            joiner.leave(LEAVE[round_ // len(LIARS) % len(LEAVE)])
        return waited

    return attack


@of_kind("star_server", deep=[plain])
def test_thousands_that_join_and_leave(arena):
    """Each is counted once as joined and once as left, however it leaves, and nothing of it stays."""
    joins, least = count(), 300 if arena.way == "TLS" else 3000
    # Each name is logged once when it joins and once when it leaves, and one host's garbage once.
    outcome, joined = arena.attacked(crowd(arena, joins, least), seconds=4.0, share=0.8, log_lines=2 * len(LIARS) + 30)
    assert joined == joins.value >= least, (joined, joins.value)
    assert outcome.result < 10, f"a name was free only after {outcome.result:.1f} s"
    assert outcome.peak_threads < outcome.base_threads + 40, outcome.line()
    assert outcome.extra_memory < 64 << 20, outcome.line()


@of_kind(plain, deep=[tls])
def test_joiners_that_leave_in_the_middle_of_a_step(arena):
    """The server waits for a tensor of a task that leaves: the step ends, and so does everything that it had."""

    def attack(target, pace):
        ended = {}
        for round_ in pace(10, least=30):
            number, how = LIARS[round_ % len(LIARS)], ("at once", "its port first", "its connection first")[round_ % 3]
            own = arena.member(target, number)
            with Door(own, name(number), answers=False) as door, join(own, name(number), door.address) as joiner:
                add(joins)
                ident, _ = joiner.begin(joiner.fetching(name(number)))
                assert door.asked.wait(20), "the server does not ask"
                if how == "its port first":
                    door.close()
                    reply = joiner.answer(ident)
                    assert reply.code != 0, reply
                elif how == "its connection first":
                    joiner.leave("reset")
                ended[how] = ended.get(how, 0) + 1
        return ended

    joins = count()
    outcome, joined = arena.attacked(attack, seconds=3.0, log_lines=4 * len(LIARS) + 100)
    assert joined == joins.value >= 30
    assert len(outcome.result) == 3 and sum(outcome.result.values()) >= 30, outcome.result
    assert outcome.peak_threads < outcome.base_threads + 40, outcome.line()


@of_kind("nothing")
def test_connections_to_tasks_that_have_left(arena):
    """A task leaves and keeps open what the server has opened to it: the server closes that as well."""

    def attack(target, pace):
        doors = []
        for round_ in pace(20, least=len(LIARS)):
            if round_ >= len(LIARS):
                continue
            number = LIARS[round_]
            door = Door(target, name(number))
            with join(target, name(number), door.address) as joiner:
                add(joins)
                reply = joiner.fetch(joiner.fetching(name(number)))
                assert reply.code == 0 and len(door.open) == 1, reply
            doors.append(door)
        deadline = time.monotonic() + 60
        while (ended := sum(door.ended for door in doors)) < len(doors) and time.monotonic() < deadline:
            time.sleep(0.1)
        return len(doors), ended

    joins = count()
    outcome, _ = arena.attacked(attack, log_lines=3 * len(LIARS) + 30)
    opened, ended = outcome.result
    assert opened == len(LIARS)
    assert ended == opened, f"{opened - ended} of {opened} connections to tasks that have left are open"


@of_kind("nothing")
def test_connections_that_are_made_too_late(arena):
    """The server is still connecting to a task when that joins again from elsewhere: what it had begun does not stay,
    even if the handshake ends well after all."""
    rounds, names = 60, LIARS[:4]

    def attack(target, pace):
        doors = []
        for round_ in pace(20, least=rounds):
            if round_ >= rounds:
                continue
            number = names[round_ % len(names)]
            door = Door(target, name(number), holds=True)
            with join(target, name(number), door.address) as joiner:
                add(joins)
                deadline = time.monotonic() + 20
                while not door.open and time.monotonic() < deadline:  # until the server connects to it
                    assert joiner.fetch(joiner.fetching(name(number)), timeout=0.1).code != 0
            doors.append(door)
            if round_ >= len(names):
                doors[round_ - len(names)].go.set()
        opened = sum(len(door.open) for door in doors)
        deadline = time.monotonic() + 60
        while opened - (ended := sum(door.ended for door in doors)) > len(names) and time.monotonic() < deadline:
            time.sleep(0.1)
        return opened, ended

    joins, base = count(), arena.server.descriptors()
    outcome, _ = arena.attacked(attack, log_lines=4 * rounds + 60)
    opened, ended = outcome.result
    # A handshake that ends well before the server has noticed the new address is tried again.
    assert opened >= rounds
    assert opened - ended <= len(names), f"{opened - ended} of {opened} connections are still open"
    assert outcome.peak_descriptors < base + 40, f"{outcome.peak_descriptors} descriptors, {base} before"


@of_kind("nothing")
def test_a_connection_that_outlives_its_task(arena):
    """A liar was at the address of an honest worker before that one was started, and keeps the server's connection: the
    server asks the honest one, not the liar, for the honest one's tensors."""
    number, port = HONEST[2], harness.free_port()

    def attack(target, pace):
        with Door(target, name(number), port=port) as door:
            with join(target, name(number), door.address) as joiner:
                add(joins)
                reply = joiner.fetch(joiner.fetching(name(number)))
                assert reply.code == 0, reply
            door.stop_listening()
            before = len(door.heard)
            add(left)
            for _ in pace(20, least=1):
                pass
            return door.heard[before:]

    def meanwhile():
        wait_until(lambda: left.value, 30, "the attack")
        wait_until(lambda: len(set(arena.counted())) == 1, 30, "the liar has left")
        arena.honest(number, port)

    joins, left = count(), count()
    outcome, joined = arena.attacked(attack, meanwhile=meanwhile)
    assert joined == joins.value
    asked = [kind for kind in outcome.result if kind not in (wire.PING, wire.PONG, wire.GOODBYE)]
    assert not asked, f"the liar was asked {len(asked)} times"


@of_kind("nothing")
def test_graphs_of_those_that_have_left(arena):
    """Each joiner registers a graph and leaves. The graphs go when the name is taken again, and the log stays short."""

    def attack(target, pace):
        for round_ in pace(100, least=200):
            number = LIARS[round_ % len(LIARS)]
            with join(target, name(number)) as joiner:
                add(joins)
                joiner.fetching(name(number))

    joins = count()
    outcome, joined = arena.attacked(attack, seconds=3.0, log_lines=3 * len(LIARS) + 30)
    assert joined == joins.value >= 200
    assert outcome.extra_memory < 64 << 20, outcome.line()


def leaving_replies(device):
    """A plan with an effect, whose reply has as many numbers as its first feed says."""
    node, kind, number = protobuf.node, protobuf.of_type, protobuf.of_int
    shape, shared = protobuf.message(7, b""), protobuf.message(2, "left-behind")
    return protobuf.graph(
        node("count", "_Arg", device, T=kind(protobuf.INT32), index=number(0)),
        node("in", "_Arg", device, T=kind(protobuf.FLOAT), index=number(1)),
        node("made", "Fill", device, ["count", "in"], T=kind(protobuf.FLOAT), index_type=kind(protobuf.INT32)),
        node("v", "VarHandleOp", device, dtype=kind(protobuf.FLOAT), shape=shape, shared_name=shared),
        node("set", "AssignVariableOp", device, ["v", "in"], dtype=kind(protobuf.FLOAT)),
        node("out", "_Retval", device, ["made"], T=kind(protobuf.FLOAT), index=number(0)),
    )  # fmt: skip


@of_kind("star_server")
def test_replies_that_are_left_behind(arena):
    """Joiners make calls that might come again, and leave: what the server keeps of the replies of all of them together
    stays within the limit of all workers."""
    each, numbers, most = 1000, 4000, 27

    def attack(target, pace):
        kept = 0
        for round_ in pace(50, least=most):
            if round_ >= most:
                continue
            number = LIARS[round_ % len(LIARS)]
            with join(target, name(number)) as joiner:
                add(joins)
                plan = leaving_replies(next(iter(joiner.devices())))
                assert joiner.register(plan).code == 0
                feeds = [
                    client.entry(protobuf.INT32, 1, (1,), struct.pack("<i", numbers)),
                    client.entry(protobuf.FLOAT, 1, (), bytes(4)),
                ]
                digest, parts = hashlib.sha256(plan).digest(), client.parts_of(feeds)
                for begin in range(0, each, 100):
                    idents, control = [], b""
                    for lane in range(begin, begin + 100):
                        head = client.star_head(digest, step=lane + 1, turn=(lane, 0, lane + 1))
                        idents.append(joiner.new_id())
                        control += client.call(idents[-1], client.STAR_CALL, head + client.table(feeds), parts)[0]
                    joiner.send_block(control)
                    for ident in idents:
                        reply = joiner.answer(ident)
                        if reply.code == 0 and not client.registers(reply):
                            assert sum(map(len, reply.parts)) >= 4 * numbers, reply
                            kept += 4 * numbers
        return kept

    joins = count()
    outcome, joined = arena.attacked(attack, seconds=2.0, share=1.0, log_lines=2 * len(LIARS) + 30, kept=TOGETHER)
    assert joined == joins.value >= most
    assert outcome.result > 1.5 * TOGETHER, "replies of the size that is kept"
    assert outcome.extra_memory < TOGETHER + (64 << 20), f"of {outcome.result >> 20} MiB: {outcome.line()}"


@of_kind("crowd")
def test_a_crowd_and_the_log(arena):
    """Many names join and leave, each of which is logged: what others do is still logged."""

    def attack(target, pace):
        for round_ in pace(1000, least=600):
            with join(target, name(joining.IN_SPEC + round_ % 600)):
                add(joins)

    def disturb(source):
        """Whether the log has a line about a client that is none."""
        port = int(arena.address.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), 60, source_address=(source, 0)) as raw:
            raw.sendall(wire.block(wire.frame(wire.REPLY)))
            raw.recv(65536)
        deadline = time.monotonic() + 60
        while source not in arena.ps.full_log() and time.monotonic() < deadline:
            time.sleep(0.05)
        return source in arena.ps.full_log()

    assert disturb("127.9.9.8")
    joins = count()
    outcome, joined = arena.attacked(attack, seconds=2.0, share=0.8, log_lines=1300)
    assert joined == joins.value >= 600
    assert disturb("127.9.9.9"), "nothing is logged about another client"


# Names of hosts. ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, for port 53 and to mount")
def test_hosts_that_nobody_can_look_up(runner):
    """Joiners give a new name of a host each time, and the name server is silent: the server has no more threads that
    wait for it than 32."""
    rounds = 8
    with NameServer() as names, harness.Cluster(
        runner, "grpc++", {"ps": 1, "worker": 1}, environment=joining.join_list(joining.LIST), start=False
    ) as cluster:
        names.silent = True
        ps = cluster.process("ps", 0)
        lines = f"nameserver {names.ip}\noptions timeout:5 attempts:1\n"
        ps.call(scarcity.mount_file, "/etc/resolv.conf", lines, str(ps.directory))
        ps.call(harness.start_server, cluster.spec, "ps", 0, "grpc++")
        worker = cluster.start("worker", 0)
        assert worker.call(steps.run_steps, cluster.target("worker", 0), 5) == 5
        address = cluster.spec["ps"][0]
        target = client.Target(address, address, PS, "grpc++", "", "", "127.0.0.1")
        server = arenas.Process(ps.pid)
        waits = lambda: server.threads("starwire-names")  # noqa: E731
        base, most = server.threads(), 0
        for round_ in range(rounds):
            for number in LIARS:
                with join(target, name(number), f"h{round_}-{number}.join.test:1") as joiner:
                    assert joiner.fetch(joiner.fetching(name(number)), timeout=0.03).code != 0
                most = max(most, waits())
        assert names.asked.wait(10), "no host was looked up"
        assert worker.call(steps.run_steps, cluster.target("worker", 0), 20) == 20
        assert 0 < max(most, waits()) <= 32, f"{most} threads look names up"
        wait_until(lambda: server.threads() <= base + 2, 60, "the threads end")
