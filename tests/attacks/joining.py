"""Tasks that join a job and are in no ClusterSpec but their own: honest ones with TensorFlow, raw ones that lie."""

import contextlib
import os
import re
import socket
import ssl
import struct
import threading
import time
from pathlib import Path

import arena as arenas
import client
import cluster as harness
import impostor
import protobuf
import steps
import training
import wire
from authority import Authority
from own_ports import free_port
from waiting import HANGS, wait_for, wait_until

IN_SPEC = 4  # workers
LIST = 24  # workers on the list of those that may join
HONEST = range(20, LIST)
LIARS = range(IN_SPEC, 20)
URI = "spiffe://example.org/train/{job}/{task}"
LIMITS = struct.pack("<IIQIIQ", 1 << 18, 1 << 14, 256 << 20, 1 << 16, 16 << 20, 64 << 30)
ADDRESS = 12  # field of HELLO
CREATE_WORKER_SESSION, DELETE_WORKER_SESSION, DEREGISTER_GRAPH, RUN_GRAPH, CLEANUP_GRAPH = 2, 3, 5, 6, 7
PS = "/job:ps/replica:0/task:0"


def name(number, job="worker"):
    return f"/job:{job}/replica:0/task:{number}"


# Raw joiners. ---------------------------------------------------------------------------------------------------------


def hello(protocol, task, address=None, incarnation=None, features=0, kind=wire.HELLO):
    def encoded(text):
        return text.encode() if isinstance(text, str) else text

    fields = wire.field(1, protocol.encode()) + wire.field(2, encoded(task))
    fields += wire.field(3, incarnation or os.urandom(8)) + wire.field(9, LIMITS)
    if address is not None:
        fields += wire.field(ADDRESS, encoded(address))
    return wire.frame(kind, ident=features, meta=fields)


class Joiner(client.Member):
    """A connection that joins. Each is a process of its own, unless the incarnation is given."""

    def __init__(self, target, task, address="127.0.0.1:1", incarnation=None, timeout=30):
        # A server compares the process that answers at the address with the one that joined.
        self.address, self.incarnation = address, incarnation or Door.incarnations.get(address) or os.urandom(8)
        super().__init__(target, task, timeout)

    def hello(self, task, features=0):
        features |= client.DIGESTS if self.target.secret else 0
        return hello(self.target.protocol, task, self.address, self.incarnation, features)

    def authentic(self, head, control):
        """A refusal may have no code: that of a server to which nothing was proved."""
        try:
            return super().authentic(head, control)
        except AssertionError:
            if control[0] != wire.REFUSE:
                raise
            return control

    # Steps in which the server fetches a tensor from a task that has joined.

    def fetching(self, sender, own_session=True):
        """Registers a graph whose only node receives a tensor from `sender`. Returns its handle, and that of its
        session, as a worker makes one; without `own_session`, it is the one that every server has."""
        device = next(iter(self.devices()))
        text = lambda value: protobuf.message(2, value)  # noqa: E731
        attributes = {
            "tensor_type": protobuf.of_type(protobuf.FLOAT), "tensor_name": text("edge_1_fetched"),
            "send_device": text(f"{sender}/device:CPU:0"), "send_device_incarnation": protobuf.of_int(1),
            "recv_device": text(device), "client_terminated": protobuf.number(5, 0),
        }  # fmt: skip
        graph = protobuf.graph(protobuf.node("fetched", "_Recv", device, **attributes))
        session = b""
        if own_session:
            session = os.urandom(8).hex().encode()
            server = protobuf.message(2, "ps") + protobuf.number(3, 0)
            self.done(CREATE_WORKER_SESSION, protobuf.message(1, session) + protobuf.message(2, server))
        reply = self.done(client.REGISTER_GRAPH, named(session, 1, 6) + protobuf.message(2, graph))
        return dict(protobuf.fields(b"".join(reply.parts)))[1], session

    def done(self, method, request):
        reply = self.call(method, parts=[request])
        assert reply.code == 0, reply
        return reply

    def forget(self, handle):
        graph, session = handle
        self.done(DEREGISTER_GRAPH, protobuf.message(1, graph) + named(session, 2, 3))
        if session:
            self.done(DELETE_WORKER_SESSION, protobuf.message(1, session))

    def begin(self, handle):
        """Begins a step; returns its request and its number."""
        step = int.from_bytes(os.urandom(7), "big")
        graph, session = handle
        request = protobuf.message(1, graph) + protobuf.number(2, step) + named(session, 8, 10)
        return self.start(RUN_GRAPH, parts=[request]), step

    def fetch(self, handle, timeout=60):
        """Makes the server fetch, and gives up after a while. Returns the reply to the step."""
        ident, step = self.begin(handle)
        try:
            reply = self.answer(ident, timeout)
        except TimeoutError:
            self.cancel(ident)
            reply = self.answer(ident)
        self.call(CLEANUP_GRAPH, parts=[protobuf.number(1, step)])
        return reply

    def leave(self, how):
        with contextlib.suppress(OSError):
            if how == "reset":
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif how == "goodbye":
                self.send_block(wire.frame(wire.GOODBYE, meta=b"that was all"))
            elif how == "garbage":
                self.send(bytes(64))
            elif how == "half":
                self.socket.shutdown(socket.SHUT_WR)
                while self.socket.recv(65536):
                    pass
        self.close()


