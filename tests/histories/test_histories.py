"""The checker of histories against a model that applies updates as a server may, and as it must not; and a short history over each protocol."""

import contextlib
import random

import pytest

import run  # before the others: it says where they are

import checker
import cluster
import lost_connections
import proxy

SERVER_OF = {"vector": 0, "number": 0, "register": 0}
KIND_OF = {"vector": "push", "number": "count", "register": "write"}


STEPS = 800


class Model:
    """A server, its clients and their faults. An update takes effect at once between its begin and its end, or (it failed) at any time after its begin, or never.
    `plant` spoils one acknowledged update of a kind, or (`unsee`) takes back what a read has shown and nobody has acknowledged, or (`forget`) a flush."""

    def __init__(self, seed, plant=None, kind="push", keeps=False):
        self.keeps, self.kept = keeps, None  # the time and the values of the last flush
        self.random, self.now, self.events = random.Random(seed), 0.0, []
        self.late, self.next, self.values = [], 0, None
        self.saved = dict(vector=[0.0] * checker.SIZE, number=0, register=0)
        self.plant = plant and (plant, kind, self.random.randrange(20, 60))
        self.unsure = None  # an update that nobody has acknowledged, and what the register was before it
        self.updates = 0
        self.spoiled = self.spoils = False

    def time(self):
        self.now += self.random.random() + 0.001
        return self.now

    def apply(self, event):
        if self.values is None:
            return
        self.unsure = None if event["ok"] else (event, self.values["register"])
        if event["what"] == "push":
            self.values["vector"][event["element"]] += 1
        elif event["what"] == "count":
            self.values["number"] += 1
        else:
            self.values["register"] = event["value"]

    def update(self):
        kind = self.random.choice(["push", "count", "write"])
        self.next += 1
        name = next(name for name, word in KIND_OF.items() if word == kind)
        event = {"what": kind, "names": [name], "element": self.next, "value": self.next, "begin": self.time(), "ok": self.values is not None and self.random.random() < 0.8}
        self.updates += 1
        spoil = self.plant and self.plant[0] in ("drop", "repeat", "swap") and event["ok"] and kind == self.plant[1] and self.updates >= self.plant[2] and not self.spoiled
        if event["ok"]:
            self.spoiled |= bool(spoil)
            element = self.next + (5000 if spoil and self.plant[0] == "swap" else 0)
            for _ in range({"drop": 0, "repeat": 2, "swap": 1}[self.plant[0]] if spoil else 1):
                self.apply({**event, "element": element})
        elif self.values is not None and self.random.random() < 0.5:
            self.late.append((self.now + self.random.random() * 5, event))
        if event["ok"] or self.random.random() < 0.8:
            event["end"] = self.time()
        self.events.append(event)

    def read(self):
        event = {"what": "read", "begin": self.time(), "ok": self.values is not None}
        if self.values is not None:
            event["values"] = {"vector": checker.pack(self.values["vector"]), "number": self.values["number"], "register": self.values["register"]}
            if self.random.random() < 0.3:
                self.saved = self.copy(self.values)
            if self.plant and self.plant[0] == "unsee" and self.unsure and self.unsure[0]["what"] == self.plant[1] and not self.spoiled:
                self.take_back(*self.unsure)
        event["end"] = self.time()
        self.events.append(event)

    def take_back(self, event, register):
        self.spoiled = True
        if event["what"] == "push":
            self.values["vector"][event["element"]] -= 1
        elif event["what"] == "count":
            self.values["number"] -= 1
        else:
            self.values["register"] = register

    def restart(self):
        begin = self.time()
        self.values, self.late = None, []
        kept = {"kept_until": self.kept[0]} if self.kept else {}
        self.events.append({"what": "kill", "server": 0, "begin": begin, "end": self.time(), **kept})
        self.unsure = None
        if self.kept and self.plant and self.plant[0] == "forget":
            self.spoiled = True
        elif self.kept:
            self.values = self.copy(self.kept[1])
            self.spoiled |= self.spoils

    @staticmethod
    def copy(values):
        return {name: list(value) if name == "vector" else value for name, value in values.items()}

    def flush(self):
        """A flush that is spoiled has less than it says."""
        values = self.copy(self.values)
        self.kept = self.time(), values
        if self.plant and self.plant[0] == "late" and not self.spoiled:
            made = [event for event in self.events if event["what"] == "push" and event["ok"] and values["vector"][event["element"]] == 1]
            if made:
                values["vector"][self.random.choice(made)["element"]] = 0
                self.spoils = True

    def initialise(self):
        values = self.copy(self.saved)
        begin = self.time()
        for name, value in values.items():
            base = checker.pack(value) if name == "vector" else value
            self.events.append({"what": "init", "name": name, "base": base, "begin": begin, "ok": True})
        self.values = values
        end = self.time()
        for event in self.events[-3:]:
            event["end"] = end

    def run(self):
        self.initialise()
        for _ in range(150):
            for due, event in [entry for entry in self.late if entry[0] <= self.now]:
                self.late.remove((due, event))
                self.apply(event)
            if self.values is None and self.random.random() < 0.3:
                self.initialise()
            choice = self.random.random()
            if self.keeps and self.values is not None and self.random.random() < 0.1:
                self.flush()
            if choice < 0.03 and not self.spoiled:
                self.restart()
            elif choice < 0.3:
                self.read()
            else:
                self.update()
        if self.values is None:
            self.initialise()
        self.read()
        return self.events


