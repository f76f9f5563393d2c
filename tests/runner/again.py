"""How to run again what failed: the exact command for each failed test, or for the job if it counts as one."""

import re
import shlex

MOST = 20


def command(settings, job, is_deep):
    """The whole job."""
    seed = f" SEED={job.seed}" if job.seed is not None else ""
    return f"make test{'-deep' if is_deep else ''} ONLY={job.name.partition('#')[0]}{settings.told}{seed}"


def quoted(text):
    """One word of a shell's command, with single quotes inside if it needs any."""
    return f'"{text}"' if not re.search(r'["$`\\!]', text) else shlex.quote(text)


def of_pytest(whole, run, failed):
    names = [f"{test['file']}::{test['test']}" for test in failed]
    now = run.times.with_name(run.times.name + ".now")
    if not names and now.exists():  # the process ended with the test that ran
        names = [now.read_text()]
    return [f"{whole} PYTEST_ARGS={quoted(shlex.quote(name).replace('$', '$$'))}" for name in names]


def of_nextest(settings, run, failed):
    environment = "".join(f"{name}={value} " for name, value in run.job.environment.items())
    profile = " --profile verbs" if "--profile verbs" in run.job.command else ""
    return [
        f"{environment}{settings.cargo} nextest run{profile} -E {shlex.quote('binary_id(={file}) & test(={test})'.format(**test))}" for test in failed
    ]


def of_cargo(settings, run):
    """`cargo test` prints the failed tests of a program, then the arguments that choose the program."""
    environment = "".join(f"{name}={value} " for name, value in run.job.environment.items())
    found, names = [], []
    for test, program in re.findall(r"^test (\S+)(?: - should panic)? \.\.\. FAILED$|to rerun pass `(.*)`", run.log.read_text(errors="replace"), re.MULTILINE):
        if test:
            names.append(test)
        else:
            found += [f"{environment}{settings.cargo} test {program} -- --exact {name}" for name in names]
            names = []
    return found


def commands(settings, run, failed, is_deep=False):
    """`failed`: the records of the job's failed tests."""
    job, whole = run.job, command(settings, run.job, is_deep)
    found = []
    if job.report == "pytest":
        found = of_pytest(whole, run, failed)
    elif job.report == "nextest":
        found = of_nextest(settings, run, failed)
    elif job.report == "gtest":
        # gtest reads the variable itself.
        found = [f"{whole} GTEST_FILTER={shlex.quote(test['file'] + '.' + test['test'])}" for test in failed]
    elif f"{settings.cargo} test " in job.command:
        found = of_cargo(settings, run)
    return (found[:MOST] + [f"{whole}  # all {len(found)}"] * (len(found) > MOST)) or [whole]
