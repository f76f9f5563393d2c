"""Forks task processes that have already imported TensorFlow.

Importing TensorFlow takes seconds, too long for a suite that starts hundreds of processes. This process imports it once, stays as single-threaded as possible,
and forks a child per request. It can also run one task directly (`--task ADDRESS`), for tests of process start itself, and be shared by several test
processes (`--serve ADDRESS`, scripts/test): each gets a fork of it, which forks its tasks.

Protocol with the test process (multiprocessing.connection over a unix socket; the address is the first argument):
  ("fork", task_address, log_path, environment, directory) -> pid
  ("poll", pid) -> None while it runs, else its exit status as returned by exit_code
"""

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import traceback
from multiprocessing.connection import Client, Listener

PR_SET_PDEATHSIG = 1


class Leave(BaseException):
    """Unwinds a forked child to the top, so that it ends like a normal interpreter (atexit, finalisers, static destructors)."""


def exit_code(status):
    """As os.waitstatus_to_exitcode, which Python 3.7 lacks."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def die_with_parent():
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def redirect(log_path):
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def describe(error):
    """Turns an exception into plain data: TensorFlow's exception classes cannot be pickled."""
    return {
        "types": [c.__name__ for c in type(error).__mro__],
        "message": getattr(error, "message", None) or str(error),
        "code": getattr(error, "error_code", None),
        "traceback": "".join(traceback.format_tb(error.__traceback__)[-8:]),
    }


def interruption(error):
    """Returns what a signal's handler raised, if that led to this error: TensorFlow may go on when it has called Python, and fail by something else."""
    while error is not None and not isinstance(error, (KeyboardInterrupt, SystemExit)):
        error = error.__cause__ or error.__context__
    return error


def serve_task(address):
    """Main loop of a task process: runs the functions that the test sends, one by one, on the main thread."""
    connection = Client(address, family="AF_UNIX")
    connection.send(("hello", os.getpid()))
    while True:
        try:
            order = connection.recv()
        except EOFError:
            return 1  # the test has ended
        if order[0] == "exit":
            return order[1]
        _, function, args, kwargs = order
        try:
            answer = ("value", function(*args, **kwargs))
        except Exception as error:  # report everything; the test decides
            interrupt = interruption(error)
            if interrupt is not None:
                raise interrupt
            answer = ("error", describe(error))
        try:
            connection.send(answer)
        except (TypeError, AttributeError, ValueError) as error:
            connection.send(("error", describe(error)))


def fork(control, request):
    _, address, log_path, environment, directory = request
    pid = os.fork()
    if pid:
        return pid
    die_with_parent()
    control.close()
    redirect(log_path)
    os.environ.update(environment)
    os.chdir(directory)
    raise Leave(address)


class Session(BaseException):
    """Unwinds a fork of a shared zygote to the top, where it serves one test process."""


def load():
    import tensorflow  # noqa: F401  (the point of this process)

    import cluster  # noqa: F401

    with contextlib.suppress(ImportError):  # the fuzzer needs none
        import pytest  # noqa: F401  (test modules import it)

    # Modules that TensorFlow loads lazily and that most tests need.
    tensorflow.compat.v1.Session  # noqa: B018
    tensorflow.distribute  # noqa: B018
    # The default of TensorFlow 2. Reference variables keep the shape of the first graph that uses their name.
    tensorflow.compat.v1.enable_resource_variables()
    # The collections of a fork, one of them at its end, would visit and so copy the memory of all modules: a second.
    gc.freeze()
    # By the defaults, a program that builds graphs collects all the time.
    gc.set_threshold(20_000, 20, 20)


def serve_sessions(address):
    """Forks a zygote for each test process that asks: ("session", its address, environment, log path) -> pid."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    listener = Listener(address, family="AF_UNIX")
    while True:
        with listener.accept() as client:
            try:
                _, session, environment, log_path = client.recv()
            except (EOFError, OSError):
                continue  # a test process that was ended as it asked
            pid = os.fork()
            if pid:
                with contextlib.suppress(OSError):
                    client.send(pid)
                continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent()
        # Closing the listener would remove its path.
        os.close(listener._listener._socket.detach())
        redirect(log_path)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
        raise Session(session)


def run_zygote(address):
    exited = {}
    control = Client(address, family="AF_UNIX")
    control.send(("ready", os.getpid()))
    while True:
        try:
            request = control.recv()
        except EOFError:
            return 0
        if request[0] == "fork":
            pid = fork(control, request)
            # The kernel may reuse the number of a process that has ended.
            exited.pop(pid, None)
            control.send(pid)
        elif request[0] == "poll":
            pid = request[1]
            if pid not in exited:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    exited[pid] = exit_code(status)
            control.send(exited.get(pid))


def main():
    die_with_parent()
    # A shell without job control starts background processes with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    if sys.argv[1] == "--task":
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        return serve_task(sys.argv[2])
    load()
    try:
        if sys.argv[1] != "--serve":
            return run_zygote(sys.argv[1])
        try:
            serve_sessions(sys.argv[2])
        except Session as session:
            return run_zygote(session.args[0])
    except Leave as leave:
        address = leave.args[0]
    return serve_task(address)


if __name__ == "__main__":
    sys.exit(main())