@pytest.mark.parametrize("keeps", [False, True])
def test_what_a_server_may_do_is_no_violation(keeps):
    compared = proved = 0
    for seed in range(30):
        verdict = checker.check(Model(seed, keeps=keeps).run(), SERVER_OF, KIND_OF)
        assert not verdict.wrong, (seed, verdict.wrong)
        compared += verdict.compared
        proved += verdict.proved
    assert compared > 500 and proved > 500, (compared, proved)


QUICK = (("repeat", "push", False), ("swap", "push", True), ("drop", "write", True), ("drop", "count", False), ("repeat", "count", True))


@pytest.mark.parametrize(
    "kept_until, names, is_wrong",
    [(2.0, ["a0", "b1"], False), (5.1, ["a0", "b1"], True), (2.0, ["a0"], True)],
    ids=["a server that had answered may lose it", "sync", "a server that had not is asked again"],
)
def test_an_update_of_several_servers_that_were_not_all_there(kept_until, names, is_wrong):
    """It begins at 4; server 0 dies at 5, and server 1 answers at 7."""
    nothing = {"ones": "", "others": []}
    inits = [{"what": "init", "name": name, "base": nothing, "begin": 0.0, "end": 1.0, "ok": True} for name in ("a0", "b1")]
    push = {"what": "push", "names": names, "element": 3, "value": 4, "begin": 4.0, "end": 7.0, "ok": True}
    kill = {"what": "kill", "server": 0, "begin": 5.0, "end": 5.1, "kept_until": kept_until}
    values = {"a0": nothing, "b1": checker.pack([0, 0, 0, "b1" in names])}
    read = {"what": "read", "begin": 8.0, "end": 8.1, "ok": True, "values": values}
    verdict = checker.check([*inits, push, kill, read], {"a0": 0, "b1": 1}, {"a0": "push", "b1": "push"})
    assert bool(verdict.wrong) == is_wrong, verdict.wrong


def judged(kind, events):
    """Returns the violations of a history of the variable `v` on server 0, which has the value 0 from time 1 on."""
    base = {"ones": "", "others": []} if kind == "push" else 0
    init = {"what": "init", "name": "v", "base": base, "begin": 0.0, "end": 1.0, "ok": True}
    return checker.check([init, *events], {"v": 0}, {"v": kind}).wrong


def push(error):
    return {"what": "push", "names": ["v"], "element": 3, "value": 4, "begin": 4.0, "end": 5.0, "ok": False, "error": error}


def read(at, value):
    return {"what": "read", "begin": at, "end": at + 0.1, "ok": True, "values": {"v": value}}


def killed(at):
    return {"what": "kill", "server": 0, "begin": at, "end": at + 0.1, "kept_until": -float("inf")}


