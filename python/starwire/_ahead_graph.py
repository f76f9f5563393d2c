"""Rewrites the graph of a training step so that it pulls the parameters of the next step behind its own updates: see _ahead.py.

The operations that lead to what a run fetches are sorted into

* *sources*: variables, iterators;
* *constants*: operations without effects that need no input;
* *input*: IteratorGetNext, and operations without effects that need nothing but its outputs and constants;
* *pulls*: reads of variables that wait for nothing but these, and operations without effects on the task of a variable that need nothing else;
* the *rest*, which computes and updates.

A read-ahead run stages the outputs of the input part. The step takes those of the next batch from there, its own batch together with the pulled
values from a second stage, runs a copy of the rest, then pulls for the next batch, and stages that for the next step.
"""

import contextlib
import uuid

_VARIABLES = frozenset(("VarHandleOp", "VariableV2", "Variable", "AutoReloadVariable"))
_NEXT = frozenset(("IteratorGetNext", "IteratorGetNextSync"))
_READS = frozenset(("ReadVariableOp", "ResourceGather", "ResourceGatherNd"))
_PLACEHOLDERS = frozenset(("Placeholder", "PlaceholderV2", "PlaceholderWithDefault"))
# A table that never changes once it has been initialised.
_TABLE, _FIND = frozenset(("HashTableV2", "HashTable")), frozenset(("LookupTableFindV2", "LookupTableFind"))


class Unable(Exception):
    """Why a step cannot pull ahead."""


def leading_to(fetched, fed=()):
    """The operations that run for these operations and tensors, in an order in which they can, but for the back edges of loops."""
    fed, seen, order = set(fed), set(), []
    open_ = [(one if hasattr(one, "node_def") else one.op, None) for one in fetched if one not in fed]
    while open_:
        op, inputs = open_[-1]
        if inputs is None:
            if op in seen:
                open_.pop()
                continue
            seen.add(op)
            inputs = iter([one.op for one in op.inputs if one not in fed] + list(op.control_inputs))
            open_[-1] = (op, inputs)
        following = next((one for one in inputs if one not in seen), None)
        if following is None:
            order.append(op)
            open_.pop()
        else:
            open_.append((following, None))
    return order


def iterators(ops):
    """The operations that take an element, and those that do anything else with an iterator."""
    takes = [op for op in ops if op.type in _NEXT]
    others = [op for op in ops if ("Iterator" in op.type or op.type == "DeleteIterator") and op.type not in _NEXT and op.inputs and _has_handle(op)]
    return takes, others


def _has_handle(op):
    import tensorflow as tf

    return any(one.dtype == tf.resource for one in op.inputs)


def changes_variables(ops):
    """Whether one of these operations may change a variable."""
    return any(_touches(op) and not _only_reads(op) and not op.type.startswith("Queue") for op in ops)


def _is_handle(tensor):
    import tensorflow as tf

    return tensor.dtype._is_ref_dtype or tensor.dtype == tf.resource


def _touches(op):
    return any(_is_handle(one) for one in op.inputs)


def _only_reads(op):
    """Whether it does nothing with the handles that it takes but read. An input that is no reference for the operation is a value for it."""
    if op.type in _READS or op.type in _NEXT or op.type in _FIND or op.type in ("VarIsInitializedOp", "IsVariableInitialized", "VariableShape"):
        return True
    if any(not one.dtype._is_ref_dtype for one in op.inputs if _is_handle(one)):
        return False
    return not op._is_stateful and not any(kind._is_ref_dtype for kind in op._input_types)


def _in_control_flow(ops):
    """The operations that run in a branch of a condition or in a loop. Imported graphs have no contexts that say so."""
    enters = frozenset(("Enter", "RefEnter", "NextIteration", "RefNextIteration"))
    found = set()
    for op in ops:
        inputs = [one.op for one in op.inputs] + list(op.control_inputs)
        ends = op.type in ("Exit", "RefExit") or (op.type in ("Merge", "RefMerge") and not any(one.type in enters for one in inputs))
        begins = op.type in enters or op.type in ("Switch", "RefSwitch") or op._get_control_flow_context() is not None
        if begins or (not ends and any(one in found for one in inputs)):
            found.add(op)
    return found


