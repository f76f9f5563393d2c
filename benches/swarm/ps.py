"""The real parameter server: a TensorFlow process that, on command, initialises its variables and reports the pushes that it has applied."""

import ipaddress
import json
import os
import resource
import traceback

from cluster import Process, free_port


def worker_addresses(first, count):
    """Simulated workers share a port and have consecutive addresses in 127.0.0.0/8, starting with the first one's."""
    host, port = first.rsplit(":", 1)
    return [f"{ipaddress.ip_address(host) + i}:{port}" for i in range(count)]


def raise_descriptor_limit(needed):
    """Every worker costs the ps two descriptors: its connection to the ps, and the ps's connection back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RuntimeError(f"the parameter server needs {needed} file descriptors, the hard limit is {hard}: raise it (ulimit -Hn, LimitNOFILE=)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(needed, hard) if hard != resource.RLIM_INFINITY else needed), hard))


def serve(channel, spec):
    """Runs in a forked child; `spec`: protocol, library, address, workers (addresses), endpoint_map, case."""
    try:
        raise_descriptor_limit(2 * len(spec["workers"]) + 256)
        import cases
        import tensorflow as tf

        tf1 = tf.compat.v1
        if spec["library"]:
            os.environ["STARWIRE_ENDPOINT_MAP"] = spec["endpoint_map"]
            tf.load_library(spec["library"])
        cluster = {"ps": [spec["address"]], "worker": dict(enumerate(spec["workers"]))}
        server = tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name="ps", task_index=0, protocol=spec["protocol"])
        case = spec["case"]
        # In this process's copy of the model, everything is local. The variables are the workers', by name.
        cases.local = True
        with tf.Graph().as_default() as graph:
            case.build(0)
        # It must not wait for workers: they are simulated and not yet running.
        session = tf1.Session(server.target, graph=graph, config=tf1.ConfigProto(device_filters=["/job:ps"]))
        session.run(case.init_op)
        channel.answer({"ok": True})
        for line in channel.lines():
            json.loads(line)
            channel.answer({"ok": True, **case.pushed(session)})
    except BaseException as error:  # the starting process must see every error
        channel.answer({"ok": False, "error": f"{type(error).__name__}: {error}"[:2000], "traceback": traceback.format_exc()[-4000:]})


class Server:
    """One such process, ready for `count` simulated workers. `after`: takes the addresses of a server that is gone."""

    def __init__(self, protocol, library, case, count, logs, after=None):
        if after is None:
            self.address, self.data = (f"127.0.0.1:{free_port()}" for _ in range(2))
            self.first_worker = f"127.1.0.1:{free_port()}"
        else:
            self.address, self.data, self.first_worker = after.address, after.data, after.first_worker
        workers = worker_addresses(self.first_worker, count)
        ours = protocol != "grpc"
        endpoint_map = logs / f"{protocol}.{count}.endpoint_map"
        endpoint_map.write_text("".join(f"{line}\n" for line in [f"{self.address}={self.data}"] + [f"{worker}={worker}" for worker in workers]))
        # The address that workers connect to.
        self.door = self.data if ours else self.address
        spec = {
            "job": "ps", "task": 0, "protocol": protocol, "library": library if ours else None, "address": self.address, "workers": workers, "endpoint_map": str(endpoint_map), "case": case,
        }  # fmt: skip
        self.log = logs / f"ps.{protocol}.{count}{'' if after is None else '.successor'}.log"
        self.log.unlink(missing_ok=True)
        self.process = Process(spec, {}, self.log, serve)
        try:
            self.process.hear()
        except BaseException:
            self.close()
            raise

    def pushed(self):
        return self.process.call()

    def close(self):
        self.process.kill()
