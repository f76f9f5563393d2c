"""The graph fuzzer's part of every test run: named regressions, some seeds, and tests of the fuzzer itself."""

import functools
import json
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import compare  # noqa: E402
import features  # noqa: E402
import kept  # noqa: E402
import program as programs  # noqa: E402
import run as fuzz  # noqa: E402
import shrink  # noqa: E402
from generate import generate  # noqa: E402

generated = functools.lru_cache(maxsize=None)(generate)
# `make test-deep` and `make fuzz-graphs` run other seeds, for longer, and everything over all protocols. These have each switch and each kind of star call.
PROTOCOLS = ("grpc++", "grpc+++fuse", "star_server", "star_server+fuse", "star_server_lite+parts")
# Small programs that together have all features: the test fails if the generator no longer makes them so.
SEEDS = (1015, 1030, 1082, 1140, 1195, 1199, 1247, 1300, 1352, 1559, 2294)
KEPT = (1, 3, 6, 15, 16, 33)
FUNCTIONS = (25328,), (36322, 58876)


@pytest.fixture(scope="module")
def fuzzer():
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ["STARWIRE_LIBRARY"] = fuzz.harness.library_path()
    runner = fuzz.harness.Runner()
    made = fuzz.Fuzzer(runner, PROTOCOLS)
    yield made
    made.clusters.close()
    runner.close()


@pytest.mark.parametrize("path", fuzz.REGRESSIONS, ids=lambda path: path.stem)
def test_regression(fuzzer, path):
    made = json.loads(path.read_text())
    verdict, found = fuzzer.judge(made, fuzzer.results(made, [*fuzz.stocks(made), *fuzzer.protocols]))
    assert verdict == "sound"
    assert not found, "\n".join(f"{name}: {text}" for name, text in found.items()) + "\n" + programs.listing(made)


def test_seeds(fuzzer):
    failures = []

    def report(*found):
        failures.append(found)

    programs_made = [generate(seed) for seed in SEEDS]
    assert {name for made in programs_made for name in made["options"].get("features", ())} == set(features.FEATURES)
    fuzzer.run_all(iter(programs_made), lambda: False, report)
    failures = [(made, found) for made, results, found in failures if fuzzer.settled(made, results)]
    assert not failures, "\n".join(f"seed {made['seed']}: {name}: {text}" for made, found in failures for name, text in found.items())
    assert fuzzer.count["sound"] + fuzzer.count["order left open"] >= 0.9 * fuzzer.count["programs"] > 0, dict(fuzzer.count)


def test_what_a_state_keeps(fuzzer, tmp_path):
    """Both servers are killed after each program: every variable must be what it was."""
    keeper = kept.Fuzzer(fuzzer.clusters.runner, tmp_path, 20.0)
    try:
        for seed in KEPT:
            made = generate(seed)
            assert kept.usable(made)
            assert keeper.try_one("star_server+parts", made) == []
    finally:
        keeper.clusters.close()
    assert keeper.count["programs"] == len(KEPT)


# Functions hang over stock gRPC now and then.
@pytest.mark.limit(480)
@pytest.mark.quick(lambda of: of["seeds"] == FUNCTIONS[0], reason="most kinds of steps; the others add shards, tables, generators, variables made again")
@pytest.mark.parametrize("seeds", FUNCTIONS)
def test_functions(fuzzer, tmp_path, seeds):
    """Random functions of a coordinator, and the same as graphs of a session. Over grpc++, tests/python/test_functions.py has functions."""
    if fuzz.harness.tf.__version__.startswith("1."):
        pytest.skip("TensorFlow 1.15 has no coordinator")
    ways = ("star_server", "star_server_lite+parts")
    assert {name for seed in sum(FUNCTIONS, ()) for name in fuzz.functions.generate(seed)["features"]} == set(fuzz.functions.FEATURES)
    made = [fuzz.functions.generate(seed) for seed in seeds]
    assert fuzz.functions.fuzz(fuzz.harness, fuzzer.clusters.runner, ways, fuzz.FUNCTION_SWITCHES, iter(made), len(made), 1000, tmp_path) == []


def test_a_staged_value_is_taken_out_in_the_same_run():
    checked = 0
    for seed in range(300):
        made = generated(seed)
        takers = {number: record["id"] for record in made["body"] for number in record.get("needs", ())}
        for run in made["runs"]:
            for number in takers.keys() & set(run["targets"]):
                assert takers[number] in run["targets"], f"seed {seed}"
                checked += 1
    assert checked > 50


