"""tests/reverted: what counts as found again, and that its table, its patches, today's sources and docs/record.md say the same."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "reverted"), str(ROOT / "tests" / "runner")]

import deep  # noqa: E402
import jobs  # noqa: E402
import run  # noqa: E402
from fixes import FIXES, Fix  # noqa: E402

PATCHES = [fix.patch for fix in FIXES]


@pytest.fixture
def tree(tmp_path):
    """A folder inside a repository, as target/reverted/tree is."""
    subprocess.run(["git", "init", "-q", tmp_path / "repository"], check=True)
    made = tmp_path / "repository" / "target" / "tree"
    made.mkdir(parents=True)
    return made


def test_the_record_names_these_fixes_and_seeds():
    text = (ROOT / "docs/record.md").read_text()
    lines = re.findall(r"^\* \[.*\]\(\.\./tests/reverted/(.+)\.patch\).*: seeds? (.*)$", text, re.MULTILINE)
    recorded = [(patch, tuple(int(seed) for seed in re.findall(r"\d+", seeds))) for patch, seeds in lines]
    assert sorted(recorded) == sorted((fix.patch, fix.seeds) for fix in FIXES)


def test_each_patch_is_in_the_table():
    found = {path.stem for path in (ROOT / "tests/reverted").glob("*.patch")}
    assert found == set(PATCHES) and len(PATCHES) == len(found)


@pytest.mark.parametrize("patch", PATCHES)
def test_each_patch_applies_to_todays_sources(patch, tree):
    path = ROOT / f"tests/reverted/{patch}.patch"
    names = {Path(name) for name in re.findall(r"^\+\+\+ b/(.*)$", path.read_text(), re.MULTILINE)}
    assert names and all(name.parts[0] == "crates" for name in names)
    run.copy(names, tree)
    run.apply(path, tree)
    assert all((tree / name).read_bytes() != (ROOT / name).read_bytes() for name in names)


def test_a_patch_that_does_not_apply_says_what_to_do(tree):
    patch = ROOT / f"tests/reverted/{PATCHES[0]}.patch"
    for name in re.findall(r"^\+\+\+ b/(.*)$", patch.read_text(), re.MULTILINE):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("// other code\n")
    with pytest.raises(run.Wrong, match=f"take the fix out of today's sources by hand, .*tests/reverted/{PATCHES[0]}.patch"):
        run.apply(patch, tree)


def test_a_copy_without_its_patch_is_equal_again(tree):
    name, same = Path("crates/engine/src/links/open.rs"), Path("crates/engine/src/links/mod.rs")
    names = {name, same}
    run.copy(names, tree)
    os.utime(tree / same, (1, 1))
    (tree / name).write_text("// a patch")
    (tree / "left").write_text("by somebody")
    run.copy(names, tree)
    assert {path.relative_to(tree) for path in tree.rglob("*") if path.is_file()} == names
    assert all((tree / path).read_bytes() == (ROOT / path).read_bytes() for path in names)
    # Cargo goes by times: only what changed is built again.
    assert (tree / same).stat().st_mtime == 1 and (tree / name).stat().st_mtime > 1


def test_all_that_cargo_needs_is_copied():
    names = run.sources()
    assert {Path("Cargo.lock"), Path("Cargo.toml"), Path("crates/engine/src/control/page.html"), Path("crates/planner/src/ops.txt")} <= names


def simulated(tree, script):
    """What simulate() makes of a test binary."""
    binary = tree / "binary"
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)
    (tree / "crates/engine").mkdir(parents=True)
    return run.simulate(str(binary), 5, tree)


PASSES = 'echo "simulated 1 seeds to $STARWIRE_SIM_SEED: 9 s in $STARWIRE_SIM_SECONDS s"'
FAILS = 'echo "star call 7 runs twice"; echo "the simulation of seed $STARWIRE_SIM_SEED failed"; exit 101'


def test_a_seed_that_passes_does_not_find_the_defect(tree):
    found = simulated(tree, PASSES)
    run.check(found, 5)
    with pytest.raises(run.Wrong, match="does not find the defect any more.*docs/record.md"):
        run.check(found, 5, "runs twice")


def test_a_seed_has_to_fail_for_the_reason_that_is_expected(tree):
    found = simulated(tree, FAILS)
    run.check(found, 5, "runs twice")
    with pytest.raises(run.Wrong, match="for another reason; expected: cannot reach\n.*runs twice"):
        run.check(found, 5, "cannot reach")
    with pytest.raises(run.Wrong, match="seed 5 fails with all fixes"):
        run.check(found, 5)


@pytest.mark.parametrize("script", ["echo '0 passed; 900 filtered out'", "echo 'simulated 1 seeds to 51: 9 s'", f"{PASSES}; exit 101", "kill -9 $$"])
def test_a_seed_that_was_not_run_is_neither(tree, script):
    with pytest.raises(run.Wrong, match="did not run seed 5"):
        simulated(tree, script)


def test_each_fix_is_tried_and_all_seeds_with_all_fixes(monkeypatch, tree):
    tried, applied = [], []
    monkeypatch.setattr(run, "copy", lambda *_: applied.clear())
    monkeypatch.setattr(run, "apply", lambda patch, _: applied.append(patch.stem))
    monkeypatch.setattr(run, "build", lambda _: "binary")

    def simulate(_, seed, __):
        tried.append((*applied, seed))
        return not applied, "words"

    monkeypatch.setattr(run, "simulate", simulate)
    wrong = run.run([Fix("a", (3, 2), "other"), Fix("b", (3, 1), "words")])
    assert tried == [(1,), (2,), (3,), ("a", 3), ("b", 3), ("b", 1)]
    assert len(wrong) == 1 and wrong[0].startswith("a: seed 3 fails, but for another reason")


def test_one_binary_is_run():
    assert run.executable('{"executable":null}\n{"executable":"/a"}\n{"reason":"build-finished"}') == "/a"
    with pytest.raises(run.Wrong, match="0 test binaries"):
        run.executable('{"executable":null}')


def test_an_unknown_fix_is_an_error():
    done = subprocess.run([sys.executable, run.__file__, "nonsense"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "there is no fix nonsense; there are 237cd30 " in done.stderr, done.stderr


def test_the_deep_suite_has_the_job():
    job = next(job for job in deep.jobs(jobs.Settings("/nowhere")) if job.name == "reverted")
    assert (ROOT / job.command.split()[-1]).samefile(run.__file__)


def test_what_an_interrupted_build_has_left_is_not_used(tmp_path):
    left = tmp_path / "build/debug/incremental/of the engine"
    left.mkdir(parents=True)
    run.begin_build(tmp_path).unlink()
    run.begin_build(tmp_path)
    assert left.exists()
    run.begin_build(tmp_path)
    assert not left.exists()