def _task(device):
    import tensorflow as tf

    spec = tf.DeviceSpec.from_string(device or "")
    return (spec.job, spec.task)


class Parts:
    """The operations of a step, sorted."""

    def __init__(self, ops):
        self.ops = ops
        self.takes = [op for op in ops if op.type in _NEXT]
        if not self.takes:
            raise Unable("it takes nothing from a dataset's iterator")
        tasks = {_task(op.device) for op in self.takes}
        if len(tasks) > 1:
            raise Unable("its iterators are on several tasks")
        self._own = tasks.pop()
        self._servers = {_task(op.device) for op in ops if op.type in _VARIABLES} - {self._own, (None, None)}
        self.in_control_flow = _in_control_flow(ops)
        self.kind = {}
        for op in ops:
            self.kind[op] = self._kind_of(op)
        self.roots = self._roots()

    def _kind_of(self, op):
        if op.type in _VARIABLES or op.type in _TABLE or (op.type.startswith(("Iterator", "OneShotIterator")) and not op.inputs):
            return "source"
        kinds = {self.kind.get(one.op) for one in op.inputs} | {self.kind.get(one) for one in op.control_inputs}
        if op.type in _NEXT:
            if not kinds <= {"source", "constant"}:
                raise Unable(f"{op.name} waits for something else in its step")
            return "input"
        if op in self.in_control_flow or op.type in _PLACEHOLDERS or not kinds <= {"source", "constant", "input", "pull"} or any(map(_is_handle, op.outputs)):
            return "rest"
        touches = [one for one in op.inputs if _is_handle(one)]
        if op.type in _FIND:
            return "input" if all(one.op.type in _TABLE for one in touches) and "pull" not in kinds else "rest"
        if touches:
            reads = _only_reads(op) and op.type not in ("VarIsInitializedOp", "IsVariableInitialized", "VariableShape")
            return "pull" if reads and all(one.op.type in _VARIABLES and _task(one.op.device) in self._servers for one in touches) else "rest"
        if op._is_stateful:
            return "rest"
        if "pull" in kinds:
            return "pull" if _task(op.device) in self._servers else "rest"
        if "input" in kinds and "pull" not in kinds:
            return "input" if _task(op.device) in (self._own, (None, None)) else "rest"
        return "constant"

    def _roots(self):
        """By tensor that is a handle: the names of the variables that it may be of."""
        roots, changed = {}, True
        while changed:  # in loops, handles come back
            changed = False
            for op in self.ops:
                given = set().union(*(roots.get(one, ()) for one in op.inputs if _is_handle(one)))
                if not given and op.type in _VARIABLES:
                    given = {_name_of(op)}
                for one in op.outputs:
                    if _is_handle(one) and not given <= roots.get(one, set()):
                        roots[one] = roots.get(one, set()) | given
                        changed = True
        return roots

    def cut(self):
        """Tensors that can be fed, without which nothing needs the iterators."""
        found, open_ = [], [one for op in self.takes for one in op.outputs]
        while open_:
            one = open_.pop(0)
            if _can_be_staged(one):
                found.append(one)
                continue
            # Such as a sparse tensor in one piece. What takes it apart is fed instead.
            for op in one.consumers():
                if op in self.kind:
                    if self.kind[op] != "input":
                        raise Unable(f"{op.name} takes a value of type {one.dtype.name} from an iterator")
                    open_.extend(op.outputs)
        return list(dict.fromkeys(found))

    def roots_of(self, op):
        return set().union(*(self.roots.get(one, ()) for one in op.inputs if _is_handle(one)))

    def of(self, *kinds):
        return [op for op in self.ops if self.kind[op] in kinds]

    def is_beside(self, op, other):
        """Whether both are on the same server."""
        return _task(op.device) == _task(other.device) and _task(op.device) in self._servers


