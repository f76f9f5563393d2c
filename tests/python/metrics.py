"""The metrics that a server answers with on its data port."""

import re

import wire


def data_port(task):
    """Returns the address of a task's data port, from its start-up log line."""
    log = task.wait_for_log("data port")
    found = re.search(r"starwire: \S+ on \d+ reactors? \(.*data port (\S+:\d+)", log)
    assert found, log
    host, port = found.group(1).rstrip(",").rsplit(":", 1)
    return f"{ {'0.0.0.0': '127.0.0.1', '[::]': '[::1]'}.get(host, host) }:{port}".replace(" ", "")


def metrics(address):
    status, body = wire.http_get(address, "/metrics")
    assert status == 200
    return body


def metric(address, name):
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics(address).splitlines() if re.match(rf"{name}(\{{|\s)", line))


def counters(task):
    """Returns all whole numbers by name, without starwire_ and _total."""
    return {name: int(value) for name, value in re.findall(r"^starwire_(\w+?)(?:_total)?\{.*\} (\d+)$", metrics(data_port(task)), re.MULTILINE)}


def fused_counters(task):
    return {name: value for name, value in counters(task).items() if name.startswith("fused_")}


def star_calls(cluster):
    return sum(counters(task)["star_calls"] for (job, _), task in cluster.tasks.items() if job == "ps")
