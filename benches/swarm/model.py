"""The model whose calls are recorded, and the expected state of its variables after a number of steps."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "tf"))

import cases  # noqa: E402
import tensorflow as tf  # noqa: E402

tf1 = tf.compat.v1


class SwarmCtr(cases.Ctr):
    """The benchmark's click-through-rate model with everything on one ps, built so that Adagrad's accumulators count the pushes.

    Every push adds the squares of its gradient to an accumulator: with locks, N equal steps add N times as much as one step, in any order.
    Accumulators start low and the loss is a sum, so that the squares are not lost in float32 rounding.
    """

    ps, workers = 1, 1
    reduce = staticmethod(tf.reduce_sum)

    def __init__(self, batch):
        super().__init__("swarm", f"CTR model, batch {batch}", batch)

    def optimizer(self):
        return tf1.train.AdagradOptimizer(0.05, initial_accumulator_value=1e-6, use_locking=True)

    def build(self, worker):
        super().build(worker)
        with tf.device(cases._ps(0)):
            self.sums = [tf.reduce_sum(tf.cast(a.read_value(), tf.float64)) for a in self.accumulators]

    def pushed(self, session):
        """The pushes that the ps has applied: the number of steps, and the sum over each variable's accumulator."""
        steps, sums = session.run([self.read_ops[0], self.sums])
        return {"steps": int(steps), "sums": [float(s) for s in sums]}


class NotPushed(AssertionError):
    pass


def check(before, after, counts, expected):
    """Raises NotPushed unless the ps has applied, `counts[i]` times, the step that adds `expected[i]` to the accumulators."""
    steps = after["steps"] - before["steps"]
    if steps != sum(counts):
        raise NotPushed(f"the workers made {sum(counts)} steps, the global step of the ps grew by {steps}")
    for index, (old, new) in enumerate(zip(before["sums"], after["sums"])):
        want = sum(count * one[index] for count, one in zip(counts, expected))
        # Covers float32 sums in another order, but not a single lost step of a short run.
        if abs(new - old - want) > 0.005 * abs(want) + 1e-6:
            raise NotPushed(f"variable {index}: the gradients that were pushed add {want:.6g} to its accumulator, the ps added {new - old:.6g}")