def _can_be_staged(tensor):
    import tensorflow as tf

    return not _is_handle(tensor) and tensor.dtype != tf.variant


def _name_of(op):
    """Two operations with one name are one variable."""
    name = op.get_attr("shared_name").decode() if "shared_name" in op.node_def.attr else ""
    container = op.get_attr("container").decode() if "container" in op.node_def.attr else ""
    return (container, name or op.name)


class Rewrite:
    """The rewritten step. All of its attributes are operations or tensors of the same graph.

    Attributes:
      cut: the tensors of the input part without which nothing needs the iterators.
      read: reads a batch.
      first: takes the oldest batch that was read, whose values are `first_inputs`, and makes it ready.
      next: the same, behind the updates of a step that runs with it.
      ready_inputs: takes the oldest batch that is ready: the values for `first_inputs`, which begin with those of `cut`.
      clear: drops all batches.
    """

    def __init__(self, graph, fetched, parts):
        self._parts, self._fetched = parts, list(dict.fromkeys(fetched))
        self._prefix = _unique_name()
        with _extended(graph):
            self._build(graph)

    def fetched(self, one):
        """What has the value of a fetched tensor, or the effect of a fetched operation, in the rewritten step."""
        return self._fetches[one]

    def _build(self, graph):
        import tensorflow as tf

        parts = self._parts
        copied = self._copied()
        self.cut = parts.cut()
        users = parts.of("pull") + copied
        inputs = self.cut + [one for op in users for one in op.inputs if parts.kind[one.op] == "input"]
        inputs += [one for one in self._fetched if one in self._tensors("input")]
        here = set(copied)
        pulled = [one for op in copied for one in op.inputs if parts.kind[one.op] == "pull" and one.op not in here]
        pulled += [one for one in self._fetched if one in self._tensors("pull")]
        inputs, pulled = list(dict.fromkeys(inputs)), list(dict.fromkeys(pulled))
        whole = next((one for one in inputs + pulled if not _can_be_staged(one)), None)
        if whole is not None:
            raise Unable(f"{whole.name} is of type {whole.dtype.name}")
        if not pulled:
            raise Unable("the worker reads no variable on another task whose row it could know before its step begins")
        read, ready = self._prefix + "_read", self._prefix + "_ready"
        device = parts.takes[0].device or None
        with tf.compat.v1.device(device), tf.compat.v1.device("CPU:0"):
            self.read = tf.raw_ops.Stage(values=inputs, shared_name=read)
            following = _unstage(inputs, read)
            with tf.control_dependencies(following[:1]):  # so that the planner knows: both are there
                now = _unstage(inputs + pulled, ready)
            self.ready_inputs = _unstage(inputs + pulled, ready)[: len(inputs)]
            self.first_inputs = _unstage(inputs, read)
            self.clear = tf.group(
                tf.raw_ops.StageClear(dtypes=[one.dtype for one in inputs], shared_name=read),
                tf.raw_ops.StageClear(dtypes=[one.dtype for one in inputs + pulled], shared_name=ready),
            )
        rest = _copies(graph, copied, dict(zip(inputs + pulled, now)), self._prefix + "/step")
        pulls = parts.of("pull")
        first = _copies(graph, pulls, dict(zip(inputs, self.first_inputs)), self._prefix + "/first")
        later = _copies(graph, pulls, dict(zip(inputs, following)), self._prefix + "/next")
        for op in pulls:
            later[op]._add_control_inputs(self._updates(op, rest))
        with tf.compat.v1.device(device), tf.compat.v1.device("CPU:0"):
            self.first = tf.raw_ops.Stage(values=self.first_inputs + [first[one] for one in pulled], shared_name=ready)
            self.next = tf.raw_ops.Stage(values=following + [later[one] for one in pulled], shared_name=ready)
        staged = dict(zip(inputs + pulled, now))
        self._fetches = {one: rest.get(one, staged.get(one, one)) for one in self._fetched}
        nothing = [one for one in self._fetched if hasattr(one, "node_def") and one not in rest and parts.kind[one] in ("input", "pull")]
        self._fetches.update((one, now[0].op) for one in nothing)  # they have run

    def _tensors(self, kind):
        return {one for op in self._parts.of(kind) for one in op.outputs}

    def _copied(self):
        """The rest, and the pulls whose value stays on its server."""
        parts, copied = self._parts, set(self._parts.of("rest"))
        for op in reversed(parts.ops):
            if op in copied:
                for one in op.inputs:
                    if parts.kind[one.op] == "pull" and (parts.kind[op] == "pull" or parts.is_beside(op, one.op)):
                        copied.add(one.op)
        return [op for op in parts.ops if op in copied]

    def _updates(self, op, copies):
        """The copies of the operations that may change a variable which this one reads."""
        roots = self._parts.roots_of(op)
        updates = []
        for other in self._parts.of("rest"):
            if roots and _touches(other) and not _only_reads(other) and roots & self._parts.roots_of(other):
                if other in self._parts.in_control_flow:
                    raise Unable(f"{other.name} updates a variable in a condition or a loop")
                updates.append(copies[other])
        return updates


