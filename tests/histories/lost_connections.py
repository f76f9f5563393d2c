"""Workers that use a parameter server while their connections are lost: one counts its steps, in variables of both kinds; one opens sessions."""

from pathlib import Path

from cluster import one, tf

SIZE = 3000


def count(target, steps, folder):
    """Returns the errors of the steps that failed, and the value of each variable, which each other step has raised by one. While there is a file `steps` in
    the folder, which has a byte for each step, connections may be lost."""
    with tf.Graph().as_default():
        with one().device("/job:ps/task:0"):
            numbers = [one().get_variable(f"n{kind}", initializer=0.0, use_resource=kind) for kind in (False, True)]
            vectors = [one().get_variable(f"v{kind}", initializer=[0.0] * SIZE, use_resource=kind) for kind in (False, True)]
            reads = [variable.read_value() for variable in numbers + vectors]
        with one().device("/job:worker/task:0"):
            ones = tf.ones([SIZE]) + 0.0 * tf.reduce_sum(reads[-1])  # what is pushed depends on what was pulled
        with one().device("/job:ps/task:0"):
            pushes = [one().assign_add(variable, ones) for variable in vectors]
            counters = [one().assign_add(variable, 1.0) for variable in numbers]
            step = tf.group(*[update.op for update in pushes + counters])
        failed, session = [], one().Session(target)
        session.run(one().global_variables_initializer())
        session.run([step, *reads])  # the master tells the server of the graph
        session.run(reads)
        session.run(step)
        begun = Path(folder, "steps")
        with open(begun, "ab", buffering=0) as made:
            for _ in range(steps - 2):
                try:
                    session.run(step)
                except tf.errors.UnavailableError as error:
                    failed.append(str(error))
                made.write(b".")
        begun.unlink()
        while True:
            try:
                return failed, [float(value.flat[0]) for value in one().Session(target).run(reads)]
            except tf.errors.UnavailableError:
                pass  # a last connection was lost


def open_sessions(target, number, folder):
    """Returns the errors of the sessions that failed, and what the others have read. While there is a file `steps` in the folder, connections may be lost."""
    with tf.Graph().as_default():
        with one().device("/job:ps/task:0"):
            variable = one().get_variable("opened", initializer=[1.0] * SIZE, use_resource=True)
        with one().device("/job:worker/task:0"):
            total = tf.reduce_sum(variable)
        with one().Session(target) as first:
            first.run(variable.initializer)
        begun, failed, found = Path(folder, "steps"), [], []
        begun.touch()
        for _ in range(number):
            try:
                with one().Session(target) as session:
                    found.append(float(session.run(total)))
            except tf.errors.UnavailableError as error:
                failed.append(str(error))
        begun.unlink()
        return failed, found