def test_concurrent_counters_are_read_in_the_end():
    checked = 0
    for seed in range(300):
        made = generated(seed)
        records = {record["id"]: record for part in ("init", "body", "final") for record in made[part]}
        read = programs.closure(list(records.values()), [programs.node_of(ref) for ref in made["runs"][-1]["fetch"]])
        for run in made["runs"]:
            if run.get("mode") != "together":
                continue
            updates = [records[i] for i in run["targets"] if records[i]["op"] != "Neg"]
            for update in updates:
                assert programs.node_of(next(iter(update["in"].values()))) in read, (seed, update)
                checked += 1
    assert checked > 20


def test_same_seed_same_program():
    assert generate(5) == generate(5) != generate(6)


def test_programs_are_plain_json():
    for seed in range(30):
        made = generated(seed)
        assert json.loads(programs.dumps(made)) == json.loads(json.dumps(made))


def test_users_of_state_are_ordered():
    """Two updates of a variable in the main body are ordered by edges, unless a Switch may separate them."""
    checked = 0
    for seed in range(300):
        body = generated(seed)["body"]
        switches = {record["id"] for record in body if record["op"] in ("Switch", "RefSwitch")}
        users = {}
        for record in body:
            if record["op"] in ("Assign", "AssignAdd", "AssignVariableOp", "AssignAddVariableOp"):
                users.setdefault(next(iter(record["in"].values())), []).append(record["id"])
        for handle, numbers in users.items():
            for first, second in zip(numbers, numbers[1:]):
                before = programs.closure(body, [second])
                if not switches & (before | programs.closure(body, [first])):
                    assert first in before, (seed, handle, first, second)
                    checked += 1
    assert checked > 8


def test_some_reads_and_updates_are_left_unordered():
    """Neither comes before the other, and the update waits for the worker."""
    pairs = 0
    for seed in range(300):
        made = generated(seed)
        if not fuzz.left_open(made):
            continue
        body = made["body"]
        on_worker = {record["id"] for record in body if record["dev"] == "me"}
        for late in (record for record in body if record.get("waits")):
            handle = next(iter(late["in"].values()))
            before = programs.closure(body, [late["id"]])
            users = [r["id"] for r in body if r is not late and handle in programs.each_input(r)]
            pairs += sum(one not in before and late["id"] not in programs.closure(body, [one]) for one in users)
            assert on_worker & set(late["waits"]) and set(late["waits"]) <= before, (seed, late)
    assert pairs > 40


def test_conditions_on_a_flag_see_it_at_two_moments():
    """Each has a copy of the flag, which is assigned after what had an earlier one."""
    checked = 0
    for seed in range(300):
        made = generated(seed)
        if "flags" not in made["options"].get("features", ()) or "large branches" in made["options"]["features"]:
            continue  # a predicate of the latter may be another copy of a flag
        body = {record["id"]: record for record in made["body"]}
        flags = {f"{record['id']}:0": record["dev"] for record in made["init"] if record["op"] == "VariableV2" and record["out"] == [["bool", []]]}
        moments = {}  # copy -> flag
        for record in body.values():
            source = body.get(programs.node_of(record["in"]["input"])) if record["op"] == "Identity" and "input" in record["in"] else None
            handle = source["in"]["input"] if source is not None and source["op"] == "Identity" else None
            if handle in flags and record["dev"] != flags[handle]:
                moments[record["id"]] = handle
        for later, handle in moments.items():
            before = programs.closure(made["body"], [later])
            changes = [i for i in before if body[i]["op"] == "Assign" and body[i]["in"]["ref"] == handle]
            earlier = [i for i in moments if i != later and i in before and moments[i] == handle]
            assert all(any(i in programs.closure(made["body"], [one]) for one in changes) for i in earlier), (seed, later)
            checked += len(earlier)
    assert checked > 15


def test_late_references_wait_for_values_only():
    """Their consumers come after an update of the variable, but have no control inputs."""
    checked = 0
    for seed in range(300):
        made = generated(seed)
        if "late references" not in made["options"].get("features", ()):
            continue
        handles = {f"{record['id']}:0": record["dev"] for record in made["init"] if record["op"] == "VariableV2"}
        for record in made["body"]:
            for handle in handles.keys() & {ref for ref in programs.each_input(record) if not isinstance(ref, dict)}:
                if record["dev"] == handles[handle] or record.get("ctl") or record["op"] not in ("AddV2", "Mul", "Sub"):
                    continue
                before = programs.closure(made["body"], [record["id"]]) - {record["id"]}
                checked += any("Assign" in r["op"] and r["in"].get("ref") == handle for r in made["body"] if r["id"] in before)
    assert checked > 20