class Redirected:
    """A run that takes the oldest batch that is ready, instead of an element. What is fed stays as it is."""

    def __init__(self, graph, ops, fed, rewrite):
        given, copied = {one: value for one, value in zip(rewrite.cut, rewrite.ready_inputs) if one not in fed}, set()
        in_control_flow = _in_control_flow(ops)
        for _ in range(2):
            for op in ops:
                if any(one in given or one.op in copied for one in op.inputs) or any(one in copied for one in op.control_inputs):
                    copied.add(op)
            if not copied & in_control_flow:
                break
            copied |= in_control_flow  # a loop is copied as a whole
        copied = [op for op in ops if op in copied]
        with _extended(graph):
            self._made = _copies(graph, copied, given, _unique_name() + "/run")
            for op in copied:
                self._made[op]._add_control_inputs([one for one in op.control_inputs if one not in self._made])
        self._made.update(given)

    def fetched(self, one):
        return self._made.get(one, one)


def _unique_name():
    return "starwire_ahead_" + uuid.uuid4().hex[:12]


@contextlib.contextmanager
def _extended(graph):
    """Lets operations be added to a graph, whatever the caller's context is."""
    import tensorflow as tf

    is_final = graph.finalized
    if is_final:
        graph._unsafe_unfinalize()
    try:
        with graph.as_default(), tf.control_dependencies(None), tf.compat.v1.device(None), tf.compat.v1.name_scope(None):
            yield
    finally:
        if is_final:
            graph.finalize()


def _copies(graph, ops, given, name):
    """Copies operations, with `given` for tensors of others. Returns the copies by what they are of."""
    import tensorflow as tf

    own, outside, data = set(ops), {}, tf.compat.v1.GraphDef()
    data.versions.CopyFrom(graph.graph_def_versions)
    for op in ops:
        node = data.node.add()
        node.CopyFrom(op.node_def)
        node.attr.pop("_class", None)  # they have the device of what they are colocated with
        del node.input[:]
        for one in op.inputs:
            node.input.append(one.name)
            if one.op not in own or one in given:
                outside[one.name] = given.get(one, one)
        node.input.extend("^" + one.name for one in op.control_inputs if one in own)
    tf.compat.v1.import_graph_def(data, input_map=outside, name=name)
    made = {}
    for op in ops:
        made[op] = graph.get_operation_by_name(f"{name}/{op.name}")
        made.update(zip(op.outputs, made[op].outputs))
    return made


def _unstage(values, name):
    """Takes values out of a stage again. TensorFlow optimizes what it knows the shapes of: other roundings were other bits."""
    import tensorflow as tf

    made = tf.raw_ops.Unstage(dtypes=[one.dtype for one in values], shared_name=name)
    return [one if value.shape.rank is None else tf.raw_ops.EnsureShape(input=one, shape=value.shape) for one, value in zip(made, values)]
