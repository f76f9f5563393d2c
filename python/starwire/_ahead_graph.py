"""Rewrites the graph of a training step so that it pulls the parameters of the next step behind its own updates: see _ahead.py.

The operations that lead to what a run fetches are sorted into

* *sources*: variables, iterators, and other objects that are found by name;
* *constants*: operations without effects that need no input;
* *input*: IteratorGetNext, and operations without effects that need nothing but its outputs and constants;
* *pulls*: reads of variables that wait for nothing but these, and operations without effects on the task of a variable that need nothing else;
* the *rest*, which computes and updates.

A read-ahead run stages the outputs of the input part. The step takes those of the next batch from there, its own batch together with the pulled
values from a second stage, runs a copy of the rest, then pulls for the next batch, and stages that for the next step.
"""

import contextlib
import functools
import threading
import uuid

_VARIABLES = frozenset(("VarHandleOp", "VariableV2", "Variable", "AutoReloadVariable"))
_NEXT = frozenset(("IteratorGetNext", "IteratorGetNextSync"))
# What else leaves an iterator where it is, or takes the next element.
_KEEP_PLACE = frozenset(("IteratorToStringHandle", "SerializeIterator", "IteratorGetDevice", "IteratorGetNextAsOptional"))
_READS = frozenset(("ReadVariableOp", "ResourceGather", "ResourceGatherNd"))
_PLACEHOLDERS = frozenset(("Placeholder", "PlaceholderV2", "PlaceholderWithDefault"))
# With functions that may run on other tasks: an edge behind them does not wait for all that these do.
_BRANCHES = frozenset(("If", "StatelessIf", "Case", "StatelessCase"))
# Their objects live as long as a step, or they have effects that nothing can wait for.
_OF_STEP = ("TensorArray", "Stack", "Random", "Stateless", "Truncated", "ParameterizedTruncated", "Multinomial", "Assert", "Print")
# A table that never changes once it has been initialised.
_TABLE, _FIND = frozenset(("HashTableV2", "HashTable")), frozenset(("LookupTableFindV2", "LookupTableFind"))
# Sessions in several threads may have one graph.
_extending = threading.RLock()


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


def takes(ops):
    return [op for op in ops if op.type in _NEXT]


def iterators_used(ops):
    """The names of the iterators with which one of these operations does anything but take an element or tell its name."""
    found = set()
    for op in ops:
        if "Iterator" in op.type and op.type not in _NEXT and op.type not in _KEEP_PLACE:
            found.update(_name_of(one.op) for one in op.inputs if _is_handle(one))
    return found


def iterator_of(op):
    return _name_of(op.inputs[0].op)


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


@functools.lru_cache(maxsize=None)
def _task(device):
    import tensorflow as tf

    spec = tf.DeviceSpec.from_string(device or "")
    return (spec.job, spec.task)


class Parts:
    """The operations of a step, sorted."""

    def __init__(self, ops):
        self.ops = ops
        if len(takes(ops)) != 1:
            raise Unable("it takes more than one element" if takes(ops) else "it takes nothing from a dataset's iterator")
        self.take = takes(ops)[0]
        self._servers = {_task(op.device) for op in ops if op.type in _VARIABLES} - {_task(self.take.device), (None, None)}
        self.in_control_flow = _in_control_flow(ops)
        self._known_effects = None
        self.kind = {}
        for op in ops:
            self.kind[op] = self._kind_of(op)
        self.roots = self._roots()

    def _kind_of(self, op):
        if _is_source(op):
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
            return "rest" if _task(op.device) in self._servers else "input"
        return "constant"

    def _roots(self):
        """By tensor that is a handle: the names of the objects that it may be of."""
        roots, changed = {}, True
        while changed:  # in loops, handles come back
            changed = False
            for op in self.ops:
                given = {_name_of(op)} if _is_source(op) else set().union(*(roots.get(one, ()) for one in op.inputs if _is_handle(one)))
                for one in op.outputs:
                    if _is_handle(one) and not given <= roots.get(one, set()):
                        roots[one] = roots.get(one, set()) | given
                        changed = True
        return roots

    def cut(self):
        """Tensors that can be fed, without which nothing needs the iterators."""
        found, open_ = [], list(self.take.outputs)
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

    def updates(self, read):
        """The operations of the rest behind which a read of variables sees what one in the next step would see."""
        effects = self._effects()
        found = list(dict.fromkeys(op for root in (None, *sorted(self._roots_of(read)[0])) for op in effects.get(root, ())))
        for op in found:
            if op in self.in_control_flow or op.type in _BRANCHES:
                raise Unable(f"{op.name} is in a condition or a loop, and may update a variable or wait for an update")
        return found

    def _effects(self):
        """By name of a variable: the operations of the rest that may update it. None: those that may wait for an update of another worker."""
        if self._known_effects is None:
            variables = {_name_of(op) for op in self.ops if op.type in _VARIABLES}
            passive = {_name_of(op) for op in self.ops if op.type in _TABLE or op.type.endswith("Iterator") or "IteratorV2" in op.type}
            self._known_effects = {}
            for op in self.of("rest"):
                touches, (roots, is_known) = _touches(op), self._roots_of(op)
                if (touches and _only_reads(op)) or not (touches or op._is_stateful) or (op.type.startswith(_OF_STEP) and not roots):
                    continue
                is_update = touches and is_known and roots <= (variables | passive)
                for root in roots if is_update else (None,):
                    self._known_effects.setdefault(root, []).append(op)
        return self._known_effects

    def _roots_of(self, op):
        handles = [self.roots.get(one, set()) for one in op.inputs if _is_handle(one)]
        return set().union(*handles), all(handles)

    def of(self, *kinds):
        return [op for op in self.ops if self.kind[op] in kinds]

    def is_beside(self, op, other):
        """Whether both are on the same server."""
        return _task(op.device) == _task(other.device) and _task(op.device) in self._servers


