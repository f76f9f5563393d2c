"""One task of the cluster. Usage: `python task.py --protocol grpc++ --job ps --task 0 --ps host:port,… --worker host:port,…`."""

import argparse
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))


def sessions_only():
    """TensorFlow 1 code; before anything else is done."""
    import tensorflow as tf

    tf.compat.v1.disable_eager_execution()


def serve(cluster, job, task, protocol):
    """Starts this task's server."""
    import tensorflow as tf

    if protocol != "grpc":
        import starwire  # noqa: F401  registers the protocols
    config = tf.compat.v1.ConfigProto(device_filters=["/job:ps", f"/job:{job}/task:{task}"]) if job == "worker" and "chief" not in cluster.jobs else None
    return tf.distribute.Server(cluster, job_name=job, task_index=task, protocol=protocol, config=config), config


class Worker:
    """Trains on its own server. Worker 0 initialises the variables; the others wait for it."""

    def __init__(self, cluster, task, protocol, batch):
        import model
        import tensorflow as tf

        server, config = serve(cluster, "worker", task, protocol)
        self._server = server
        self._model = model.build(cluster, task, batch)
        self._session = tf.compat.v1.Session(server.target, config=config)
        self._step = 0
        if task == 0:
            self._session.run(self._model.init)
        while self._session.run(self._model.uninitialized).size:
            time.sleep(0.2)

    def train(self, steps, one_by_one=True):
        """Returns (seconds, losses, global step afterwards). A session's steps follow each other in any case."""
        model, losses = self._model, []
        started = time.perf_counter()
        for _ in range(steps):
            loss, _ = self._session.run([model.loss, model.train], {model.step: self._step})
            losses.append(loss)
            self._step += 1
        seconds = time.perf_counter() - started
        return seconds, losses, int(self._session.run(model.global_step))

    def close(self):
        self._session.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--protocol", default="grpc++")
    parser.add_argument("--job", required=True, choices=["ps", "worker"])
    parser.add_argument("--task", type=int, required=True)
    parser.add_argument("--ps", required=True, help="host:port,host:port …")
    parser.add_argument("--worker", required=True, help="host:port,host:port …")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    import tensorflow as tf

    sessions_only()
    cluster = tf.train.ClusterSpec({"ps": arguments.ps.split(","), "worker": arguments.worker.split(",")})
    if arguments.job == "ps":
        serve(cluster, "ps", arguments.task, arguments.protocol)[0].join()
    worker = Worker(cluster, arguments.task, arguments.protocol, arguments.batch)
    seconds, losses, global_step = worker.train(arguments.steps)
    print(f"{arguments.steps / seconds:.1f} steps/s, loss {losses[0]:.4f} -> {losses[-1]:.4f}, global step {global_step}")
    worker.close()


if __name__ == "__main__":
    main()