def test_each_feature_is_common_enough():
    found = [name for seed in range(300) for name in generated(seed)["options"].get("features", ())]
    assert all(found.count(name) > 3 for name in features.FEATURES), found
    runs = [run for seed in range(300) for run in generated(seed)["runs"]]
    for mode in ("restart", "renew", "pause", "together", "partial"):
        assert sum(run.get("mode") == mode for run in runs) > 3, mode


def test_each_feature_of_functions_is_common_enough():
    made = [fuzz.functions.generate(seed) for seed in range(200)]
    for name in fuzz.functions.FEATURES:
        assert sum(name in one.get("features", ()) for one in made) > 15, name
    ops = [op for one in made for ops in one["functions"] for op in every_op(ops)]
    assert {op["do"] for op in ops if "do" in op} == {*fuzz.functions.sharded.READS, *fuzz.functions.sharded.WRITES}
    for kind in ("generated", "argument"):
        assert sum(op["op"] == kind for op in ops) > 40, kind
    steps = [step for one in made for step in one.get("steps", ())]
    assert {step["on"] for step in steps} == {None, "chief", "worker0", "worker1"}
    assert len({step["rows"] for step in steps}) > 4
    again = [kind for step in steps for kind, _ in step["again"]]
    assert min(again.count("variables"), again.count("sharded")) > 15


def every_op(ops):
    for op in ops:
        yield op
        yield from every_op(op.get("ops", ()))


def test_users_of_shards_are_ordered():
    """Of two users of the same shards in a function, one of which writes, one runs after the other."""
    checked = 0
    for seed in range(200):
        for ops in fuzz.functions.generate(seed)["functions"]:
            before = []  # the ops that each one comes after
            for op in ops:
                direct = {*op["in"], *op["after"]}
                before.append(direct.union(*(before[one] for one in direct)))
            users = [(number, op["op"], op["shards"]) for number, op in enumerate(ops) if "shards" in op]
            for first, kind, shards in users:
                for second, other, others in users:
                    if first < second and shards == others and "sharded write" in (kind, other):
                        assert first in before[second], (seed, first, second)
                        checked += 1
    assert checked > 50


def test_steps_in_flight_depend_on_their_feeds_only():
    checked = 0
    for seed in range(300):
        made = generated(seed)
        for run in (run for run in made["runs"] if "steps" in run):
            records = {record["id"]: record for part in ("init", "body", "final") for record in made[part]}
            body = [records[i] for i in records]
            initialised = {record["id"] for record in made["init"]}
            written = {ref for r in made["body"] if "Assign" in r["op"] or "Scatter" in r["op"] for ref in programs.each_input(r) if not programs.is_lit(ref)}
            written &= {f"{i}:0" for i in initialised}
            for step in (step for step in run["steps"] if not step["targets"]):
                needed = programs.closure(body, [programs.node_of(ref) for ref in step["fetch"]])
                used = {ref for i in needed for inner in programs.walk([records[i]]) for ref in programs.each_input(inner) if not programs.is_lit(ref)}
                assert not used & written, seed
                assert set(step["feed"]) == {i for i in needed if records[i]["op"] == "@feed"} and step["feed"], seed
                checked += 1
    assert checked > 20


def test_threads_feed_values_of_their_own():
    values = [programs.feed_value("int32", (8,), key=[1, 2, 3, *place]).tobytes() for place in ((), (0, 0), (0, 1), (1, 0))]
    assert len(set(values)) == 4


def test_users_of_sure_states_run_before_or_after_the_failure():
    checked = 0
    for seed in range(300):
        made = generated(seed)
        look = next((run for run in made["runs"] if "sure" in run), None)
        if look is None:
            continue
        records = {record["id"]: record for part in ("init", "body", "final") for record in made[part]}
        handles = {ref for one in look["sure"] for ref in programs.each_input(records[programs.node_of(one)]) if not programs.is_lit(ref)}
        body = made["body"]
        failing = [r["id"] for r in body if r.get("fails")]
        assert len(failing) == 1
        before = programs.closure(body, failing)
        for record in body:
            used = handles & {ref for ref in programs.each_input(record) if not programs.is_lit(ref)}
            if used and record["op"] not in ("RefSwitch", "RefMerge", "RefSelect", "RefIdentity", "@cond", "@while") and not in_lanes(made, record["id"]):
                assert record["id"] in before or failing[0] in programs.closure(body, [record["id"]]), (seed, record)
                checked += 1
    assert checked > 30