@pytest.mark.parametrize(
    "error, kill, is_wrong",
    [("FailedPreconditionError: no value", [], True), ("UnavailableError: lost", [], False), ("FailedPreconditionError: no value", [killed(4.5)], False)],
    ids=["refused", "lost", "refused by the next process of the server"],
)
def test_an_update_that_was_refused_is_not_there(error, kill, is_wrong):
    assert bool(judged("push", [push(error), *kill, read(8.0, checker.pack([0, 0, 0, 1]))])) == is_wrong
    assert not judged("push", [push(error), *kill, read(8.0, checker.pack([0]))])


def write(value, begin, end):
    return {"what": "write", "names": ["v"], "element": value, "value": value, "begin": begin, "end": end, "ok": True}


@pytest.mark.parametrize(
    "found, kill, is_wrong",
    [([2, 1], [], True), ([1, 2, 1], [], True), ([1, 0], [], True), ([2, 2], [], False), ([2, 1], [killed(8.5)], False)],
    ids=["both were written", "again", "its first value", "one of them", "a server that came back"],
)
def test_a_register_does_not_go_back_to_a_value(found, kill, is_wrong):
    """Two values are written at once, and read later."""
    written = [write(1, 4.0, 6.0), write(2, 4.0, 6.0)]
    assert bool(judged("write", [*written, *kill, *(read(8.0 + at, value) for at, value in enumerate(found))])) == is_wrong


def test_a_register_may_have_both_values_while_both_are_written():
    assert not judged("write", [write(1, 4.0, 9.0), write(2, 4.0, 9.0), read(5.0, 2), read(6.0, 1)])


@pytest.mark.quick(
    lambda of: (of["plant"], of["kind"], of["keeps"]) in QUICK,
    reason="each fault once, in models with and without flushes; of two updates that are swapped, one is dropped",
)
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("plant, kind", [("drop", "push"), ("repeat", "push"), ("swap", "push"), ("drop", "write"), ("drop", "count"), ("repeat", "count")])
def test_one_wrong_update_is_found(plant, kind, keeps):
    found = spoiled = 0
    for seed in range(20):
        model = Model(seed, plant, kind, keeps)
        wrong = checker.check(model.run(), SERVER_OF, KIND_OF).wrong
        spoiled += model.spoiled
        found += bool(wrong)
    # A write that was lost shows only if a read comes before the next write; a count only if none is under way whose outcome nobody knows.
    assert spoiled > 14 and found >= spoiled // {"push": 1, "write": 3, "count": 10}[kind], (spoiled, found)