def _is_source(op):
    """Whether it finds an object that outlives the step. A copy might find another one."""
    return op._is_stateful and "shared_name" in op.node_def.attr and any(map(_is_handle, op.outputs))


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
        shapes = _shapes(graph, inputs + pulled)
        device = parts.take.device or None
        with tf.compat.v1.device(device), tf.compat.v1.device("CPU:0"):
            self.read = tf.raw_ops.Stage(values=inputs, shared_name=read)
            following = _unstage(inputs, read, shapes)
            with tf.control_dependencies(following[:1]):  # so that the planner knows: both are there
                now = _unstage(inputs + pulled, ready, shapes)
            self.ready_inputs = _unstage(inputs + pulled, ready, shapes)[: len(inputs)]
            self.first_inputs = _unstage(inputs, read, shapes)
            self.clear = tf.group(
                tf.raw_ops.StageClear(dtypes=[one.dtype for one in inputs], shared_name=read),
                tf.raw_ops.StageClear(dtypes=[one.dtype for one in inputs + pulled], shared_name=ready),
            )
        pulls = parts.of("pull")
        step = _Copies("step", copied, dict(zip(inputs + pulled, now)))
        later = _Copies("next", pulls, dict(zip(inputs, following)))
        for op in pulls:
            later.after(op, [step.name_of(one) for one in parts.updates(op)])
        first = _Copies("first", pulls, dict(zip(inputs, self.first_inputs)))
        _add(graph, self._prefix, step, later, first)
        with tf.compat.v1.device(device), tf.compat.v1.device("CPU:0"):
            self.first = tf.raw_ops.Stage(values=self.first_inputs + [first.made[one] for one in pulled], shared_name=ready)
            self.next = tf.raw_ops.Stage(values=following + [later.made[one] for one in pulled], shared_name=ready)
        staged = dict(zip(inputs + pulled, now))
        self._fetches = {one: step.made.get(one, staged.get(one, one)) for one in self._fetched}
        nothing = [one for one in self._fetched if hasattr(one, "node_def") and one not in step.made and parts.kind[one] in ("input", "pull")]
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


class Redirected:
    """A run that takes the oldest batch that is ready, instead of an element. What is fed stays as it is."""

    def __init__(self, graph, wanted, ops, fed, rewrite):
        staged = dict(zip(rewrite.cut, rewrite.ready_inputs))
        given = {**staged, **{one: one for one in fed}}
        copied, needs = set(), set(takes(ops))  # needs: what only leads from the element to those
        in_control_flow = _in_control_flow(ops)
        for _ in range(2):
            for op in ops:
                if any(one.op in needs and one not in given for one in op.inputs):
                    needs.add(op)
                elif any(one in staged and one not in fed or one.op in copied for one in op.inputs) or any(one in copied or one in needs for one in op.control_inputs):
                    copied.add(op)
            if not copied & in_control_flow:
                break
            copied |= in_control_flow - needs  # a loop is copied as a whole
        if any(one not in staged and (one in needs or getattr(one, "op", None) in needs) and not hasattr(one, "node_def") for one in wanted):
            raise Unable("it fetches what cannot be kept")
        if any(one not in given for op in needs for one in op.outputs for user in one.consumers() if user in copied):
            raise Unable("it takes what cannot be kept")
        with _extended(graph):
            run = _Copies("run", [op for op in ops if op in copied], given)
            for op in run.ops:
                outside = [one for one in op.control_inputs if one not in copied]
                run.after_others(op, [staged[rewrite.cut[0]] if one in needs else _gate(one) for one in outside])
            _add(graph, _unique_name(), run)
        self._made = {**run.made, **given, **{op: rewrite.ready_inputs[0].op for op in needs}}

    def fetched(self, one):
        return self._made.get(one, one)


