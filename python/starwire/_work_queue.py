"""A queue of work that a parameter server hands out to workers."""

import os
import re

# Of this process: the server takes the items back from an earlier process of the same worker.
_INCARNATION = int.from_bytes(os.urandom(7), "little")


def _this_worker(device):
    """Returns the name of the task that runs this program."""
    found = re.search(r"/job:([^/]+).*/task:(\d+)", device or "")
    if found:
        return f"/job:{found[1]}/task:{found[2]}"
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type is None or resolver.task_id is None:
        raise ValueError("starwire: a WorkQueue cannot tell which worker this is: pass worker=, or set TF_CONFIG")
    return f"/job:{resolver.task_type}/task:{resolver.task_id}"


class WorkQueue:
    """Items (names of files, say) that a parameter server hands out to whoever asks, each once per epoch::

        queue = starwire.WorkQueue(files, num_epochs=3)
        path = queue.take()  # a string tensor; OutOfRangeError after the last item

    All workers build the same queue; the server's is created by the chief's initializer. ``tf.compat.v1.train.Saver`` and
    ``MonitoredTrainingSession`` save and restore it with the variables. A worker is done with an item when it takes the next one in the same session. What a
    worker was not done with is handed out again: at once if the worker is started again or has another session (after an error, say), else after ``lease``
    seconds in which it has taken nothing. An item that was taken by a step that failed counts as taken if the session goes on. For graphs of TensorFlow 1; the
    names follow DeepRec's ``tf.python.ops.work_queue``.

    works: a list of strings. They must be the same at all workers.
    num_epochs: how often each item is handed out.
    shuffle: whether each epoch has an order of its own. All workers see the same one.
    seed: of the shuffles; None: that of the first worker to create the queue.
    prefix: is put before each item that is taken.
    num_clients: how many threads of a worker take items. It is done with an item when it has taken so many others, or so many threads wait.
    name: of the queue on its server.
    device: the task that has the queue.
    worker: the name of this worker; by default that of the current device, or of TF_CONFIG.
    lease: seconds.
    """

    def __init__(
        self, works, num_epochs=1, shuffle=True, seed=None, prefix=None, num_clients=1, name="work_queue", device="/job:ps/task:0", worker=None, lease=600.0
    ):
        import tensorflow as tf
        from tensorflow.python.ops import resources
        from tensorflow.python.training.saving import saveable_object

        if tf.executing_eagerly():
            raise RuntimeError("starwire: a WorkQueue belongs to a graph: build it under tf.Graph().as_default()")
        if not isinstance(works, (list, tuple)) or not works or not all(isinstance(work, (str, bytes)) and work.strip() for work in works):
            raise ValueError("starwire: a WorkQueue needs a list of strings, none of them empty, and at least one")
        for what, value in (("num_epochs", num_epochs), ("num_clients", num_clients), ("lease", lease)):
            if not value > 0:
                raise ValueError(f"starwire: {what} of a WorkQueue must be positive, not {value}")
        self._works, self._epochs, self._prefix, self._clients = [tf.compat.as_bytes(work).strip() for work in works], int(num_epochs), prefix, int(num_clients)
        self.name, self._device, self._lease_ms = name, device, max(1, int(lease * 1000))
        self._graph = tf.compat.v1.get_default_graph()
        self._here = tf.no_op(f"{name}/here").device
        self._worker = worker or _this_worker(self._here)
        seed = int.from_bytes(os.urandom(7), "little") if seed is None else int(seed)
        with self._on_server():
            self._handle = self._op("", [], [tf.resource], shared_name=name)
            items = tf.constant(self._works, tf.string, name=f"{name}/works")
        options = {"epochs": self._epochs, "shuffle": bool(shuffle), "seed": seed}
        with self._on_server():
            self._create = self._op("Create", [self._handle, items], [], **options)
            self._is_initialized = self._op("IsInitialized", [self._handle], [tf.bool])
            self._save = self._op("Save", [self._handle], [tf.string])
        resources.register_resource(self._handle, self._create, self._is_initialized, is_shared=True)
        queue = self

        class Saveable(saveable_object.SaveableObject):
            def __init__(self):
                super().__init__(queue._handle, [saveable_object.SaveSpec(queue._save, "", name)], queue._handle.op.name)

            def restore(self, restored_tensors, restored_shapes):
                with queue._on_server():
                    return queue._op("Restore", [queue._handle, items, restored_tensors[0]], [], **options)

        self._graph.add_to_collection(tf.compat.v1.GraphKeys.SAVEABLE_OBJECTS, Saveable())

    def _on_server(self):
        import tensorflow as tf

        return tf.device(self._device)

    def _op(self, what, inputs, dtypes, **attributes):
        from tensorflow.core.framework import attr_value_pb2

        kinds = {bool: "b", int: "i", str: "s"}
        encode = lambda value: value.encode() if isinstance(value, str) else value  # noqa: E731
        attrs = {key: attr_value_pb2.AttrValue(**{kinds[type(value)]: encode(value)}) for key, value in attributes.items()}
        op = self._graph.create_op(f"StarwireWorkQueue{what}", inputs, dtypes, attrs=attrs, name=f"{self.name}/{what or 'queue'}")
        return op.outputs[0] if dtypes else op

    def __len__(self):
        """The number of items of an epoch."""
        return len(self._works)

    @property
    def works(self):
        return list(self._works)

    @property
    def initializer(self):
        """Creates the queue on its server, if it is not there yet; part of ``Scaffold``'s default initializer."""
        return self._create

    def size(self):
        """Returns a tensor: how many items, over all epochs, no worker is done with."""
        import tensorflow as tf

        with self._on_server():
            return self._op("Size", [self._handle], [tf.int64])

    def take(self):
        """Returns a tensor: the next item. If other workers still have the last ones, the step waits until these are done with, or come back."""
        return self._take(self._clients, True)

    def _take(self, in_progress, waits, ends_empty=False):
        import tensorflow as tf

        with self._on_server():
            worker, incarnation = tf.constant(self._worker, tf.string), tf.constant(_INCARNATION, tf.int64)
            inputs = [self._handle, worker, incarnation]
            taken = self._op("Take", inputs, [tf.string], in_progress=in_progress, lease_ms=self._lease_ms, waits=waits, ends_empty=ends_empty)
        with tf.device(self._here):
            taken = tf.identity(taken)
            return taken if self._prefix is None else tf.strings.join([self._prefix, taken])

    def input_producer(self):
        """Returns a ``FIFOQueue`` of this worker that a queue runner fills, for readers of TensorFlow 1. The runner does not wait for items that other workers
        still have."""
        return self._producer(ends_empty=False)

    def _producer(self, ends_empty):
        import tensorflow as tf

        one = tf.compat.v1
        # One in the queue, one that the runner holds, and those that are being read.
        work = self._take(self._clients + 2, False, ends_empty)
        with tf.device(self._here):
            proxy = tf.queue.FIFOQueue(1, [tf.string], [()], name=f"{self.name}/proxy")
            runner = one.train.QueueRunner(proxy, [proxy.enqueue(work)], close_op=proxy.close(), cancel_op=proxy.close(cancel_pending_enqueues=True))
            one.train.add_queue_runner(runner)
        return proxy

    def input_dataset(self):
        """Returns a ``tf.data.Dataset`` of the items that ``input_producer`` yields."""
        import tensorflow as tf

        # A dataset does not take the end of a queue for its own.
        proxy = self._producer(ends_empty=True)
        end = self._prefix or ""
        with tf.device(self._here):
            items = tf.data.Dataset.from_tensors(0).repeat().map(lambda _: proxy.dequeue())
            return items.apply(tf.data.experimental.take_while(lambda item: tf.not_equal(item, end)))

    def add_summary(self):
        """Adds a summary of the fraction that is left."""
        import tensorflow as tf

        all_items = len(self) * self._epochs
        tf.compat.v1.summary.scalar(f"{self.name}/fraction_left", tf.cast(self.size(), tf.float32) / all_items)