def named(session, handle, was_created):
    """The fields that name a session."""
    return protobuf.message(handle, session) + protobuf.number(was_created, 1) if session else b""


LEAVE = ("close", "reset", "goodbye", "garbage", "half")


def join(target, task, address="127.0.0.1:1", patience=20, **options):
    """Joins as soon as nobody else has the name."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return Joiner(target, task, address, **options)
        except ConnectionRefusedError as refused:
            if "still connected" not in str(refused.args[1]) or time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def refusal(target, task, address="127.0.0.1:1", **options):
    """Returns code and reason of the refusal; None if it was none."""
    try:
        with Joiner(target, task, address, **options):
            return None
    except ConnectionRefusedError as refused:
        return refused.args
    except (ConnectionError, ssl.SSLError) as ended:
        return "closed", str(ended)


# What a server finds at the address of a joiner. ----------------------------------------------------------------------


def frames(control):
    """Returns kind and number of each frame that a client sends."""
    at = 0
    while at < len(control) and control[at]:
        kind, flags, _, length, ident = struct.unpack_from("<BBHIQ", control, at)
        yield kind, ident
        at += 16
        if kind == wire.RECV:
            at += 32 if flags & 1 else 16
        elif kind == wire.DATA:
            at += 8
        elif kind == wire.CALL:
            (count,) = struct.unpack_from("<I", control, at + 4)
            lengths = struct.unpack_from(f"<{count}Q", control, at + 8)
            at += 8 + 8 * count + length + -length % 8
            at += sum(size + -size % 8 for size in lengths if not size & client.BULK)
        else:
            at += length + -length % 8


class Door:
    """Listens, and keeps a record of what a server says to it. It calls itself `task`; without one, it sends `says`.
    `target`: whose secret, certificate and protocol it has. `answers`: requests for tensors, with a number. `holds`:
    its welcome, until `go` is set."""

    # By address, of those that were made last.
    incarnations = {}

    def __init__(self, target, task=None, says=b"", answers=True, holds=False, port=0):
        self.task, self.says, self.answers = task, says, answers
        self.secret, self.protocol = target.secret, target.protocol
        self.context = tls_of_servers(target.certificates) if target.certificates and task is not None else None
        self.heard, self.read, self.asked, self.ended = [], 0, threading.Event(), 0
        self.open = []
        self.go = threading.Event()
        if not holds:
            self.go.set()
        self.listener = socket.create_server(("127.0.0.1", port), backlog=64)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.incarnation = self.incarnations[self.address] = os.urandom(8)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                self.open.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        connection.settimeout(60)
        with contextlib.suppress(OSError, AssertionError):
            Visit(self, connection).run()
        self.ended += 1

    def stop_listening(self):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def close(self):
        self.stop_listening()
        for connection in self.open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def tls_of_servers(certificates):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates["STARWIRE_TLS_CERT"], certificates["STARWIRE_TLS_KEY"])
    context.set_alpn_protocols(["starwire/2"])
    return context


class Visit(wire.Peer):
    """A connection of a server to a door."""

    def __init__(self, door, connection):
        self.plain = connection
        self.door, self.socket, self.buffer, self.sequence = door, connection, b"", 0

    def run(self):
        door = self.door
        if door.task is None:
            if door.says:
                self.socket.sendall(door.says)
            while data := self.socket.recv(65536):
                door.read += len(data)
            return
        if door.context:
            self.socket = door.context.wrap_socket(self.socket, server_side=True)
            door.open[door.open.index(self.plain)] = self.socket
        if door.secret:
            theirs, ours = self.hear(), os.urandom(32)
            self.send_block(wire.frame(wire.CHALLENGE, meta=ours))
            self.key, self.their_key = (client.key(door.secret, side, theirs, ours) for side in (b"server", b"client"))
        self.hear()
        door.go.wait(60)
        features = client.DIGESTS if door.secret else 0
        self.send_block(hello(door.protocol, door.task, incarnation=door.incarnation, features=features, kind=wire.WELCOME))
        while True:
            for kind, ident in frames(self.read_block()):
                door.heard.append(kind)
                if kind == wire.PING:
                    self.send_block(wire.frame(wire.PONG, ident=ident))
                elif kind == wire.CALL:
                    self.send_block(*impostor.reply(ident, code=12))
                elif kind == wire.RECV:
                    door.asked.set()
                    if door.answers:
                        value = struct.pack("<f", 666.0)
                        meta = client.tensor_meta(protobuf.FLOAT, client.PLAIN_ENCODING, (), len(value))
                        self.send_block(*impostor.reply(ident, meta, [value]))

    def hear(self):
        kind, _, _, meta = self.first_frame()
        self.door.heard.append(kind)
        return meta


# The job. -------------------------------------------------------------------------------------------------------------


class Arena(arenas.Arena):
    """An arena that workers 4 to 23 may join, with nothing, a secret or TLS as proof, and a name for each task."""

    def __init__(self, runner, protocol, directory, way, members=LIST):
        self.protocol, self.way, self.directory, self.outcomes = protocol, way, Path(directory), []
        self.secret, self.identities, self.honest_runs = "", {}, 0
        environment = dict(arenas.ENVIRONMENT)
        if way == "secret":
            self.secret = environment["STARWIRE_SECRET"] = arenas.SECRET
        if way == "TLS":
            self.authority = Authority(self.directory / "authority")
            tasks = [("ps", 0), *(("worker", number) for number in range(LIST))]
            self.identities = {task: self.issue("-".join(map(str, task)), task) for task in tasks}
            environment.update({"STARWIRE_TLS_PEERS": URI, "STARWIRE_UNIX": "off"})
        self.certificates = self.identities.get(("worker", 3), {})
        per_task = {**self.identities, ("ps", 0): {**self.identities.get(("ps", 0), {}), **join_list(members)}}
        shape = {"ps": 1, "worker": IN_SPEC}
        self.cluster = harness.Cluster(
            runner, protocol, shape, environment=environment, per_task=per_task, start=False
        )
        started = [self.cluster.start(job, number) for job, number in (("ps", 0), ("worker", 0), ("worker", 1))]
        self.ps, self.trainer, self.visitor = started
        self.server = arenas.Process(self.ps.pid)
        self.address = self.data_port()
        self.stop_file, self.trail = self.directory / "stop", self.directory / "trail"
        target = self.cluster.target("worker", 0)
        self.trainer.begin(with_rests, training.train, target, str(self.stop_file), str(self.trail))
        self.visitor.call(training.prepare_visits, self.cluster.target("worker", 1), 1)
        self.wait_for_steps(100)
        for _ in range(3):  # allocate what the first peers allocate for all later ones
            self.visitor.call(training.visit)
            self.greet()
            self.healthy()
        self.honest()
        time.sleep(0.5)

    def issue(self, file, *tasks):
        """Returns the environment of a task whose certificate speaks for these tasks."""
        return self.authority.issue(file, *(f"URI:{URI.format(job=job, task=number)}" for job, number in tasks))

    def member(self, target, number):
        """The target as worker `number` sees it: with the worker's certificate, if there are any."""
        return target._replace(certificates=self.identities.get(("worker", number), {}))

    # Honest workers.

    def start_newcomer(self, number, port=None):
        """Starts a worker with a ClusterSpec of its own. Returns it and its address."""
        address = f"127.0.0.1:{port or free_port()}"
        spec = {"ps": self.cluster.spec["ps"], "worker": {number: address}}
        return self.cluster.start("worker", number, spec=spec), address

    def end_newcomer(self, number):
        task = self.cluster.tasks[("worker", number)]
        complaints = task.complaints()
        task.kill()
        self.cluster.tasks.pop(("worker", number))
        assert not complaints, complaints

    def honest(self, number=None, port=None):
        """A worker joins, makes steps whose results are all exact, and leaves."""
        number = number or HONEST[self.honest_runs % len(HONEST)]
        self.honest_runs += 1
        task, address = self.start_newcomer(number, port)
        try:
            made = task.call(steps.run_steps, f"grpc://{address}", 10, task=number, name="honest", filters=True)
        finally:
            self.end_newcomer(number)
        assert made == 10

    @contextlib.contextmanager
    def beside(self, number):
        """A worker joins and trains during the block, in which all of its results are exact and no step hangs. Gives
        its address."""
        self.honest_runs += 1
        task, address = self.start_newcomer(number)
        stop = self.directory / f"stop-{self.honest_runs}"
        try:
            train = steps.run_until_stopped
            task.begin(with_rests, train, f"grpc://{address}", str(stop), task=number, name="beside")
            wait_for(f"{stop}.started")
            yield address
            made = os.path.getsize(f"{stop}.steps")
            wait_until(lambda: task.ready() or os.path.getsize(f"{stop}.steps") >= made + 10, 60, "it goes on")
            stop.touch()
            count, longest = task.result(60)
            assert count > 10 and longest < HANGS, (count, longest)
        finally:
            self.end_newcomer(number)

    # Metrics.

    def counted(self):
        """Returns how many tasks have joined and left."""
        wire.source = "127.0.0.1"
        status, body = wire.http_get(self.address, "/metrics", tls=self.target().tls(protocols=()))
        assert status == 200, status
        found = [re.search(rf"^starwire_tasks_{what}_total\S* (\d+)$", body, re.M) for what in ("joined", "left")]
        return tuple(int(one[1]) for one in found)

    def attacked(self, attack, **options):
        """As `under`, and honest workers join and train during the attack and after it. Then nobody is left. Returns
        the outcome, and how many liars have joined."""
        wait_until(lambda: len(set(self.counted())) == 1, 30, "nobody is left from before")
        joined, runs = self.counted()[0], self.honest_runs
        outcome = self.under(attack, **{"meanwhile": self.honest, "share": 0.5, **options})
        self.honest()
        wait_until(lambda: len(set(self.counted())) == 1, 30, f"all have left: {self.counted()}")
        return outcome, self.counted()[0] - joined - (self.honest_runs - runs)


def with_rests(function, *arguments, **options):
    """Calls a function that makes steps, in a process of its own. Unless the pace is measured, the process rests after
    each step: a server has to serve it all the same, and no core is busy all the time."""
    check = steps.Model.check

    def check_and_rest(*values):
        check(*values)
        time.sleep(0.02)

    if not arenas.MEASURES:
        steps.Model.check = check_and_rest
    return function(*arguments, **options)


def join_list(members):
    return {"STARWIRE_JOIN": f"worker:{members}"}