def _gate(op):
    """A tensor behind an operation, which may have none."""
    import tensorflow as tf

    with tf.control_dependencies([op]), tf.compat.v1.device(op.device or None):
        return tf.constant(0)


def _unique_name():
    return "starwire_ahead_" + uuid.uuid4().hex[:12]


@contextlib.contextmanager
def _extended(graph):
    """Lets operations be added to a graph, whatever the caller's context is."""
    import tensorflow as tf

    with _extending:
        is_final = graph.finalized
        if is_final:
            graph._unsafe_unfinalize()
        try:
            with graph.as_default(), tf.control_dependencies(None), tf.compat.v1.device(None), tf.compat.v1.name_scope(None):
                yield
        finally:
            if is_final:
                graph.finalize()


class _Copies:
    """Copies of operations, with `given` for tensors of others. `made`: the copies by what they are of, once they have been added."""

    def __init__(self, name, ops, given):
        import tensorflow as tf

        self.name, self.ops, self._given = name, ops, given
        own, self.outside, self.made = set(ops), {}, {}
        self.nodes = {op: tf.compat.v1.NodeDef() for op in ops}
        for op, node in self.nodes.items():
            node.CopyFrom(op.node_def)
            node.name = self.name_of(op)
            node.attr.pop("_class", None)  # they have the device of what they are colocated with
            if "shared_name" in node.attr and not node.attr["shared_name"].s:  # the object is named after the original
                node.attr["shared_name"].s = op.name.encode()
            del node.input[:]
            for one in op.inputs:
                is_own = one.op in own and one not in given
                node.input.append(f"{name}/{one.name}" if is_own else self._outside(given.get(one, one)))
        for op, node in self.nodes.items():
            node.input.extend("^" + self.name_of(one) for one in op.control_inputs if one in own)

    def name_of(self, op):
        return f"{self.name}/{op.name}"

    def _outside(self, tensor):
        alias = f"{self.name}_outside_{len(self.outside)}"
        self.outside[alias + ":0"] = tensor
        return alias + ":0"

    def after(self, op, names):
        self.nodes[op].input.extend("^" + name for name in names)

    def after_others(self, op, tensors):
        for tensor in tensors:
            alias = f"{self.name}_after_{len(self.outside)}"
            self.outside["^" + alias] = tensor
            self.nodes[op].input.append("^" + alias)


def _add(graph, name, *all_copies):
    """Adds copies to a graph, all at once: another thread's run may take the graph as it is at any moment."""
    import tensorflow as tf

    data, outside = tf.compat.v1.GraphDef(), {}
    data.versions.CopyFrom(graph.graph_def_versions)
    for copies in all_copies:
        data.node.extend(copies.nodes.values())
        outside.update(copies.outside)
    tf.compat.v1.import_graph_def(data, input_map=outside, name=name)
    for copies in all_copies:
        for op in copies.ops:
            made = copies.made[op] = graph.get_operation_by_name(f"{name}/{copies.name_of(op)}")
            copies.made.update(zip(op.outputs, made.outputs))


def _shapes(graph, tensors):
    """The shapes that the server will know. set_shape() may have told the client more."""
    import tensorflow as tf

    data = tf.compat.v1.GraphDef()
    data.versions.CopyFrom(graph.graph_def_versions)
    graph._copy_functions_to_graph_def(data, 0)
    for op in leading_to(tensors):
        data.node.add().CopyFrom(op.node_def)
        data.node[-1].attr.pop("_class", None)
    scratch = tf.Graph()
    try:
        with scratch.as_default():
            tf.compat.v1.import_graph_def(data, name="")
    except (ValueError, tf.errors.OpError):  # an operation that cannot be imported alone
        return {}
    return {one: scratch.get_tensor_by_name(one.name).shape for one in tensors}


def _unstage(values, name, shapes):
    """Takes values out of a stage again. TensorFlow optimizes what it knows the shapes of: other roundings were other bits."""
    import tensorflow as tf

    made = tf.raw_ops.Unstage(dtypes=[one.dtype for one in values], shared_name=name)
    shaped = lambda one, shape: one if shape is None or shape.rank is None else tf.raw_ops.EnsureShape(input=one, shape=shape)
    return [shaped(one, shapes.get(value)) for one, value in zip(made, values)]
