"""Writes the file that tells each task the others' data ports."""

import os
import pathlib
import re

_ADDRESS = re.compile(r"^(?P<host>\[[0-9A-Fa-f:.%a-z]+\]|[^\s:=#\[\]]+):(?P<port>\d{1,5})\Z")


def endpoint_map(cluster, directory=".", offset=1000, data=None):
    """Writes ``.endpoint_map`` for a cluster and returns its path.

    The file is needed only for data ports that do not follow from the addresses of the cluster (``docs/ports.md``): peers behind address
    translation, another network, DeepRec's own plan of ports.

    Args:
      cluster: anything ``tf.train.ClusterSpec`` takes: ``{"ps": ["host:2222"], "worker": [...]}`` (lists, or dicts of task index to address).
      directory: the folder to write to; point the tasks to it with ``TF_SEASTAR_ENDPOINT_MAP_PATH``, or run them in it.
      offset: each data port is the task's port plus this offset. Ignored for the tasks in ``data``.
      data: data addresses of some or all tasks, in the same form as ``cluster``.
    """
    tasks = _tasks(cluster)
    chosen = _tasks(data or {})
    unknown = sorted(set(chosen) - set(tasks))
    if unknown:
        raise ValueError(f"starwire.endpoint_map: data has {_name(unknown[0])}, which is not in the cluster")
    lines, used = [], {}
    for task, address in sorted(tasks.items()):
        target = chosen.get(task) or _shifted(address, offset, task)
        for what, side in ((address, "address"), (target, "data address")):
            other = used.setdefault(what, (task, side))
            if other[0] != task:
                raise ValueError(f"starwire.endpoint_map: {what} is the {side} of {_name(task)} and the {other[1]} of {_name(other[0])}")
        lines.append(f"{address}={target}\n")
    path = pathlib.Path(directory) / ".endpoint_map"
    temporary = path.with_name(f".endpoint_map.{os.getpid()}")
    temporary.write_text("".join(lines), encoding="ascii")
    temporary.replace(path)
    return str(path)


def _tasks(cluster):
    """Returns {(job, index): address}."""
    if hasattr(cluster, "as_dict"):
        cluster = cluster.as_dict()
    tasks = {}
    for job, addresses in cluster.items():
        items = addresses.items() if isinstance(addresses, dict) else enumerate([addresses] if isinstance(addresses, str) else addresses)
        for index, address in items:
            match = _ADDRESS.match(address)
            if not match or not 0 < int(match["port"]) < 65536:
                raise ValueError(f"starwire.endpoint_map: {_name((job, index))}: {address!r} is not host:port (IPv6 in brackets)")
            tasks[job, int(index)] = address
    return tasks


def _shifted(address, offset, task):
    host, port = address.rsplit(":", 1)
    if not 0 < int(port) + offset < 65536:
        raise ValueError(f"starwire.endpoint_map: {_name(task)}: port {port} plus offset {offset} is not a port")
    return f"{host}:{int(port) + offset}"


def _name(task):
    return f"/job:{task[0]}/task:{task[1]}"
