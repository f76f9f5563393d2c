"""The parts that benchmarks of clusters share: arguments, the loop over the cases, results. Import it first: numpy must find the environment set up."""

import dataclasses
import os
import pathlib
import shutil
import sys
import time

# Before numpy is imported: this process must have no threads when it forks the others.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Same path for all columns: no proxies between local processes.
for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
    os.environ.pop(name, None)

import authority
import columns as columns_module
from cluster import BenchError, Loopback

EQUAL_IDS = "request was received twice"


def add_arguments(parser, protocols, out):
    parser.add_argument("--library", help="path of libstarwire.so (not needed if every protocol is stock)")
    parser.add_argument("--protocols", default=protocols, help="columns, the first is what the others are compared with (default %(default)s)")
    parser.add_argument("--cases", default="", help="only these, by name; zoo: the models of DeepRec's zoo")
    parser.add_argument("--out", default=out, type=pathlib.Path)
    parser.add_argument("--rounds", type=int, help="turns per column and case")
    parser.add_argument("--seconds", type=float, help="length of a turn")


@dataclasses.dataclass
class Suite:
    columns: list
    library: str
    rounds: int
    seconds: float
    out: pathlib.Path
    logs: pathlib.Path

    @classmethod
    def of(cls, arguments, rounds, seconds):
        """`rounds`, `seconds`: without these arguments."""
        columns = columns_module.parse(arguments.protocols)
        library = arguments.library and str(pathlib.Path(arguments.library).resolve())
        if any(column.needs_library for column in columns) and not (library and os.path.exists(library)):
            sys.exit(f"bench: --library is needed for {', '.join(c.name for c in columns if c.needs_library)}; given: {arguments.library}")
        out = arguments.out.resolve()
        logs = out / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        if any(column.tls for column in columns):
            shutil.rmtree(out / "tls", ignore_errors=True)
            identity = authority.identity_for_all(out / "tls")
            columns = [dataclasses.replace(column, env={**column.env, **identity}) if column.tls else column for column in columns]
        # Files in the caller's directory (such as an .endpoint_map) must not affect the measurement.
        scratch = out / "cwd"
        scratch.mkdir(exist_ok=True)
        os.chdir(scratch)
        return cls(columns, library, arguments.rounds or rounds, arguments.seconds or seconds, out, logs)

    def results(self, quick):
        import machine

        return {"machine": machine.describe(), "columns": [column.name for column in self.columns], "rounds": self.rounds, "window_s": self.seconds, "quick": quick, "failures": []}

    def run(self, cases, limits, with_local, network=Loopback()):
        """→ ({case: result}, [failure, …])"""
        import measure

        results, failures = {}, []
        for case in cases:
            start = time.monotonic()
            run = lambda: measure.run_case(case, self.columns, self.library, self.logs, self.rounds, self.seconds, limits, with_local, network)
            try:
                try:
                    result = run()
                except BenchError as error:
                    # TensorFlow 2.21 draws request ids from generators with 32-bit seeds: about once in 10^5 steps two are equal, and stock grpc fails the step.
                    if EQUAL_IDS not in str(error):
                        raise
                    print(f"{case.name}: again, because TensorFlow took two requests for one: {error}", flush=True)
                    result = run()
            except BenchError as error:
                failures.append(str(error))
                print(f"{case.name}: FAILED: {error}", flush=True)
                continue
            result["examples"] = case.examples
            results[case.name] = result
            rates = []
            for column in self.columns:
                mine = result["columns"][column.name]
                rates.append(f"{column.name} {mine['steps_per_s']['median']:.1f} steps/s ({mine['ratio']['steps_per_s']['median']:.2f}x)")
            print(f"{case.name}: {', '.join(rates)}; checked; {time.monotonic() - start:.1f} s", flush=True)
        return results, failures


def select(cases, names):
    """The cases in a comma-separated list of names; all without one."""
    import zoo

    wanted = [case for name in names.split(",") if name for case in (zoo.NAMES if name == "zoo" else [name])]
    unknown = set(wanted) - {case.name for case in cases}
    if unknown:
        sys.exit(f"bench: no case {', '.join(sorted(unknown))}; there are {', '.join(case.name for case in cases)}")
    return [case for case in cases if not wanted or case.name in wanted]
