"""The names of protocols, and the one that the environment asks for."""

import os

# What starwire adds to TensorFlow.
OURS = ("grpc++", "star_server", "star_server_lite", "grpc+verbs")
# In front of one of these, it means the same, also where TensorFlow was built with a protocol of the plain name, as DeepRec may be.
PREFIX = "starwire+"
STOCK = "grpc"
# In jobs that were written for DeepRec; they mean the same as one of ours. And protocols of DeepRec and TensorFlow 1 that neither has.
OTHERS = ("grpc+seastar", "star_server_v2")
MISSING = {"grpc+gdr": "grpc+verbs", "grpc+mpi": "grpc++ or grpc+verbs", "grpc+ucx": "grpc+verbs", "elastic-grpc": "star_server"}
VARIABLE = "STARWIRE_PROTOCOL"
# Used by `starwire run` if neither its option nor the variable is given.
DEFAULT = "grpc++"


def is_ours(protocol):
    """Whether this is one of starwire's protocols, with or without the prefix."""
    return protocol in OTHERS or (protocol[len(PREFIX) :] if protocol.startswith(PREFIX) else protocol) in OURS


def check(protocol, source):
    """Returns the protocol. Raises ValueError, which names its source, if there is no such protocol."""
    if protocol in MISSING:
        raise ValueError(f"starwire: {source} is {protocol!r}, which starwire does not have: use {MISSING[protocol]}")
    if protocol != STOCK and not is_ours(protocol):
        raise ValueError(f"starwire: {source} is {protocol!r}, which is not a protocol: use {', '.join(OURS)}, or {STOCK} for TensorFlow's own")
    return protocol


def wanted():
    """Returns the protocol that STARWIRE_PROTOCOL asks for, or None. Raises ValueError if there is no such protocol."""
    value = os.environ.get(VARIABLE, "").strip()
    return check(value, VARIABLE) if value else None