@pytest.mark.parametrize("kind", ["push", "count", "write"])
def test_an_update_that_was_seen_and_is_gone_is_found(kind):
    found = spoiled = 0
    for seed in range(40):
        model = Model(seed, "unsee", kind)
        wrong = checker.check(model.run(), SERVER_OF, KIND_OF).wrong
        spoiled += model.spoiled
        found += model.spoiled and bool(wrong)
    # A write hides the one before.
    assert spoiled > 14 and found >= (spoiled if kind == "push" else spoiled // 4), (spoiled, found)


@pytest.mark.parametrize("plant", ["late", "forget"])
def test_a_server_that_keeps_less_than_it_says_is_found(plant):
    found = spoiled = 0
    for seed in range(20):
        model = Model(seed, plant, keeps=True)
        wrong = checker.check(model.run(), SERVER_OF, KIND_OF).wrong
        spoiled += model.spoiled
        found += model.spoiled and bool(wrong)
    assert spoiled > 10 and found == spoiled, (spoiled, found)


def test_a_library_that_is_released_has_no_fail_points():
    """Its build sets `run.has_fail_points`' names only with the feature."""
    assert not run.has_fail_points()


AT = {"server": 1, "worker": 0, "direction": (True, True), "back": False}
PLAN = [(3.0, "kill_server", AT, 0.2), (5.0, "cut", AT, 0.5), (6.0, "reset", AT, 0), (6.5, "stop_server", AT, 0.5), (7.5, "kill_worker", AT, 0.1)]
PROOFS = {"grpc++": "tls", "star_server": "secret"}


@pytest.mark.quick(lambda of: "lite" not in of["protocol"], reason="star_server_lite differs in counters and in what it orders, which test_star_counters and the fuzzer cover")
@pytest.mark.parametrize("protocol", run.PROTOCOLS)
def test_a_short_history(protocol, tmp_path, monkeypatch):
    if protocol in PROOFS:
        monkeypatch.setenv("STARWIRE_TEST_PROOF", PROOFS[protocol])
    runner = cluster.Runner()
    try:
        wrong, summary = run.once(runner, tmp_path, 7, protocol, 9.0, plan=PLAN)
    finally:
        runner.close()
    assert not wrong, "\n".join(wrong)
    assert set(summary["faults"]) == {word for _, word, _, _ in PLAN}, summary
    # How many there are depends on the machine.
    assert summary["acknowledged"] > 10 and summary["variables compared"] > 10 and summary["proved"] > 10, summary


@pytest.mark.parametrize("plant", ["drop", "repeat", "swap"])
@pytest.mark.deep(reason="the model has these faults as well, and more of them")
def test_a_planted_fault_is_found(plant, tmp_path):
    runner = cluster.Runner()
    try:
        wrong, summary = run.once(runner, tmp_path, 7, "star_server", 12.0, plant=plant, plan=[])
    finally:
        runner.close()
    assert summary["planted"] and any(f"[{element}]" in line for line in wrong for element in run.near(summary["planted"])), (wrong, summary)


def test_faults_that_do_not_matter_are_left_out():
    plan = list("abcdefgh")
    lost, late = "vector[7] is 0, not 1 to 1: lost; update {}", "no step within 90 s after the last fault: worker 0 with server 1"

    def try_once(faults):
        return [lost] if {"c", "f"} <= set(faults) else [late] if "a" in faults else []

    assert run.shrink(plan, try_once, tries=1) == ["c", "f"]
    assert run.shrink(plan, lambda _: [], tries=2) is None


@contextlib.contextmanager
def linked(protocol, **settings):
    """A server and a worker, whose connections pass through the link."""
    runner, network = cluster.Runner(), proxy.Network()
    made = cluster.Cluster(runner, protocol, {"ps": 1, "worker": 1}, environment={"STARWIRE_UNIX": "off", **settings}, start=False)
    try:
        link = proxy.Link(network, made.spec["ps"][0])
        tasks = [made.begin_start("ps", 0), made.begin_start("worker", 0, spec={**made.spec, "ps": [link.address]})]
        for task in tasks:
            task.result(cluster.START_TIMEOUT)
        yield made, link
        assert not [line for task in tasks for line in task.complaints()]
    finally:
        made.close()
        runner.close()
        network.close()


@pytest.mark.parametrize("proof", ["none", "secret", "tls"])
def test_lost_connections_fail_no_step_of_star_calls(proof, monkeypatch, tmp_path):
    """The worker's connections are reset again and again, in the middle of calls; grpc++ loses steps by it."""
    if proof != "none":
        monkeypatch.setenv("STARWIRE_TEST_PROOF", proof)
    failed = {}
    for protocol in ("star_server", "star_server_lite", "grpc++")[: 3 if proof == "none" else 1]:
        with linked(protocol) as (made, link):
            worker, seen = made["worker", 0], 0
            worker.begin(lost_connections.count, made.target("worker", 0), STEPS, str(tmp_path))
            while not worker.ready(0.05):
                # A busy machine may need longer for a connection.
                with contextlib.suppress(FileNotFoundError):
                    before, seen = seen, (tmp_path / "steps").stat().st_size
                    if seen > before:
                        link.reset()
            failed[protocol], counts = worker.result()
            (tmp_path / "steps").unlink(missing_ok=True)
        # As text: pytest shortens everything else.
        assert protocol == "grpc++" or counts == [STEPS] * 4, f"{protocol}: {counts}, {failed}"
    assert failed.pop("grpc++", True) and not any(failed.values()), f"{failed}"


SESSIONS = 60


def test_lost_connections_fail_no_session_that_is_being_opened(tmp_path):
    """If servers may come back, a session waits for one, also if that ends while the session is set up."""
    with linked("star_server", STARWIRE_RECOVER_S=60) as (made, link):
        worker = made["worker", 0]
        worker.begin(lost_connections.open_sessions, made.target("worker", 0), SESSIONS, str(tmp_path))
        while not worker.ready(0.03):
            if (tmp_path / "steps").exists():
                link.reset()
        failed, found = worker.result()
        assert not failed, failed
        assert found == [float(lost_connections.SIZE)] * SESSIONS
