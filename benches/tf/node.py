"""One process of the cluster: a ps serves; a worker serves and runs steps on command; a chief schedules steps on command.

Commands and answers are JSON lines over a socket to the orchestrator.
"""

import json
import os
import pathlib
import sys
import time
import traceback


def serve(channel, spec):
    """Runs in a forked child. `spec`: cluster, job, task, servers (how many, from this task on), protocol ("": no server), library, case (object). Never returns normally: the orchestrator closes the channel."""
    try:
        import tensorflow as tf

        if spec["library"]:
            tf.load_library(spec["library"])
        target = ""
        if spec["protocol"] and spec["job"] != "chief":
            tasks = range(spec["task"], spec["task"] + spec["servers"])
            servers = [tf.distribute.Server(spec["cluster"], job_name=spec["job"], task_index=task, protocol=spec["protocol"]) for task in tasks]
            target = servers[0].target
        channel.answer({"ok": True})
        worker = None
        for line in channel.lines():
            command = json.loads(line)
            if command["do"] == "open":
                worker = Chief(spec) if spec["case"].driver == "chief" else Worker(target, spec)
                channel.answer({"ok": True})
            else:
                channel.answer({"ok": True, **getattr(worker, command.pop("do"))(**command)})
    except BaseException as error:  # the orchestrator must see every error, even SystemExit
        channel.answer({"ok": False, "error": f"{type(error).__name__}: {error}"[:2000], "traceback": traceback.format_exc()[-4000:]})


def configured(case, target, graph, spec):
    """A session with the column's options, and its steps."""
    if spec["library"]:
        os.environ["STARWIRE_LIBRARY"] = spec["library"]
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
    import starwire
    import tensorflow as tf

    case.open(tf.compat.v1.Session(target, graph=graph, config=starwire.config(**spec["options"])))
    return case.session, case._run


class Worker:
    def __init__(self, target, spec):
        import cases
        import tensorflow as tf

        self.tf, self.case = tf, spec["case"]
        cases.local = not target
        graph = tf.Graph()
        with graph.as_default():
            self.case.build(spec["task"])
        self.configured = spec.get("options") and configured(self.case, target, graph, spec)
        self.case.open(tf.compat.v1.Session(target, graph=graph))

    def trace(self, steps):
        return {"digest": self.case.trace(steps), "steps": self.case.steps}

    def edges(self):
        """Runs one step that also returns the partitions, and counts the messages between tasks and the tensors in them."""
        tf1 = self.tf.compat.v1
        metadata = tf1.RunMetadata()
        self.case.run_with(tf1.RunOptions(output_partition_graphs=True), metadata)
        messages = inside = 0
        for partition in metadata.partition_graphs:
            for node in partition.node:
                if node.op in ("_Recv", "_HostRecv"):
                    sender, receiver = node.attr["send_device"].s, node.attr["recv_device"].s
                    messages += sender.rsplit(b"/device", 1)[0] != receiver.rsplit(b"/device", 1)[0]
                if node.op == "StarwireUnfuse":
                    inside += len(node.attr["T"].list.type) - 1
                if node.op == "StarwireCall":  # one message each way, whatever its contents
                    messages += 1
                    inside += len(node.attr["Tin"].list.type) + len(node.attr["Tout"].list.type) - 1
        return {"tensors": messages + inside, "messages": messages, "partitions": len(metadata.partition_graphs)}

    def window(self, seconds):
        """Runs steps for `seconds`; returns the time of each step."""
        case = self.case
        if self.configured:
            sequential, (case.session, case._run) = (case.session, case._run), self.configured
        step, clock, took = self.case.run, time.perf_counter, []
        if self.configured:  # its graph is made in its first steps
            for _ in range(4):
                step()
        begin = last = clock()
        end = begin + seconds
        while last < end:
            step()
            t = clock()
            took.append(t - last)
            last = t
        if self.configured:
            case.session.run([])  # waits for the last steps
            last = clock()
            case.session, case._run = sequential
        return {"elapsed": last - begin, "took": took}

    def losses(self, steps):
        """The loss of each of `steps` steps from the initial state."""
        self.case.init()
        if self.configured:
            self.case.session, self.case._run = self.configured
        self.case.steps, self.case.losses = 0, []
        for _ in range(steps):
            self.case.run()
        return {"losses": self.case.losses}

    def steps(self):
        return {"steps": self.case.steps}

    def check(self, total_steps):
        return {"sum": self.case.check(total_steps)}


class Chief:
    """Functions of TensorFlow 2."""

    def __init__(self, spec):
        import tensorflow as tf

        self.case = spec["case"]
        others = set(spec["options"]) - {"pipeline"}
        if others:
            raise ValueError(f"functions have no session, and so no options {sorted(others)}")
        if spec["library"]:
            os.environ["STARWIRE_LIBRARY"] = spec["library"]
        resolver = None
        if spec["protocol"]:
            resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(spec["cluster"]), task_type="chief", task_id=0, rpc_layer=spec["protocol"])
        self.case.connect(resolver, spec["options"].get("pipeline"))

    def trace(self, steps):
        return {"digest": self.case.trace(steps), "steps": self.case.steps}

    def edges(self):
        """TensorFlow does not tell how it cut a function."""
        return {"tensors": 0, "messages": None}

    def window(self, seconds):
        """Runs steps for `seconds`, some at a time; returns the mean time of a step in each of these bursts, for each step."""
        case, clock, took = self.case, time.perf_counter, []
        steps = case.burst()
        begin = last = clock()
        while last < begin + seconds:
            case.run(steps)
            t = clock()
            took += [(t - last) * case.workers / steps] * steps
            last = t
        return {"elapsed": last - begin, "took": took}

    def steps(self):
        return {"steps": self.case.steps}

    def check(self, total_steps):
        return {"sum": self.case.check(total_steps)}
