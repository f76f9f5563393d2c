"""target/test/times.json: the time of each job and test, and what it waited for."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def of_pytest(run):
    """Returns the records that pytest_limits.py wrote, and one of the test with which the process ended."""
    records = [json.loads(line) for line in run.times.read_text().splitlines()] if run.times.exists() else []
    now = run.times.with_name(run.times.name + ".now")
    if now.exists() and now.read_text() not in {f"{record['file']}::{record['test']}" for record in records}:
        file, _, test = now.read_text().partition("::")
        records.append({"file": file, "test": test, "wall": 0.0, "cpu": 0.0, "waited": {}, "verdict": "failed"})
    return records


def junit(root, profile):
    return Path(root) / "target" / "nextest" / profile / "junit.xml"


def of_nextest(run, root):
    path = junit(root, "verbs" if "--profile verbs" in run.job.command else "default")
    if not path.exists():
        return []
    records, report = [], ElementTree.parse(path).getroot()
    # If nextest does not get as far as to write one, that of an earlier run must not stand for it.
    path.unlink()
    for case in report.iter("testcase"):
        verdict = "failed" if case.find("failure") is not None or case.find("error") is not None else "passed"
        records.append({"file": case.get("classname"), "test": case.get("name"), "wall": float(case.get("time")), "cpu": None, "waited": {}, "verdict": verdict})
    return records


def of_gtest_log(run):
    """What gtest printed: it writes no report if a test ends its process, and that test is the last that it names."""
    records = {}
    for how, name, milliseconds in re.findall(r"^\[ +(RUN|OK|FAILED|SKIPPED) +\] ([^\s,]+)(?:.* \((\d+) ms\))?$", run.log.read_text(errors="replace"), re.MULTILINE):
        if how == "RUN" or milliseconds:  # the list at the end has no times
            verdict = {"OK": "passed", "SKIPPED": "skipped"}.get(how, "failed")
            suite, _, test = name.partition(".")
            records[name] = {"file": suite, "test": test, "wall": int(milliseconds or 0) / 1000, "cpu": None, "waited": {}, "verdict": verdict}
    return list(records.values())


def of_gtest(run):
    if not run.times.exists():
        return of_gtest_log(run)
    records = []
    for suite in json.loads(run.times.read_text())["testsuites"]:
        for case in suite["testsuite"]:
            verdict = "failed" if case.get("failures") else "skipped" if case["result"] == "SKIPPED" else "passed"
            wall = float(case["time"].rstrip("s"))
            records.append({"file": suite["name"], "test": case["name"], "wall": wall, "cpu": None, "waited": {}, "verdict": verdict})
    return records


class Times:
    def __init__(self, root):
        self.root, self.jobs, self.tests = root, [], []
        self.failed = {}  # by job: the records of its failed tests
        for profile in ("default", "verbs"):
            junit(root, profile).unlink(missing_ok=True)

    def add(self, run):
        tests, cpu = [], run.cpu
        try:
            if run.job.report == "pytest":
                tests = of_pytest(run)
                # Tasks are children of the zygote, whose CPU time is not the job's.
                cpu = max(cpu, sum(test["cpu"] for test in tests))
            elif run.job.report == "nextest":
                tests = of_nextest(run, self.root)
            elif run.job.report == "gtest":
                tests = of_gtest(run)
        except (ValueError, ElementTree.ParseError) as error:
            with open(run.log, "a") as log:
                log.write(f"\nscripts/test: the report of {run.job.name} is cut off: {error}\n")
        is_red = not tests or any(test["verdict"] == "failed" for test in tests)
        if run.verdict == "passed" and run.job.report and is_red:
            run.verdict = "FAILED"
            with open(run.log, "a") as log:
                log.write(f"\nscripts/test: {run.job.name} ended well, but with {'a test that failed or did not end' if tests else 'no test'}\n")
        if not tests:
            tests = [{"file": run.job.name, "test": "(all)", "wall": round(run.wall, 3), "cpu": round(cpu, 3), "waited": {}, "verdict": run.verdict.lower()}]
        self.failed[run.job.name] = [test for test in tests if test["verdict"] == "failed" and test["test"] != "(all)"]
        self.jobs.append({"job": run.job.name, "wall": round(run.wall, 3), "cpu": round(cpu, 3), "needed": run.waited_for, "queued": round(run.queued, 3), "verdict": run.verdict, "tests": len(tests)})
        self.tests += [{"stage": run.job.stage, **test} for test in tests]
        return self.jobs[-1]

    def write(self, path, seconds):
        text = json.dumps({"seconds": round(seconds, 1), "jobs": self.jobs, "tests": self.tests}, indent=1)
        Path(path).write_text(text + "\n")

    def count(self, verdict):
        return sum(test["verdict"] == verdict for test in self.tests)

    def slowest(self, count=20):
        """Returns lines about the tests that took longest."""
        lines = []
        for test in sorted(self.tests, key=lambda test: -test["wall"])[:count]:
            cpu = f"{test['cpu']:6.1f}" if test["cpu"] is not None else "     ?"
            waited = ", ".join(f"{seconds:.0f} s for {what}" for what, seconds in sorted(test["waited"].items(), key=lambda pair: -pair[1]) if seconds > 0.5)
            lines.append(f"{test['wall']:6.1f} s  cpu {cpu} s  {test['stage']}: {test['file'].rpartition('/')[2]}::{test['test']}{'  (waited ' + waited + ')' if waited else ''}")
        return lines
