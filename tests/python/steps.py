"""Steps that the failure tests run in worker processes while failures happen."""

import contextlib
import os
import signal
import subprocess
import threading
import time

import zygote
from cluster import RemoteError, one, start_server, state, tf, worker_call
from waiting import HANGS, wait_for, wait_until


class Model:
    """Pulls and pushes a small and a large variable per step; every result is predictable."""

    def __init__(self, ps="/job:ps/task:0", worker="/job:worker/task:0", large=100_000, name="model"):
        self.steps = 0
        with tf.device(ps):
            self.small = one().get_variable(f"{name}_small", (16,), initializer=one().zeros_initializer())
            self.large = one().get_variable(f"{name}_large", (large,), initializer=one().zeros_initializer())
        with tf.device(worker):
            small, large_sum = self.small + 1.0, self.large + 2.0
        with tf.device(ps):
            pushed = tf.group(one().assign(self.small, small), one().assign(self.large, large_sum))
            with tf.control_dependencies([pushed]):
                self.sums = [tf.reduce_sum(self.small.read_value()) / 16.0, tf.reduce_max(self.large.read_value()), tf.reduce_min(self.large.read_value())]
        self.initializer = tf.group(self.small.initializer, self.large.initializer)

    def check(self, values):
        self.steps += 1
        expected = [1.0 * self.steps, 2.0 * self.steps, 2.0 * self.steps]
        assert [float(v) for v in values] == expected, (values, expected)


def run_steps(target, count, task=0, name="model", filters=False):
    """`filters`: restrict the session to the parameter servers and its own worker."""
    config = one().ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{task}"]) if filters else None
    with tf.Graph().as_default():
        model = Model(worker=f"/job:worker/task:{task}", name=name)
        with one().Session(target, config=config) as sess:
            sess.run(model.initializer)
            for _ in range(count):
                model.check(sess.run(model.sums))
    return model.steps


def run_until_stopped(target, stop_file, task=0, name="model"):
    """Runs steps, checking every result, until the file appears; another file has a byte for each. Returns the number of steps and the longest one in seconds."""
    longest = 0.0
    made = open(stop_file + ".steps", "ab", buffering=0)
    with tf.Graph().as_default():
        model = Model(worker=f"/job:worker/task:{task}", name=name)
        with one().Session(target) as sess:
            sess.run(model.initializer)
            model.check(sess.run(model.sums))  # not timed: the first step optimises the graph
            open(stop_file + ".started", "w").close()
            while not os.path.exists(stop_file):
                start = time.monotonic()
                model.check(sess.run(model.sums))
                longest = max(longest, time.monotonic() - start)
                made.write(b".")
    return model.steps, longest


class Never:
    """An element that never comes, so that a step with it waits on the ps, and the number of steps that have come that far."""

    def __init__(self, name):
        with tf.device("/job:ps/task:0"):
            come = tf.queue.FIFOQueue(100, [tf.int32], [()], shared_name=f"{name}_come")
            queue = tf.queue.FIFOQueue(1, [tf.float32], [()], shared_name=name)
            with tf.control_dependencies([come.enqueue(0)]):
                self.item = queue.dequeue()
            self.put, self.steps = queue.enqueue(1.0), come.size()

    def once_it_waits(self, target, act):
        """Calls `act` in another thread once a step, which begins after this, waits."""
        sessions = [one().Session(target, graph=self.steps.graph)]
        before = sessions[0].run(self.steps)

        def watch():
            sess = sessions.pop()
            while sess.run(self.steps) == before:
                time.sleep(0.01)
            sess.close()
            # TensorFlow deletes it now. If Python ended in the middle of that, it would unwind this thread through TensorFlow's noexcept code: SIGABRT.
            del sess
            act()

        threading.Thread(target=watch, daemon=True).start()


def run_until_error(target, started_file, blocked=False, timeout_ms=0, task=0):
    """Runs steps until one fails; with `blocked`, the last one waits on the ps indefinitely. Once steps run, or that one waits, there is the file.

    Returns (error type, message, seconds of the step that failed)."""
    config = one().ConfigProto(operation_timeout_in_ms=timeout_ms)
    with tf.Graph().as_default():
        model = Model(worker=f"/job:worker/task:{task}")
        never = Never(f"never{task}")
        with tf.device(f"/job:worker/task:{task}"):
            waiting = never.item + 1.0
        sess = state["failed session"] = one().Session(target, config=config)  # not closed here: over stock gRPC, that would wait for a dead peer
        sess.run(model.initializer)
        for _ in range(5):
            model.check(sess.run(model.sums))
        start = lambda: open(started_file, "w").close()  # noqa: E731
        never.once_it_waits(target, start) if blocked else start()
        try:
            while True:
                begun = time.monotonic()
                sess.run([waiting, model.sums] if blocked else model.sums)
        except tf.errors.OpError as error:
            return type(error).__name__, error.message, time.monotonic() - begun


def close_failed_session():
    state.pop("failed session").close()


