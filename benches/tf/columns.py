"""The columns to compare: a column is a protocol with its switches."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Column:
    """One way to run every case. `name` is shown in tables."""

    name: str
    protocol: str
    # Environment of every process of the cluster.
    env: dict = dataclasses.field(default_factory=dict)
    # The library is loaded even if the protocol is stock (a graph pass works over any protocol).
    needs_library: bool = True
    # Arguments of starwire.config() for the steps that are measured; the first steps, which are compared, are made without.
    options: dict = dataclasses.field(default_factory=dict)
    # With TLS on every connection.
    tls: bool = False
    # Parameter servers keep their state in files.
    state: bool = False


# Names known to `--protocols`. Any other name is a protocol without switches.
KNOWN = {
    "grpc": Column("grpc", "grpc", needs_library=False),
    "grpc++": Column("grpc++", "grpc++"),
    "grpc++:epoll": Column("grpc++:epoll", "grpc++", {"STARWIRE_DRIVER": "epoll"}),
    "grpc++:io_uring": Column("grpc++:io_uring", "grpc++", {"STARWIRE_DRIVER": "io_uring"}),
    "grpc++:fuse": Column("grpc++:fuse", "grpc++", {"STARWIRE_TENSOR_FUSE": "1"}),
    "grpc++:tcp": Column("grpc++:tcp", "grpc++", {"STARWIRE_UNIX": "off"}),
    "grpc++:tls": Column("grpc++:tls", "grpc++", tls=True),
    "grpc:fuse": Column("grpc:fuse", "grpc", {"STARWIRE_TENSOR_FUSE": "1"}),
    "grpc:pipeline": Column("grpc:pipeline", "grpc", options={"pipeline": 1}),
    "grpc++:pipeline": Column("grpc++:pipeline", "grpc++", options={"pipeline": 1}),
    "grpc++:bfloat16": Column("grpc++:bfloat16", "grpc++", options={"wire_dtype": "bfloat16"}),
    "star_server:tcp": Column("star_server:tcp", "star_server", {"STARWIRE_UNIX": "off"}),
    "star_server:tls": Column("star_server:tls", "star_server", tls=True),
    "star_server:stock-updates": Column("star_server:stock-updates", "star_server", {"STARWIRE_ROW_UPDATES": "false"}),
    "star_server:state": Column("star_server:state", "star_server", state=True),
    "star_server:sync": Column("star_server:sync", "star_server", {"STARWIRE_STATE_MODE": "sync"}, state=True),
    "star_server:polling": Column("star_server:polling", "star_server", {"WORKER_ENABLE_POLLING": "true", "PS_ENABLE_POLLING": "true"}),
    "star_server:ps-polling": Column("star_server:ps-polling", "star_server", {"PS_ENABLE_POLLING": "true"}),
    "star_server:pipeline": Column("star_server:pipeline", "star_server", options={"pipeline": 1}),
    "star_server:pipeline0": Column("star_server:pipeline0", "star_server", options={"pipeline": 0}),
    "star_server:pipeline2": Column("star_server:pipeline2", "star_server", options={"pipeline": 2}),
    "star_server:ahead": Column("star_server:ahead", "star_server", options={"ahead": 1}),
    "star_server:ahead+pipeline": Column("star_server:ahead+pipeline", "star_server", options={"ahead": 1, "pipeline": 1}),
    "grpc++:ahead": Column("grpc++:ahead", "grpc++", options={"ahead": 1}),
    "star_server:bfloat16": Column("star_server:bfloat16", "star_server", options={"wire_dtype": "bfloat16"}),
    "star_server:both": Column("star_server:both", "star_server", options={"pipeline": 1, "wire_dtype": "bfloat16"}),
}


# No cluster: the same steps in one process. The upper bound for every transport.
LOCAL = Column("local", "", needs_library=False)


def parse(names):
    """`grpc,grpc++` → columns. A repeated name (to study noise) becomes `grpc` and `grpc#2`."""
    columns = []
    for name in [part.strip() for part in names.split(",") if part.strip()]:
        column = KNOWN.get(name) or Column(name, name)
        seen = sum(1 for other in columns if other.name.split("#")[0] == name)
        if seen:
            column = dataclasses.replace(column, name=f"{name}#{seen + 1}")
        columns.append(column)
    if not columns:
        raise ValueError("--protocols names no protocol")
    return columns