def in_lanes(made, number):
    return any(number in programs.closure(made["body"], run["targets"]) for run in made["runs"] if "lanes" in run)


def test_shrinking_keeps_the_order_and_what_matters():
    made = next(m for m in map(generate, range(100)) if sum(r["op"] == "AssignAdd" for r in m["body"]) >= 1 and len(m["body"]) > 30)
    keep = next(r["id"] for r in made["body"] if r["op"] == "AssignAdd")
    small = shrink.shrink(made, lambda candidate: any(r["id"] == keep for r in candidate["body"]), seconds=20)
    assert any(r["id"] == keep for r in small["body"])
    assert len(small["body"]) < 10 < len(made["body"])
    # c waits for b, and b for a: without b, c waits for a.
    chain = [{"id": i, "op": "NoOp", "dev": "ps0", "in": {}, "ctl": [i - 1] if i else [], "out": []} for i in range(3)]
    cut = shrink.without({"init": [], "body": chain, "final": [], "runs": []}, [1])
    assert [record.get("ctl") for record in cut["body"]] == [None, [0]]


def test_errors_of_restarted_servers():
    runs = [{"fetch": []}, {"mode": "restart"}, {"fetch": []}, {"mode": "renew"}, {"fetch": []}]
    ok, aborted, cancelled, invalid = ("ok", []), ("error", "AbortedError", 10, "x"), ("error", "CancelledError", 1, "x"), ("error", "InvalidArgumentError", 3, "x")

    def differ(*results, stock=aborted):
        stock, other = [compare.alike(runs, list(made), made[2] is stock) for made in ((ok, ok, stock, ok, ok), results)]
        return compare.difference(stock, other, [True] * 5, runs)

    assert not differ(ok, ok, aborted, ok, ok)
    assert not differ(ok, ok, ("error", "UnavailableError", 14, "y"), ok, ok)
    assert "does not recover" in differ(ok, ok, cancelled, ok, ok)
    assert "does not recover" in differ(ok, ok, invalid, ok, ok)
    assert "AbortedError" in differ(ok, ok, aborted, ok, aborted)


def test_differences():
    one, two = ("float32", (), b"abcd"), ("float32", (), b"abce")
    right, wrong, error, hang = ("ok", [one]), ("ok", [two]), ("error", "InvalidArgumentError", 3, "x"), ("error", "DeadlineExceededError", 4, "x")
    assert compare.difference([right], [right], [True]) is None
    assert compare.difference([right], [wrong], [True])
    assert compare.difference([right], [error], [True])
    assert compare.difference([error], [right], [True])
    assert compare.difference([error], [("error", "NotFoundError", 5, "x")], [True])
    assert "hangs" in compare.difference([right], [hang], [True])
    assert compare.difference([right, right], [right], [True, True])
    # Results that stock gRPC does not determine are not compared, nor any later ones; but a hang always counts.
    assert compare.mask([right, right], [right, wrong]) == [True, [False]]
    assert compare.difference([right, right], [right, wrong], [True, [False]]) is None
    assert "hangs" in compare.difference([right, right], [right, hang], [True, [False]])
    # After a failure, what the failure determines is compared, and the rest if that is everything.
    plain, look = {"fetch": ["1:0"]}, {"fetch": ["2:0"], "sure": ["2:0"]}
    assert compare.difference([error, right], [error, wrong], [True] * 2, [plain, plain]) is None
    assert compare.difference([error, right], [error, wrong], [True] * 2, [plain, look])
    assert compare.difference([error, right, right], [error, right, wrong], [True] * 3, [plain, look, plain]) is None
    assert compare.difference([error, right, right], [error, right, wrong], [True] * 3, [plain, dict(look, settles=True), plain])
    assert compare.difference([error, right, right], [error, right, wrong], [True] * 3, [plain, dict(plain, begins=True), plain])
    in_flight = {"fetch": [], "lanes": 2}
    assert compare.difference([error, right], [error, wrong], [True] * 2, [plain, in_flight]) is None
    # All runs over stock gRPC have to agree.
    assert compare.agreement([right, right], [[right, right]] * 8) == [True, True]
    assert compare.agreement([right, right], [[right, right], [right, wrong], [right, right]]) == [True, [False]]
    assert compare.agreement([right, right], [[right, right], [right, error], [right, wrong]]) == [True, False]
