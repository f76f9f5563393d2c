#!/usr/bin/env python3
"""Records the star calls of a real worker, for the simulated workers to replay.

    record_star.py OUT --library PATH [--protocol star_server] [--batch 64] [--steps 4]

Like record.py, but both speak starwire, and the proxy between them is a relay that parses the traffic (tap.py). A step is one or two calls, whose feeds and fetches
are recorded as they travelled, together with the plans that the worker registered.
"""

import argparse
import os
import pathlib
import struct
import sys

import record  # first: it sets up the environment
import model
import ps
from cluster import BenchError, Process, free_port
from tap import Tap

CREATE_WORKER_SESSION = record.METHODS["CreateWorkerSession"]
STAR_CALL, STAR_REGISTER = 16, 17
# docs/protocol.md, "Star calls": positions of plan hashes, lengths of heads and of the entries of kept values.
CALL_HEAD, CALL_PLAN, KEEP, REGISTER_PLAN, REPLY_HEAD = 80, slice(32, 64), 12, slice(16, 48), 32
UNKNOWN_PLAN = 1


def tensors_in(table):
    return struct.unpack_from("<I", table)[0]


class Script:
    def __init__(self, calls):
        self.blob = record.Blob()
        registered = {bytes(call.meta[REGISTER_PLAN]).hex(): bytes(call.parts[0]) for call in calls if call.method == STAR_REGISTER}
        self.plans = {name: self.blob.put(plan) for name, plan in registered.items()}

    def setup(self, calls):
        created = next((call for call in calls if call.method == CREATE_WORKER_SESSION), None)
        if created is None:
            raise BenchError("the worker created no session on the parameter server")
        call = lambda name, request, values, **more: {"call": name, "method": record.METHODS[name], "request": self.blob.put(request), "set": record.settings(name, values), **more}  # noqa: E731
        return [
            call("GetStatus", b"", {}, take={"incarnation": record.FIELDS["GetStatus reply"]["device_attributes"]}),
            call("CreateWorkerSession", bytes(created.parts[0]), {"session_handle": "session", "master_task": "task"}),
        ]

    def step(self, calls, first):
        """`first`: the index of the step's first call on the tape."""
        operations = []
        for call in calls:
            if call.method != STAR_CALL or call.reply.code != 0 or call.reply.meta[1] & UNKNOWN_PLAN:
                raise BenchError(f"the recorded step has a call of method {call.method} (answer: {call.reply.code}): only star calls that succeed can be replayed")
            plan = bytes(call.meta[CALL_PLAN]).hex()
            if plan not in self.plans:
                raise BenchError("the recorded step calls a plan whose registration was not seen")
            (handle,), (keeps,) = struct.unpack_from("<H", call.meta, 4), struct.unpack_from("<I", call.meta, 8)
            operations.append(
                {
                    "star": plan,
                    "meta": self.blob.put(bytes(call.meta)),
                    "parts": [self.blob.put(bytes(part)) for part in call.parts],
                    "bytes": sum(len(part) for part in call.reply.parts),
                    "feeds": tensors_in(call.meta[CALL_HEAD + handle + keeps * KEEP :]),
                    "fetches": tensors_in(call.reply.meta[REPLY_HEAD:]),
                    "after": [index - first for index in call.after if index >= first],
                }
            )
        return operations


def record_star(case, steps, protocol, library, logs):
    import cases
    import tensorflow as tf

    tf1 = tf.compat.v1
    address, worker, data, tapped, worker_data = (f"127.0.0.1:{free_port()}" for _ in range(5))
    maps = {"ps": data, "worker": tapped}
    for job, door in maps.items():
        maps[job] = logs / f"record.{job}.endpoint_map"
        maps[job].write_text(f"{address}={door}\n{worker}={worker_data}\n")
    os.environ["STARWIRE_UNIX"] = "off"  # a relay has no unix socket
    # Calls are split to suit the path, and the relay is slower than the one that the simulated workers will use.
    os.environ["STARWIRE_STAR_SPLIT_BYTES"] = str(1 << 20)
    spec = {"protocol": protocol, "library": library, "address": address, "workers": [worker], "endpoint_map": str(maps["ps"]), "case": case, "job": "ps", "task": 0}
    process = Process(spec, {}, logs / "record.ps.log", ps.serve)
    tap = None
    try:
        process.hear()
        tap = Tap(tapped, data)
        os.environ["STARWIRE_ENDPOINT_MAP"] = str(maps["worker"])
        tf.load_library(library)
        server = tf.distribute.Server({"ps": [address], "worker": [worker]}, job_name="worker", task_index=0, protocol=protocol)
        cases.local = False
        with tf.Graph().as_default() as graph:
            case.build(0)
        session = tf1.Session(server.target, graph=graph)

        def run(index):
            mark = len(tap)
            session.run([case.loss, case.train_op], {case.batch_index: index})
            return tap.since(mark, record.PATIENCE), mark

        run(0)
        setup = tap.since(0, record.PATIENCE)
        script = Script(setup)
        run(0)
        recorded = []
        for index in range(steps):
            before = process.call()
            calls, mark = run(index % case.BATCHES)
            after = process.call()
            if after["steps"] != before["steps"] + 1:
                raise BenchError("the recorded step was not applied by the parameter server")
            adds = [new - old for old, new in zip(before["sums"], after["sums"])]
            recorded.append({"operations": script.step(calls, mark), "adds": adds})
        session.close()
        return {
            "starwire_swarm": record.FORMAT, "model": case.title, "tensorflow": tf.__version__, "ps": record.PS, "worker": record.WORKER, "setup": script.setup(setup),
            "plans": script.plans, "steps": recorded, "bytes": script.blob.size,
        }, script.blob  # fmt: skip
    finally:
        process.kill()
        if tap:
            tap.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--library", type=pathlib.Path, required=True, help="path of libstarwire.so")
    parser.add_argument("--protocol", choices=("star_server", "star_server_lite"), default="star_server")
    parser.add_argument("--batch", type=int, default=64, help="examples in a step (default %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="different steps, replayed in turn (default %(default)s)")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    recording, blob = record_star(model.SwarmCtr(arguments.batch), arguments.steps, arguments.protocol, str(arguments.library.resolve()), out.parent)
    record.write(out, recording, blob)
    operations = recording["steps"][0]["operations"]
    tensors = [sum(operation[kind] for operation in operations) for kind in ("fetches", "feeds")]
    print(f"{out}: {len(recording['steps'])} steps of {len(operations)} calls with {tensors[0]} tensors pulled and {tensors[1]} pushed, {len(recording['plans'])} plans; {recording['bytes']} bytes")
    sys.stdout.flush()
    # TensorFlow's server cannot be shut down.
    os._exit(0)


if __name__ == "__main__":
    main()
