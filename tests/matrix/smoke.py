"""Smoke test of one TensorFlow version: a parameter server and a worker train a few steps over grpc++ (or SMOKE_PROTOCOL) in separate processes; the
result must be correct, and the tensors must have travelled over starwire.

    STARWIRE_LIBRARY=… python tests/matrix/smoke.py

The last line is "smoke: ok …"; otherwise the process ends with an exception.
"""

import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
sys.path.insert(0, os.path.join(ROOT, "python"))
PROTOCOL = os.environ.get("SMOKE_PROTOCOL", "grpc++")
STEPS, VARIABLES, SIZE, RATE = 20, 12, 3000, 0.5
TIMEOUT = 600


def serve(cluster, job):
    import starwire  # noqa: F401
    import tensorflow as tf

    return tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name=job, task_index=0, protocol=PROTOCOL)


def ps(cluster):
    serve(cluster, "ps").join()


def worker(cluster):
    import numpy as np
    import tensorflow as tf

    v1 = tf.compat.v1
    v1.disable_eager_execution()
    server = serve(cluster, "worker")
    with v1.device("/job:ps/task:0"):
        variables = [v1.get_variable(f"v{n}", shape=[SIZE], initializer=v1.zeros_initializer(), use_resource=n % 2 == 0) for n in range(VARIABLES)]
        words = v1.get_variable("words", initializer=tf.constant(["a", "", "ü" * 1000]), dtype=tf.string)
    with v1.device("/job:worker/task:0"):
        target = v1.placeholder(tf.float32, [])
        pulled = [tf.identity(variable) for variable in variables]
        loss = tf.add_n([tf.reduce_sum(tf.square(value - target * (n + 1))) for n, value in enumerate(pulled)]) / (2 * SIZE)
        gradients = tf.gradients(loss, pulled)
        gradients = [gradient * SIZE for gradient in gradients]
        seen = tf.strings.length(words)
    train = v1.train.GradientDescentOptimizer(RATE).apply_gradients(zip(gradients, variables))
    expected = [0.0] * VARIABLES
    with v1.Session(server.target) as session:
        session.run(v1.global_variables_initializer())
        for step in range(STEPS):
            session.run([loss, train], {target: float(step)})
            expected = [value - RATE * (value - step * (n + 1)) for n, value in enumerate(expected)]
        for value, wanted in zip(session.run(variables), expected):
            np.testing.assert_allclose(value, np.full([SIZE], wanted), rtol=1e-5)
        np.testing.assert_array_equal(session.run(seen), [1, 0, 2000])
        try:
            session.run(tf.debugging.assert_equal(tf.identity(variables[0])[0], -1.0, message="told to fail"))
        except tf.errors.InvalidArgumentError as error:
            assert "told to fail" in str(error), error
        else:
            raise AssertionError("an error of the graph did not arrive")
    print(f"smoke: ok TensorFlow {tf.__version__}, {STEPS} steps", flush=True)


def main():
    from starwire_run import ports

    ps, worker = ports.free(2)
    cluster = json.dumps({"ps": [f"localhost:{ps}"], "worker": [f"localhost:{worker}"]})
    server = subprocess.Popen([sys.executable, __file__, "ps", cluster])
    client = subprocess.Popen([sys.executable, __file__, "worker", cluster], stdout=subprocess.PIPE, text=True)
    try:
        output, _ = client.communicate(timeout=TIMEOUT)
        print(output, end="")
        if server.poll() is not None:
            sys.exit(f"smoke: the parameter server ended by itself ({server.returncode})")
    finally:
        for process in (client, server):
            process.kill()
            process.wait()
    # A script may exit with 0 although a thread failed, so check its output.
    if client.returncode != 0 or "smoke: ok" not in output:
        sys.exit(f"smoke: the worker failed ({client.returncode})")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        {"ps": ps, "worker": worker}[sys.argv[1]](json.loads(sys.argv[2]))
    else:
        main()
