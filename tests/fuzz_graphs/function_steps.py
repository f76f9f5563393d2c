"""What differs between the steps of a program of functions (functions.py): arguments, the task that runs a step, and variables that are made again.

A program has "arguments" if its functions take one: "tensors", or "generator" if a Python generator's dataset makes them; and "steps", one for each function
of the schedule: {"rows": of its argument, "on": the task (null: the coordinator chooses a worker), "again": [[list, number]…], made again before the step}.
"""

import contextlib
import gc

import numpy as np
from cluster import state, tf

FEATURES = ("generators", "shapes", "made again", "turns")
ON = {"worker0": "/job:worker/replica:0/task:0", "worker1": "/job:worker/replica:0/task:1"}


def generate(rng, features, program):
    """Adds the steps to a program that has one of the features."""
    if not set(FEATURES) & set(features):
        return
    program["schedule"] += [rng.randrange(len(program["functions"])) for _ in range(rng.randrange(2, 6))]
    if "generators" in features or "shapes" in features:
        program["arguments"] = "generator" if "generators" in features else "tensors"
        program["any_shape"] = rng.random() < 0.3
    rows, program["steps"] = rng.randrange(1, 4), []
    for number in range(len(program["schedule"])):
        step = {"rows": rows, "on": None, "again": []}
        if "shapes" in features:
            step["rows"] = rng.choice((0, 1, 1, 2, 3, 50))
        if "turns" in features:
            step["on"] = "chief" if rng.random() < 0.15 else f"worker{number % 2}"
        if "made again" in features and rng.random() < 0.6:
            all_of_them = [[kind, one] for kind in ("variables", "sharded") for one in range(len(program.get(kind, ())))]
            step["again"] = sorted(rng.sample(all_of_them, rng.randrange(1, len(all_of_them) + 1)))
        program["steps"].append(step)


def of(program):
    """Returns the steps, and the number of each one's function."""
    return list(zip(program["schedule"], program.get("steps") or [{"on": None, "again": []}] * len(program["schedule"])))


def arguments(program, width):
    """Returns an array for each step, if the functions take one."""
    if "arguments" not in program:
        return [None] * len(program["schedule"])
    rng = np.random.default_rng(program["seed"])
    return [rng.integers(-8, 9, (step["rows"], width)).astype(np.float32) / 4 for step in program["steps"]]


def given(program, width):
    """Yields the arguments that the chief gives to each function, as a list."""
    arrays = arguments(program, width)
    if program.get("arguments") == "generator":
        data = tf.data.Dataset.from_generator(lambda: iter(arrays), output_signature=tf.TensorSpec((None, width), tf.float32)).prefetch(1)
        for one in data:
            yield [one]
    else:
        for array in arrays:
            yield [] if array is None else [tf.constant(array)]


def function(program, width, build, ops):
    if "arguments" not in program:
        return tf.function(lambda: build(ops), autograph=False)
    signature = [tf.TensorSpec((None, width), tf.float32)] if program["any_shape"] else None
    return tf.function(lambda argument: build(ops, argument), autograph=False, input_signature=signature)


def run(step, function, arguments):
    """Returns the values of a step."""
    if step["on"]:
        with tf.device(ON[step["on"]]) if step["on"] in ON else contextlib.nullcontext():
            return function(*arguments)
    result = state["coordinator"].schedule(function, args=tuple(arguments))
    state["coordinator"].join()
    return result.fetch()


def forget(lists, again):
    """Deletes what is made again. Nothing else may hold it."""
    for kind, number in again:
        lists[kind][number] = None
    gc.collect()
