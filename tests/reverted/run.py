"""usage: tests/reverted/run.py [FIX…]

Takes each fix of fixes.py out of a copy of the sources, and expects that the simulation of crates/engine then finds the defect again, with the seeds that
docs/record.md names. With all fixes, the same seeds have to pass. The copy and what is built from it are in target/reverted."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "target" / "reverted"
sys.path.insert(0, str(HERE))
sys.dont_write_bytecode = True

from fixes import FIXES  # noqa: E402

TEST = "simulation::requests_end_as_they_should_with_any_seed"
# What cargo needs of the workspace to build the crate of the engine.
SOURCES = ("*.rs", "*.toml", "Cargo.lock", "crates")
LINES = 40


class Wrong(Exception):
    """Something is not as it has to be, and what to do about it."""


def sources():
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *SOURCES]
    names = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout.decode().split("\0")
    return {Path(name) for name in names if name and (ROOT / name).is_file()}


def copy(names, tree):
    """Makes the tree equal to the sources. A file that is equal already keeps its time, so that cargo does not build it again."""
    if tree.exists():
        for path in [path for path in tree.rglob("*") if path.is_file() and path.relative_to(tree) not in names]:
            path.unlink()
    for name in names:
        content, to = (ROOT / name).read_bytes(), tree / name
        if not to.is_file() or to.read_bytes() != content:
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(content)


def apply(patch, tree):
    # Not inside the repository: git would look for its files there, and say nothing about those that it does not know.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(["git", "apply", patch], cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise Wrong(
            f"{patch.name} does not apply any more, as the code of the fix has changed: take the fix out of today's sources by hand, write `git diff` to "
            f"tests/reverted/{patch.name} below its first line, and run tests/reverted/run.py {patch.stem} to see that its seeds find the defect.\n"
            f"{done.stdout}"
        )


def begin_build(folder):
    """Forgets what an interrupted build has left, which may not link. Returns the mark of a build, to be removed when it has ended."""
    mark = folder / "building"
    if mark.exists():
        shutil.rmtree(folder / "build" / "debug" / "incremental", ignore_errors=True)
    mark.touch()
    return mark


def build(tree):
    """Returns the test binary of the engine's crate."""
    mark = begin_build(FOLDER)
    # Incremental: a patch changes a function or two.
    environment = {**os.environ, "CARGO_TARGET_DIR": str(FOLDER / "build"), "CARGO_INCREMENTAL": "1"}
    arguments = "test --quiet --package starwire-engine --lib --no-run --message-format json-render-diagnostics"
    command = shlex.split(os.environ.get("CARGO") or "cargo") + arguments.split()
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    mark.unlink()
    if done.returncode != 0:
        raise Wrong(f"it cannot be built:\n{done.stderr}")
    return executable(done.stdout)


def executable(messages):
    found = [message["executable"] for message in map(json.loads, messages.splitlines()) if message.get("executable")]
    if len(found) != 1:
        raise Wrong(f"cargo names {len(found)} test binaries of the engine's crate: {found}")
    return found[0]


def simulate(binary, seed, tree):
    """Returns whether the seed passes, and its output."""
    # After no seconds, the test ends with its first seed.
    environment = {**os.environ, "STARWIRE_SIM_SEED": str(seed), "STARWIRE_SIM_SECONDS": "0", "RUST_BACKTRACE": "0"}
    command = [binary, "--ignored", "--exact", "--nocapture", TEST]
    # The test has a limit of its own.
    folder, output = tree / "crates" / "engine", {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    done = subprocess.run(command, cwd=folder, env=environment, **output)
    passes = done.returncode == 0 and f"simulated 1 seeds to {seed}:" in done.stdout
    if not passes and f"the simulation of seed {seed} failed" not in done.stdout:
        raise Wrong(f"the test {TEST} did not run seed {seed} to its end (exit code {done.returncode}):\n{tail(done.stdout)}")
    return passes, done.stdout


def tail(text):
    return "\n".join(text.splitlines()[-LINES:])


def check(found, seed, says=None):
    """`says`: what the output of a seed that has to fail says; None: it has to pass."""
    passes, output = found
    if says is None and not passes:
        raise Wrong(f"seed {seed} fails with all fixes: the simulation has found something, or is wrong.\n{tail(output)}")
    if says is not None and passes:
        raise Wrong(
            f"seed {seed} does not find the defect any more, though the fix is taken out. What a seed does changes with the simulation and with the code: look "
            "for another one (STARWIRE_SIM_SEED=1 make simulate, in a copy with the patch), and correct tests/reverted/fixes.py and docs/record.md. If none "
            "finds it, say so in docs/record.md."
        )
    if says is not None and says not in output:
        raise Wrong(f"seed {seed} fails, but for another reason; expected: {says}\n{tail(output)}")


def run(fixes):
    """Returns what is wrong."""
    names, tree, wrong = sources(), FOLDER / "tree", []
    seeds = sorted({seed for fix in fixes for seed in fix.seeds})
    cases = [("all fixes", None, seeds, None), *((fix.patch, HERE / f"{fix.patch}.patch", fix.seeds, fix.says) for fix in fixes)]
    for name, patch, seeds, says in cases:
        began = time.monotonic()
        try:
            copy(names, tree)
            if patch:
                apply(patch, tree)
            binary = build(tree)
            built = time.monotonic() - began
            for seed in seeds:
                check(simulate(binary, seed, tree), seed, says)
        except Wrong as error:
            wrong.append(f"{name}: {error}")
            print(f"{name}: wrong", flush=True)
        else:
            what = "passes" if says is None else "found again"
            print(f"{name}: {what} with {', '.join(map(str, seeds))} ({built:.0f} s to build, {time.monotonic() - began - built:.0f} s)", flush=True)
    return wrong


def main():
    known = [fix.patch for fix in FIXES]
    unknown = [name for name in sys.argv[1:] if name not in known]
    if unknown:
        sys.exit(f"tests/reverted/run.py: there is no fix {' and no fix '.join(unknown)}; there are {' '.join(known)}")
    wrong = run([fix for fix in FIXES if not sys.argv[1:] or fix.patch in sys.argv[1:]])
    for text in wrong:
        print(f"\nFAILED {text}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
