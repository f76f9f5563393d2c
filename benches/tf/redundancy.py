"""How much of what a step of Wide & Deep sends is redundant, exactly: rows that a worker has already, ids, and the bits of floats. Without a network.

    benches/tf/redundancy.py [--batch 512] [--zipf 1.3]
"""

import argparse
import os
import sys
import time
import zlib
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import cases  # noqa: E402
import models  # noqa: E402

ROWS = np.array(models.Criteo.rows)
START = np.concatenate([[0], np.cumsum(ROWS)[:-1]])


class Worker:
    """What a worker that keeps every row that it has seen knows of each: how many updates it had then."""

    def __init__(self):
        self.pulled, self.pushed = np.full(ROWS.sum(), -1), np.full(ROWS.sum(), -1)


def seen_before(workers, batch, steps, zipf):
    """Returns, of the rows that are pulled in the second half, the shares by what has happened to them since the same worker pulled them last; and the bits of an id
    that is sorted, as a difference, in blocks of one width per field."""
    random, updates = np.random.RandomState(1), np.zeros(ROWS.sum(), int)
    all_workers, found, bits, ids = [Worker() for _ in range(workers)], np.zeros(4), 0, 0
    for step in range(steps):
        batches = [np.unique((random.zipf(zipf, (batch, len(ROWS))) * 7919 % ROWS).astype(int) + START) for _ in all_workers]
        for worker, rows in zip(all_workers, batches):
            if step >= steps // 2:
                now, then, own = updates[rows], worker.pulled[rows], worker.pushed[rows]
                is_new, is_same, is_own = then < 0, now == then, now == own
                found += [is_new.sum(), is_same.sum(), (~is_new & ~is_same & is_own).sum(), (~is_new & ~is_same & ~is_own).sum()]
                for first, last in zip(START, START + ROWS):
                    steps_up = np.diff(rows[(first <= rows) & (rows < last)], prepend=first - 1)
                    bits, ids = bits + len(steps_up) * int(steps_up.max()).bit_length() + 8, ids + len(steps_up)
            worker.pulled[rows] = updates[rows]
        for worker, rows in zip(all_workers, batches):
            updates[rows] += 1
            worker.pushed[rows] = updates[rows]
    return found / found.sum(), found.sum() / len(all_workers) / (steps - steps // 2), bits / ids


def compressed(arrays):
    """Returns the bytes of the floats, those after zlib with the bytes of a kind together, and the time in ms."""
    planes = [np.ascontiguousarray(array, np.float32).view(np.uint8).reshape(-1, 4).T.tobytes() for array in arrays]
    begun = time.perf_counter()
    after = [min(len(zlib.compress(plane, 1)), len(plane)) for plane in planes]
    return sum(map(len, planes)), sum(after), 1000 * (time.perf_counter() - begun)


def values(batch, steps=300):
    """The rows, gradients of rows, weights and gradients of weights of a step of a model that is trained a little."""
    cases.local, model, one = True, models.WideAndDeep("wdl", "Wide & Deep", batch), tf.compat.v1
    model.BATCHES = 64
    with tf.Graph().as_default():
        model.build(0)
        variables = one.trainable_variables()
        pairs = [(variable, gradient) for variable, gradient in zip(variables, one.gradients(model.loss, variables)) if gradient is not None]
        sparse = [(gradient.indices, gradient.values, tf.gather(variable, tf.unique(gradient.indices)[0])) for variable, gradient in pairs if isinstance(gradient, tf.IndexedSlices)]
        dense = [pair for pair in pairs if not isinstance(pair[1], tf.IndexedSlices)]
        with one.Session() as session:
            session.run(model.init_op)
            for step in range(steps):
                session.run(model.train_op, {model.batch_index: step % model.BATCHES})
            sparse, dense = session.run([sparse, dense], {model.batch_index: 5})
    sums = []
    for ids, gradients, _ in sparse:
        unique, positions = np.unique(ids, return_inverse=True)
        sums.append(np.zeros((len(unique), *gradients.shape[1:]), np.float32))
        np.add.at(sums[-1], positions, gradients)
    return {"rows": [rows for _, _, rows in sparse], "gradients of rows": sums, "weights": [pair[0] for pair in dense], "gradients of weights": [pair[1] for pair in dense]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--zipf", type=float, default=1.3)
    options = parser.parse_args()
    for workers, steps in ((1, 800), (4, 400), (16, 120)):
        shares, rows, bits = seen_before(workers, options.batch, steps, options.zipf)
        words = ("not seen before", "unchanged", "changed by this worker only", "changed by others")
        print(f"{workers} workers: {rows:.0f} rows per step: {', '.join(f'{100 * share:.1f} % {word}' for word, share in zip(words, shares))}; {bits:.1f} bits per sorted id")
    for what, arrays in values(options.batch).items():
        before, after, took = compressed(arrays)
        print(f"{what}: {before / 1000:.0f} kB, compressed {after / 1000:.0f} kB ({100 * after / before:.0f} %) in {took:.1f} ms")


if __name__ == "__main__":
    main()
