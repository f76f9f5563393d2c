"""The tasks of the soak: a small recommender, trained by MonitoredTrainingSession in sessions that restart after errors."""

import ctypes
import gc
import json
import os
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "python"))

from cluster import tf  # noqa: E402

FEATURES, ROWS, WIDTH, BATCH = 6, 2_000, 16, 64


def _loss(servers, task):
    one = tf.compat.v1
    place = one.train.replica_device_setter(ps_tasks=servers, worker_device=f"/job:worker/task:{task}")
    with one.device(place):
        step = one.train.get_or_create_global_step()
        parts = []
        for feature in range(FEATURES):
            table = one.get_variable(f"table{feature}", (ROWS, WIDTH), partitioner=one.fixed_size_partitioner(servers), use_resource=feature % 2 == 0)
            ids = tf.random.uniform((BATCH,), 0, ROWS, tf.int32)
            parts.append(one.nn.embedding_lookup(table, ids, partition_strategy="div"))
        hidden = tf.concat(parts, 1)
        for layer, width in enumerate((32, 1)):
            weights = one.get_variable(f"weights{layer}", (hidden.shape[1], width))
            hidden = tf.tanh(hidden @ weights + one.get_variable(f"bias{layer}", (width,)))
        loss = tf.reduce_mean(tf.square(hidden - 0.3))
        return one.train.AdagradOptimizer(0.05).minimize(loss, global_step=step), loss


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]


def heap():
    """Returns the bytes that malloc has handed out and those it keeps free, or nothing if the C library cannot tell."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return {}
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return {"used": info.uordblks + info.hblkhd, "free": info.fordblks}


def counted(target, task, servers):
    """Returns the global step."""
    with tf.Graph().as_default():
        _loss(servers, task)
        with tf.compat.v1.Session(target, config=tf.compat.v1.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{task}"])) as session:
            return int(session.run(tf.compat.v1.train.get_global_step()))


def train(target, task, servers, checkpoints, progress, end, steps_per_second=0):
    """Trains until the file `end` exists. Appends lines to `progress`: time, event, and its detail, such as the number of steps or the error. Ends
    sessions now and then, so that the soak covers their clean-up. Without checkpoints, the variables are initialised once."""
    one = tf.compat.v1
    started, steps = time.monotonic(), 0
    with open(progress, "a", buffering=1) as log:

        def say(what, detail):
            log.write(f"{time.time():.1f} {what} {detail}\n")

        while not os.path.exists(end):
            try:
                with tf.Graph().as_default():
                    push, loss = _loss(servers, task)
                    config = one.ConfigProto(operation_timeout_in_ms=60_000, device_filters=["/job:ps", f"/job:worker/task:{task}"])
                    with one.train.MonitoredTrainingSession(
                        target, is_chief=task == 0 and (checkpoints or not steps), checkpoint_dir=checkpoints, save_checkpoint_secs=None, save_checkpoint_steps=500, save_summaries_steps=None,
                        log_step_count_steps=None, config=config, stop_grace_period_secs=5, max_wait_secs=60,
                    ) as session:
                        say("session", steps)
                        leave = time.monotonic() + 20 + 10 * task
                        while time.monotonic() < leave and not os.path.exists(end):
                            began = time.monotonic()
                            _, value = session.run([push, loss])
                            steps += 1
                            if steps_per_second:
                                time.sleep(max(0, began + 1 / steps_per_second - time.monotonic()))
                            if not 0 <= value < 2:
                                raise AssertionError(f"the loss is {value}")
                            if steps % 20 == 0:
                                say("steps", steps)
                            if steps % 200 == 0:
                                say("heap", json.dumps(heap()))
            except tf.errors.OpError as error:
                say("error", f"{type(error).__name__} {error.message.splitlines()[0][:300]}")
                time.sleep(0.2)
            gc.collect()  # graphs contain reference cycles
    return steps, time.monotonic() - started