def end_from_another_thread(target, how):
    """Ends a blocked step by closing the session or by the step's timeout; later steps must work. Returns (error, steps)."""
    with tf.Graph().as_default():
        model = Model()
        never = Never("never")
        with tf.device("/job:worker/task:0"):
            waiting = never.item + 1.0
        sess = one().Session(target)
        sess.run(model.initializer)
        model.check(sess.run(model.sums))
        # TensorFlow's master loses a timeout that comes before the step has begun on every task.
        sess.run(never.put)
        assert sess.run(waiting) == 2.0
        options = one().RunOptions(timeout_in_ms=3000) if how == "timeout" else None
        if how == "close":
            never.once_it_waits(target, sess.close)
        try:
            sess.run(waiting, options=options)
            error = None
        except (tf.errors.OpError, RuntimeError) as caught:
            error = type(caught).__name__, str(caught)
        if how == "timeout":
            for _ in range(20):
                model.check(sess.run(model.sums))
            sess.close()
    steps = run_steps(target, 5)
    return error, steps


def recover_monitored(target, directory, last_step, log):
    """Runs MonitoredTrainingSession while its ps dies; returns every global step seen, in order, and the step at each session's creation."""
    seen = []
    sessions = []

    class Watch(one().train.SessionRunHook):
        def after_create_session(self, session, coord):
            sessions.append(int(session.run(self.step)))

        def begin(self):
            self.step = one().train.get_global_step()

    with tf.Graph().as_default():
        with tf.device("/job:ps/task:0"):
            step = one().train.get_or_create_global_step()
            w = one().get_variable("w", (20000,), initializer=one().zeros_initializer())
        with tf.device("/job:worker/task:0"):
            update = w * 0.0 + 1.0
        with tf.device("/job:ps/task:0"):
            train_op = tf.group(one().assign_add(w, update), one().assign_add(step, 1))
            with tf.control_dependencies([train_op]):
                now, total = step.read_value(), tf.reduce_mean(w.read_value())
        hooks = [Watch(), one().train.StopAtStepHook(last_step=last_step)]
        with one().train.MonitoredTrainingSession(
            target, checkpoint_dir=directory, hooks=hooks, save_checkpoint_steps=20, save_summaries_steps=None, save_summaries_secs=None, log_step_count_steps=None
        ) as sess:
            while not sess.should_stop():
                number, mean = sess.run([now, total])
                assert int(number) == int(mean), (number, mean)
                seen.append(int(number))
                with open(log, "a") as out:
                    out.write(f"{int(number)}\n")
    return seen, sessions


def serve_again(spec, job, index, protocol, times):
    """Creates and stops a server several times in one process; runs steps on each."""
    import gc

    from cluster import drop_server

    out = []
    for number in range(times):
        target = start_server(spec, job, index, protocol)
        with tf.Graph().as_default():
            with tf.device(f"/job:{job}/task:{index}"):
                v = one().get_variable("v", initializer=float(number))
            with one().Session(target) as sess:
                sess.run(v.initializer)
                out.append(float(sess.run(v + 1.0)))
        drop_server()
        gc.collect()
    return out


def rss_mib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmRSS"))


def open_sockets():
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass
    return sum(link.startswith("socket:") for link in links)


def tensorflow_minor():
    """Returns for example (2, 21)."""
    return tuple(map(int, tf.__version__.split(".")[:2]))


def open_files():
    return len(os.listdir("/proc/self/fd"))


def threads():
    """Returns the number of threads by name."""
    names = {}
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as comm:
                name = comm.read().strip()
        except OSError:
            continue  # the thread just ended
        names[name] = names.get(name, 0) + 1
    return names


def keep_session(target):
    """Opens a session that outlives the call, so that the process ends with it open."""
    graph = tf.Graph()
    with graph.as_default():
        model = Model()
        sess = one().Session(target, graph=graph)
        sess.run(model.initializer)
        model.check(sess.run(model.sums))
    state["session"], state["model"] = sess, model
    return True


def use_kept_session():
    state["model"].check(state["session"].run(state["model"].sums))
    return state["model"].steps


def fork_with_server(protocol, spec):
    """Forks while a server runs: the child exits quickly without harm, however it exits, and cannot start a server."""
    results = []
    for leave in ("_exit", "exit", "server"):
        child = os.fork()
        if child == 0:
            if leave == "_exit":
                os._exit(7)
            if leave == "server":
                try:
                    start_server(spec, "worker", 0, protocol)
                except tf.errors.FailedPreconditionError as error:
                    os._exit(8 if "fork" in error.message else 9)
                os._exit(10)
            os.environ["FORKED"] = "1"
            subprocess.run(["true"], check=True)
            os._exit(7)
        deadline = time.monotonic() + HANGS
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        if not pid:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        results.append(zygote.exit_code(status) if pid else "hangs")
    return results


# In the test process. -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def training(cluster, tmp_path):
    """Runs steps in worker 0 during the block; checks their results, that some are made meanwhile, and that none hangs."""
    stop, made = tmp_path / "stop", tmp_path / "stop.steps"
    cluster["worker", 0].begin(run_until_stopped, cluster.target("worker", 0), str(stop))
    wait_for(f"{stop}.started")
    before = made.stat().st_size
    try:
        yield
        wait_until(lambda: cluster["worker", 0].ready() or made.stat().st_size >= before + 3, 60, "the training goes on")
    finally:
        stop.touch()
        _, longest = cluster["worker", 0].result(60)
        stop.unlink()
    assert longest < HANGS, f"a step took {longest:.1f} s"


def attempt(cluster, timeout=60):
    """Returns the result of steps in worker 0, or their error; the test's timeout is the error of an initialisation that never ends."""
    try:
        return worker_call(cluster, run_steps, 5, timeout=timeout)
    except RemoteError as error:
        return error
