"""The command ``starwire``."""

import argparse
import os
import pathlib
import runpy
import shutil
import sys

from starwire_run import protocols

_DESCRIPTION = "starwire: a faster transport for TensorFlow's parameter servers."
_RUN = """\
Runs a script whose servers ask for TensorFlow's protocol, grpc, over one of starwire's. The script is not changed and need not import
starwire. Every Python process that it starts gets the same protocol.

  starwire run train.py --epochs 3                      # a task of an existing cluster (TF_CONFIG, flags of the script)
  starwire run --protocol star_server -m package.train
  starwire run --ps 2 --worker 2 train.py               # a whole cluster on this machine, each task with its TF_CONFIG
  starwire run --ps 1 --worker 2 --chief train.py
  starwire run bash launch.sh                           # any other command
"""
_EPILOG = """\
Of a local cluster, the run is over when the tasks of the jobs in --wait have ended: the chief, or the workers if there is no chief. Its exit
status is that of the first task that failed, else 0; 130 after Ctrl-C. Scripts that take flags instead of TF_CONFIG can be given
{ps_hosts}, {worker_hosts}, {chief_hosts}, {job} and {index}, which are replaced in each task's arguments:

  starwire run --ps 1 --worker 2 train.py --ps_hosts={ps_hosts} --worker_hosts={worker_hosts} --job_name={job} --task_index={index}
"""
_NUMBER_LIMIT = 256


def main(arguments=None):
    """Returns the exit status."""
    version = runpy.run_path(str(pathlib.Path(__file__).resolve().parent.parent / "starwire" / "_version.py"))["__version__"]
    parser = argparse.ArgumentParser(prog="starwire", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"starwire {version}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    run = commands.add_parser(
        "run",
        help="run a script, or a local cluster, over starwire",
        description=_RUN,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="starwire run [OPTIONS] SCRIPT.py|-m MODULE|COMMAND [ARGUMENTS]",
        allow_abbrev=False,
    )
    _add_options(run)
    options = parser.parse_args(arguments)
    if options.module is not None and options.rest:
        # `-m` after the command belongs to the command; argparse cannot tell.
        run.error(f"put starwire's options before {options.rest[0]!r}")
    words = ["-m", *options.module] if options.module is not None else options.rest
    if words[:1] == ["--"]:
        words = words[1:]
    if not words or words == ["-m"]:
        run.error("what should be run? Give SCRIPT.py, -m MODULE or a command")
    try:
        protocol = protocols.check(options.protocol, "--protocol") if options.protocol else protocols.wanted() or protocols.DEFAULT
        command = _command(words)
        _check_library(protocol)
    except ValueError as error:
        run.error(str(error))
    environment = _environment(protocol)
    if options.ps is None and options.worker is None and not options.chief and not options.evaluator:
        given = [name for name in ("wait", "logs", "quiet", "linger", "grace") if getattr(options, name) != run.get_default(name)]
        if given:
            run.error(f"--{given[0]} needs a local cluster: --ps and --worker")
        sys.stdout.flush()
        try:
            os.execvpe(command[0], command, environment)
        except OSError as error:
            run.error(f"{command[0]!r} cannot be run: {error.strerror}")

    from starwire_run import cluster

    if "TF_CONFIG" in os.environ:
        run.error("TF_CONFIG is set, which describes another cluster: unset it, or leave --ps, --worker, --chief and --evaluator out")
    counts = {"chief": int(options.chief), "ps": options.ps or 0, "worker": 0, "evaluator": int(options.evaluator)}
    counts["worker"], most = options.worker or (0, 0)
    try:
        plan = cluster.plan(counts, options.wait, most)
    except ValueError as error:
        run.error(str(error))
    return cluster.run(plan, command, environment, protocol, options)


def _add_options(parser):
    def number(low, high, kind):
        def parse(text):
            try:
                value = kind(text)
            except ValueError:
                value = None
            if value is None or not low <= value <= high:
                raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low} to {high}")
            return value

        return parse

    def span(text):
        """``2`` or ``2..8``."""
        few, dots, most = text.partition("..")
        few, most = tasks(few), tasks(most if dots else few)
        if few > most:
            raise argparse.ArgumentTypeError(f"{text!r}: {few} is more than {most}")
        return few, most

    tasks, seconds = number(0, _NUMBER_LIMIT, int), number(0, 86400, float)
    parser.add_argument("--protocol", metavar="NAME", help=f"{', '.join(protocols.OURS)}, or grpc for TensorFlow's own ($STARWIRE_PROTOCOL, else {protocols.DEFAULT})")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, like python -m")
    group = parser.add_argument_group("a local cluster")
    group.add_argument("--ps", type=tasks, metavar="N", help="number of parameter servers")
    group.add_argument("--worker", type=span, metavar="N[..M]", help="number of workers; with ..M, SIGUSR1 adds one, up to M, and SIGUSR2 removes it")
    group.add_argument("--chief", action="store_true", help="with a chief (Estimator, ParameterServerStrategy)")
    group.add_argument("--evaluator", action="store_true", help="with an evaluator, which is not part of the ClusterSpec")
    group.add_argument("--wait", metavar="JOB,...", help="the run is over when these jobs' tasks have ended (chief, or worker if there is no chief)")
    group.add_argument("--linger", type=seconds, default=5.0, metavar="SECONDS", help="time that the other tasks, except ps, then have to end by themselves (%(default)g)")
    group.add_argument("--grace", type=seconds, default=5.0, metavar="SECONDS", help="time between asking a task to stop and killing it (%(default)g)")
    group.add_argument("--logs", type=pathlib.Path, metavar="DIR", help="folder for the tasks' log files (a new one in the temporary folder)")
    group.add_argument("--quiet", action="store_true", help="do not print the tasks' output, which is in the log files")
    group.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="auto: on a terminal, unless NO_COLOR is set")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _command(words):
    """Returns the command that runs what was given. Raises ValueError if there is no such thing."""
    first = words[0]
    if first == "-m":
        return [sys.executable, *words]
    if first.startswith("-"):
        raise ValueError(f"unknown option {first}; starwire run --help lists them")
    if first.endswith((".py", ".pyz")) or os.path.isfile(os.path.join(first, "__main__.py")):
        if not os.path.exists(first):
            raise ValueError(f"{first!r} does not exist")
        return [sys.executable, *words]
    if shutil.which(first) is None:
        raise ValueError(f"{first!r} is neither a Python script (.py) nor a command on PATH")
    return words


def _check_library(protocol):
    """What can be said about the library before TensorFlow is imported, which takes seconds."""
    path = os.environ.get("STARWIRE_LIBRARY")
    if protocol != protocols.STOCK and path and not os.path.isfile(path):
        raise ValueError(f"STARWIRE_LIBRARY names {path!r}, which is not a file")


def _environment(protocol):
    site = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
    given = os.environ.get("PYTHONPATH")
    # An empty one is the working directory.
    others = [folder for folder in given.split(os.pathsep) if folder != site] if given else []
    return dict(os.environ, STARWIRE_PROTOCOL=protocol, PYTHONPATH=os.pathsep.join([site, *others]))
