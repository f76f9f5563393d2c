"""Builds TensorFlow graphs from a program: a GraphDef, with the names of tensors, operations and feeds."""

import contextlib

from program import BODIES, CONTROLS, array, is_lit, node_of, walk

CONTAINER = "C0000000"  # replaced in the serialised graph by a name of the same length, different for each run of a program


def device_names(worker):
    names = {"ps0": "/job:ps/task:0", "ps1": "/job:ps/task:1", "me": f"/job:worker/task:{worker}", "other": f"/job:worker/task:{1 - worker}"}
    return {short: f"{name}/device:CPU:0" for short, name in names.items()}


class Builder:
    def __init__(self, tf, program, worker):
        from tensorflow.python.framework import op_def_registry

        self.tf, self.program, self.devices = tf, program, device_names(worker)
        # TensorFlow 1 has no get().
        self.op_def = getattr(op_def_registry, "get", None) or op_def_registry.get_registered_ops().get
        self.tensors = {}  # "id:k" -> tensor
        self.operations = {}  # id -> operation
        self.feeds = {}  # id -> (dtype, shape)

    def build(self):
        """Returns (serialised GraphDef, {"id:k": tensor name}, {id: operation name}, feeds)."""
        tf = self.tf
        graph = tf.Graph()
        with graph.as_default(), graph.container(CONTAINER):
            tf.compat.v1.set_random_seed(1)
            for part in ("init", "body", "final"):
                self.records(self.program[part])
        top = {record["id"] for part in ("init", "body", "final") for record in self.program[part]}
        tensors = {ref: tensor.name for ref, tensor in self.tensors.items() if node_of(ref) in top}
        return graph.as_graph_def(add_shapes=False).SerializeToString(), tensors, {i: self.operations[i].name for i in top}, self.feeds

    def records(self, records):
        for record in records:
            self.record(record)

    @staticmethod
    def name(record):
        return record.get("name", "n#").replace("#", str(record["id"]))

    def record(self, record):
        tf, op = self.tf, record["op"]
        with tf.device(self.devices[record["dev"]]), self.after(record.get("ctl", ())):
            if op == "@feed":
                dtype, shape = record["out"][0]
                outputs = [tf.compat.v1.placeholder(dtype, shape, name=self.name(record))]
                self.feeds[record["id"]] = (dtype, shape)
            elif op == "@cond":
                outputs = self.cond(record)
            elif op == "@while":
                outputs = self.loop(record)
            else:
                outputs = self.plain(record)
        if isinstance(outputs, tf.Operation):
            self.operations[record["id"]] = outputs
            outputs = outputs.outputs
        else:
            self.operations[record["id"]] = outputs[0].op
        for k, tensor in enumerate(outputs):
            self.tensors[f"{record['id']}:{k}"] = tensor

    def after(self, ids):
        return self.tf.control_dependencies([self.operations[i] for i in ids]) if ids else contextlib.nullcontext()

    def value(self, ref):
        """Returns a tensor. A literal becomes a constant beside the record, without its control inputs."""
        if isinstance(ref, list):
            return [self.value(one) for one in ref]
        if not is_lit(ref):
            return self.tensors[ref]
        dtype = ref["lit"][0]
        with self.tf.control_dependencies(None) if self.top() else contextlib.nullcontext():
            return self.tf.constant(array(*ref["lit"]), dtype=dtype)

    def top(self):
        graph = self.tf.compat.v1.get_default_graph()
        return graph._get_control_flow_context() is None

    def plain(self, record):
        op_def = self.op_def(record["op"])
        arguments = {name: self.value(ref) for name, ref in record.get("in", {}).items()}
        attributes = {name: self.attribute(value) for name, value in record.get("attr", {}).items()}
        if any(attr.name == "container" for attr in op_def.attr):
            attributes["container"] = CONTAINER
        if any(attr.name == "shared_name" for attr in op_def.attr) and "shared_name" not in attributes:
            attributes["shared_name"] = f"s{record['id']}"
        if record["op"] == "Const":
            dtype, value = attributes["value"]
            return self.tf.constant(array(dtype, value), dtype=dtype, name=self.name(record)).op
        made = getattr(self.tf.raw_ops, record["op"])(name=self.name(record), **arguments, **attributes)
        if isinstance(made, self.tf.Operation):
            return made
        if isinstance(made, (list, tuple)):
            first = made[0]
            return (first[0] if isinstance(first, (list, tuple)) else first).op
        return made.op

    def attribute(self, value):
        return [self.attribute(one) for one in value] if isinstance(value, list) and value and isinstance(value[0], list) else value

    @contextlib.contextmanager
    def control_flow(self, style):
        tf = self.tf
        was = tf.compat.v1.control_flow_v2_enabled()
        (tf.compat.v1.enable_control_flow_v2 if style == "v2" else tf.compat.v1.disable_control_flow_v2)()
        try:
            yield
        finally:
            (tf.compat.v1.enable_control_flow_v2 if was else tf.compat.v1.disable_control_flow_v2)()

    def gated(self, ref):
        """Adds the control inputs in effect at the call, which are the record's."""
        return self.tf.identity(self.value(ref))

    def finish(self, record, body):
        with self.after(record[f"{body}_ctl"]):
            made = [self.tf.identity(self.value(ref)) for ref in record[f"{body}_out"]]
        for tensor, (_, shape) in zip(made, record["out"]):
            tensor.set_shape(shape)  # a resource read in a loop has no static shape
        return made

    def cond(self, record):
        tf = self.tf
        pred = self.gated(record["in"]["pred"])

        def branch(body):
            def make():
                self.records(record[body])
                return self.finish(record, body)

            return make

        with tf.control_dependencies(None) if self.top() else contextlib.nullcontext(), tf.device(self.devices[record["dev"]]), self.control_flow(record["style"]):
            made = tf.compat.v1.cond(pred, branch("then"), branch("else"), name=self.name(record))
        return made if isinstance(made, (list, tuple)) else [made]

    def loop(self, record):
        tf = self.tf
        start = [self.gated(ref) for ref in record["in"]["init"]]

        def body(*state):
            for i, tensor in zip(record["vars"], state):
                self.tensors[f"{i}:0"], self.operations[i] = tensor, tensor.op
            self.records(record["body"])
            count, *rest = self.finish(record, "body")
            return [count + 1, *rest]

        with tf.control_dependencies(None) if self.top() else contextlib.nullcontext(), tf.device(self.devices[record["dev"]]), self.control_flow(record["style"]):
            made = tf.compat.v1.while_loop(
                lambda count, *_: count < record["limit"], body, start, parallel_iterations=record["parallel"], name=self.name(record)
            )
        return list(made)


def ops_of(program):
    return {record["op"] for part in ("init", "body", "final") for record in walk(program[part])}


__all__ = ["Builder", "BODIES", "CONTROLS", "CONTAINER", "ops_of"]
