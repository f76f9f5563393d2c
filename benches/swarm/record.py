#!/usr/bin/env python3
"""Records the traffic between a real worker and a real parameter server, for the simulated workers to replay.

    record.py OUT [--batch 64] [--steps 4]

Both are stock TensorFlow over `grpc`, with a proxy between them that keeps every request and every answer, in both directions. From these, a step is recorded as
operations: calls to the ps, tensors that the worker requests, tensors that the ps requests. Their order is derived from the worker's part of the graph. The file is
one line of JSON and the bytes that it refers to; benches/swarm/README.md describes it.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import sys
import threading

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
    os.environ.pop(name, None)

import model  # noqa: E402
import ps  # noqa: E402
from cluster import BenchError, Process, free_port  # noqa: E402

FORMAT = 1
PS, WORKER = "/job:ps/replica:0/task:0", "/job:worker/replica:0/task:0"
# Numbered as in cc/base/methods.h.
METHODS = {"GetStatus": 1, "CreateWorkerSession": 2, "RegisterGraph": 4, "RunGraph": 6, "CleanupGraph": 7}
# Field numbers of tensorflow/core/protobuf/worker.proto, for which the wheels contain no Python module.
FIELDS = {
    "GetStatus reply": {"device_attributes": 1},
    "CreateWorkerSession": {"session_handle": 1, "master_task": 5},
    "RegisterGraph": {"session_handle": 1, "graph_def": 2},
    "RegisterGraph reply": {"graph_handle": 1},
    "RunGraph": {"graph_handle": 1, "step_id": 2, "session_handle": 8, "request_id": 11},
    "CleanupGraph": {"step_id": 1},
    "RecvTensor": {"step_id": 1, "rendezvous_key": 2, "request_id": 7},
    "RecvTensor reply": {"tensor": 1, "is_dead": 2},
}
PATIENCE = 60.0


class Tape:
    """Everything that passed through the proxies, in the order of the answers."""

    def __init__(self):
        self.lock = threading.Condition()
        self.calls = []

    def add(self, to_ps, method, request, reply):
        with self.lock:
            self.calls.append((to_ps, method, request, reply))
            self.lock.notify_all()

    def since(self, mark, until):
        """The calls after `mark`, once `until` holds for them."""
        with self.lock:
            if not self.lock.wait_for(lambda: until(self.calls[mark:]), PATIENCE):
                raise BenchError("the recorded step did not end with the calls that were expected")
            return self.calls[mark:]

    def __len__(self):
        with self.lock:
            return len(self.calls)


def start_proxy(tape, to_ps, address, target):
    """A gRPC server at `address` that forwards every request to `target`."""
    import grpc

    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    channel = grpc.insecure_channel(target, options=unlimited)

    class Handler(grpc.GenericRpcHandler):
        def service(self, details):
            ask = channel.unary_unary(details.method)

            def forward(request, context):
                try:
                    reply = ask(request, timeout=PATIENCE, wait_for_ready=True)
                except grpc.RpcError as error:
                    context.abort(error.code(), error.details())
                tape.add(to_ps, details.method.rsplit("/", 1)[1], request, reply)
                return reply

            return grpc.unary_unary_rpc_method_handler(forward)

    # Each pending tensor request occupies a thread.
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(512), handlers=[Handler()], options=unlimited)
    server.add_insecure_port(address)
    server.start()
    return server


class Blob:
    def __init__(self):
        self.parts, self.places, self.size = [], {}, 0

    def put(self, data):
        """Stores bytes and returns [offset, length]. Equal bytes are stored once."""
        if data not in self.places:
            self.places[data] = [self.size, len(data)]
            self.parts.append(data)
            self.size += len(data)
        return self.places[data]


def dependencies(partitions):
    """Edge name → names of the tensors from the ps that the worker needs before it requests, or has, that one."""
    graph = next(p for p in partitions if any(node.device.startswith(WORKER) for node in p.node))
    nodes = {node.name: node for node in graph.node}
    edge = lambda node: node.attr["tensor_name"].s.decode()  # noqa: E731
    from_ps = {name for name, node in nodes.items() if node.op in ("_Recv", "_HostRecv") and node.attr["send_device"].s.decode().startswith(PS)}
    to_ps = {name for name, node in nodes.items() if node.op in ("_Send", "_HostSend") and node.attr["recv_device"].s.decode().startswith(PS)}
    known = {}

    def needs(start):
        """The nearest tensors from the ps upstream of a node."""
        stack = [start]
        while stack:
            name = stack[-1]
            if name in known:
                stack.pop()
                continue
            inputs = [i.lstrip("^").split(":")[0] for i in nodes[name].input]
            missing = [i for i in inputs if i not in known and i not in from_ps]
            if missing:
                stack += missing
                continue
            known[name] = frozenset().union(*({i} if i in from_ps else known[i] for i in inputs)) if inputs else frozenset()
            stack.pop()
        return known[start]

    return {edge(nodes[name]): sorted(edge(nodes[n]) for n in needs(name)) for name in from_ps | to_ps}


def fields_of(message):
    """The fields of a serialised protocol buffer by number; only the last of repeated ones."""
    from google.protobuf import empty_pb2, unknown_fields

    found = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(message))
    return {field.field_number: field.data for field in found}


def settings(name, values):
    """Field number → the value that a simulated worker sets."""
    return {str(FIELDS[name][field]): value for field, value in values.items()}


def edge_of(key):
    """Rendezvous keys are `source;incarnation;destination;edge;frame:iteration`."""
    return key.split(";")[3]


class Script:
    """The recording, as it is written to the file."""

    def __init__(self, after):
        self.after, self.blob = after, Blob()

    def call(self, name, request, values, **more):
        return {"call": name, "method": METHODS[name], "request": self.blob.put(request), "set": settings(name, values), **more}

    def setup(self, calls):
        found = {}
        for to_ps, method, request, _ in calls:
            if to_ps:
                found.setdefault(method, []).append(request)
        graphs = len(found.get("RegisterGraph", []))
        if graphs != 1:
            raise BenchError(f"the worker registered {graphs} graphs, one was expected")
        return [
            self.call("GetStatus", b"", {}, take={"incarnation": FIELDS["GetStatus reply"]["device_attributes"]}),
            self.call("CreateWorkerSession", found["CreateWorkerSession"][0], {"session_handle": "session", "master_task": "task"}),
            self.call(
                "RegisterGraph", found["RegisterGraph"][0], {"session_handle": "session"}, graph=FIELDS["RegisterGraph"]["graph_def"],
                take={"graph": FIELDS["RegisterGraph reply"]["graph_handle"]},
            ),
        ]  # fmt: skip

    def step(self, calls):
        pulls, pushes, requests = [], [], {}
        for to_ps, method, request, reply in calls:
            if method == "RecvTensor":
                key = fields_of(request)[FIELDS["RecvTensor"]["rendezvous_key"]].decode()
                (pulls if to_ps else pushes).append((key, request, *self.tensor(reply)))
            elif to_ps:
                requests[method] = request
        # RunGraph is the first operation; the pulls follow.
        index = {edge_of(key): 1 + place for place, (key, *_) in enumerate(pulls)}
        after = lambda key: [index[edge] for edge in self.after[edge_of(key)]]  # noqa: E731
        run = {"session_handle": "session", "graph_handle": "graph", "step_id": "step", "request_id": "unique"}
        operations = [self.call("RunGraph", requests["RunGraph"], run, after=[])]
        for key, request, _, content in pulls:
            numbers = settings("RecvTensor", {"step_id": "step", "rendezvous_key": "key", "request_id": "unique"})
            operations.append({"pull": key, "request": self.blob.put(request), "set": numbers, "bytes": len(content), "after": after(key)})
        for key, _, described, content in pushes:
            operations.append({"push": key, **described, "content": self.blob.put(content), "after": after(key)})
        # Nothing waits for the clean-up of a step.
        operations.append(self.call("CleanupGraph", requests["CleanupGraph"], {"step_id": "step"}, after=list(range(len(operations))), wait=False))
        return operations

    def tensor(self, reply):
        """Type, shape, and the elements in their memory layout."""
        import tensorflow as tf
        from tensorflow.core.framework import tensor_pb2

        numbers, fields = FIELDS["RecvTensor reply"], fields_of(reply)
        proto = tensor_pb2.TensorProto.FromString(fields.get(numbers["tensor"], b""))
        value = tf.make_ndarray(proto)
        if fields.get(numbers["is_dead"]) or value.dtype == object:
            raise BenchError(f"a tensor of type {proto.dtype} (or a dead one) cannot be replayed: only plain types are")
        return {"dtype": proto.dtype, "dims": list(value.shape)}, value.tobytes()


def step_ended(calls):
    return any(to_ps and method == "CleanupGraph" for to_ps, method, _, _ in calls)


def record(case, steps, logs):
    import cases
    import tensorflow as tf

    tf1 = tf.compat.v1
    address, worker_address, port, worker_port = (f"127.0.0.1:{free_port()}" for _ in range(4))
    spec = {"job": "ps", "task": 0, "protocol": "grpc", "library": None, "address": address, "workers": [worker_port], "case": case}
    process = Process(spec, {}, logs / "record.ps.log", ps.serve)
    proxies = []
    try:
        process.hear()
        tape = Tape()
        proxies = [start_proxy(tape, True, port, address), start_proxy(tape, False, worker_port, worker_address)]
        server = tf.distribute.Server({"ps": [port], "worker": [worker_address]}, job_name="worker", task_index=0, protocol="grpc")
        cases.local = False
        with tf.Graph().as_default() as graph:
            case.build(0)
        session = tf1.Session(server.target, graph=graph)
        case.session = session

        def run(index, **more):
            mark = len(tape)
            session.run([case.loss, case.train_op], {case.batch_index: index}, **more)
            return tape.since(mark, step_ended)

        metadata = tf1.RunMetadata()
        run(0, options=tf1.RunOptions(output_partition_graphs=True), run_metadata=metadata)
        setup = list(tape.calls)
        run(0)
        script = Script(dependencies(metadata.partition_graphs))
        recorded = []
        for index in range(steps):
            before = process.call()
            calls = run(index % case.BATCHES)
            after = process.call()
            if after["steps"] != before["steps"] + 1:
                raise BenchError("the recorded step was not applied by the parameter server")
            adds = [new - old for old, new in zip(before["sums"], after["sums"])]
            recorded.append({"operations": script.step(calls), "adds": adds})
        session.close()
        return {
            "starwire_swarm": FORMAT, "model": case.title, "tensorflow": tf.__version__, "ps": PS, "worker": WORKER, "setup": script.setup(setup), "steps": recorded, "bytes": script.blob.size,
        }, script.blob  # fmt: skip
    finally:
        process.kill()
        for proxy in proxies:
            proxy.stop(None)


def load(path):
    """The first line of a recording."""
    with open(path, "rb") as file:
        return json.loads(file.readline())


def write(out, recording, blob):
    unfinished = out.with_name(out.name + ".part")
    with open(unfinished, "wb") as file:
        file.write(json.dumps(recording, separators=(",", ":")).encode() + b"\n")
        for part in blob.parts:
            file.write(part)
    unfinished.replace(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--batch", type=int, default=64, help="examples in a step (default %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="different steps, replayed in turn (default %(default)s)")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    recording, blob = record(model.SwarmCtr(arguments.batch), arguments.steps, out.parent)
    write(out, recording, blob)
    operations = recording["steps"][0]["operations"]
    count = lambda kind: sum(1 for operation in operations if kind in operation)  # noqa: E731
    print(f"{out}: {len(recording['steps'])} steps of {count('call')} calls, {count('pull')} tensors pulled, {count('push')} pushed; {recording['bytes']} bytes")
    sys.stdout.flush()
    # TensorFlow's server cannot be shut down.
    os._exit(0)


if __name__ == "__main__":
    main()
