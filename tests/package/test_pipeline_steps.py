"""The steps of a pipeline without TensorFlow: who waits for whom, and for how long."""

import collections
import importlib.util
import threading
import time
from pathlib import Path

import pytest

HANG = 60  # seconds after which something that should have ended long ago hangs


@pytest.fixture
def pipeline(monkeypatch):
    path = Path(__file__).resolve().parents[2] / "python" / "starwire" / "_pipeline.py"
    spec = importlib.util.spec_from_file_location("pipeline_alone", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_copied", lambda result: result)
    return module


class Work:
    """Steps that return their number. Those in `held` end when they are let go, those in `failing` with an error."""

    def __init__(self, held=(), failing=()):
        self.held, self.failing = {number: threading.Event() for number in held}, failing
        self.begun = {number: threading.Event() for number in held}
        self.count = 0

    def step(self, _):
        self.count += 1
        number = self.count
        if number in self.held:
            self.begun[number].set()
            self.held[number].wait()
        if number in self.failing:
            raise ValueError(f"step {number}")
        return number

    def let_go(self):
        for event in self.held.values():
            event.set()


def ended(function):
    """Calls it in another thread. Returns its error, if any, and how long it took."""
    error, begun = [], time.monotonic()

    def call():
        try:
            function()
        except Exception as one:
            error.append(one)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(HANG)
    assert not thread.is_alive()
    return (error or [None])[0], time.monotonic() - begun


def test_a_session_that_nobody_closes_ends_with_its_last_step(pipeline, monkeypatch):
    monkeypatch.setattr(pipeline, "PATIENCE", 10 * HANG)
    work, closed = Work(held=[2]), threading.Event()

    class Session:
        def __init__(self):
            self.pipeline = pipeline.Pipeline(1)

        def __del__(self):
            self.pipeline.close()
            closed.set()

        def run(self):
            return self.pipeline.run(lambda feeds: self and work.step(feeds), None, "step")

    def train():
        session = Session()
        session.run()
        session.run()

    train()
    before = threading.active_count()
    work.let_go()
    assert closed.wait(HANG)
    deadline = time.monotonic() + HANG
    while threading.active_count() >= before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_end_waits_for_no_step_behind_one_that_failed(pipeline, monkeypatch):
    monkeypatch.setattr(pipeline, "PATIENCE", 0.2)
    work = Work(held=[2, 3], failing=[2])
    steps = pipeline.Pipeline(2)
    for _ in range(3):
        steps.run(work.step, None, "step")
    work.begun[3].wait()
    failing = steps._sequences[0]._steps[0]
    work.held[2].set()
    assert failing.done.wait(HANG)
    error, _ = ended(pipeline.leave)
    assert str(error) == "step 2"
    assert steps.leave(time.monotonic()) == 1  # the one that hangs
    work.let_go()


def test_the_end_waits_for_all_threads_as_long_as_for_one(pipeline, monkeypatch):
    monkeypatch.setattr(pipeline, "PATIENCE", 1)
    took = []
    for count in (1, 16):
        made, works = pipeline.Pipeline(1), [Work(held=[2]) for _ in range(count)]
        threads = [threading.Thread(target=lambda work=work: [made.run(work.step, None, "step") for _ in range(2)]) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took.append(ended(pipeline.leave)[1])
        for work in works:
            work.let_go()
        assert made.leave(time.monotonic() + HANG) == 0
    assert took[1] < 8 * took[0], took


def test_after_an_interrupt_results_are_as_old_as_before(pipeline, monkeypatch):
    steps, work, wait = pipeline.Pipeline(1), Work(), pipeline._Sequence._wait
    assert [steps.run(work.step, None, "step") for _ in range(3)] == [1, 1, 2]

    def interrupted(*_):
        raise KeyboardInterrupt

    for count in (4, 7):
        monkeypatch.setattr(pipeline._Sequence, "_wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            steps.run(work.step, None, "step")
        monkeypatch.setattr(pipeline._Sequence, "_wait", wait)
        assert [steps.run(work.step, None, "step") for _ in range(2)] == [count, count + 1]
    steps.close()
    assert work.count == 9


def test_nothing_is_left_of_threads_that_have_ended(pipeline):
    steps, before = pipeline.Pipeline(1), threading.active_count()
    for _ in range(5):
        work = Work()
        thread = threading.Thread(target=lambda work=work: [steps.run(work.step, None, "step") for _ in range(3)])
        thread.start()
        thread.join()
        assert len(steps._sequences) == 1
        under_way = list(steps._sequences[0]._steps)
        assert all(step.done.wait(HANG) for step in under_way)
    steps.run(Work().step, None, "step")
    deadline = time.monotonic() + HANG
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_error_of_a_thread_that_has_ended_is_kept(pipeline):
    steps, work = pipeline.Pipeline(1), Work(failing=[2])
    thread = threading.Thread(target=lambda: [steps.run(work.step, None, "step") for _ in range(2)])
    thread.start()
    thread.join()
    assert steps._sequences[0]._steps[0].done.wait(HANG)
    steps.run(Work().step, None, "step")
    with pytest.raises(Exception, match="step 2"):
        steps.close()


def test_what_is_no_step_is_not_copied(pipeline, monkeypatch):
    monkeypatch.setattr(pipeline, "_copied", lambda result: pytest.fail("copied"))
    assert pipeline.Pipeline(1).run(lambda feeds: "large", None, None) == "large"


def test_a_step_has_fetches_of_its_own(pipeline):
    Pair = collections.namedtuple("Pair", "left right")
    fetches = collections.OrderedDict(b=["x", ("y", Pair("z", ["u"]))], a={"c": "v"})
    own = pipeline.structure(fetches)
    assert own == fetches and list(own) == ["b", "a"] and type(own) is collections.OrderedDict and type(own["b"][1][1]) is Pair
    fetches["b"].append("more")
    fetches["b"][1][1].right.append("more")
    fetches["a"]["d"] = fetches["e"] = "more"
    assert own == collections.OrderedDict(b=["x", ("y", Pair("z", ["u"]))], a={"c": "v"})
