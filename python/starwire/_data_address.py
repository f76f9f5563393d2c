"""Asks a server where its data port is, as its peers do."""

import urllib.parse

from starwire import _wire

_METHOD = "/tensorflow.WorkerService/GetStatus"
_OPEN, _CLOSE = "starwire{", "}"
_DEVICE_ATTRIBUTES = 1


def data_address(server, timeout=10.0):
    """Returns the data port of a server, ``host:port``, as its peers use it: for ``starctl``, Prometheus, firewalls.

    Args:
      server: a started ``tf.distribute.Server``, or the address of any task, ``host:port`` as in the ClusterSpec.
      timeout: seconds to wait for the answer.

    Raises:
      ValueError: the server's protocol is not one of starwire's.
      TimeoutError: no answer in time; the server has not been started, or is not there.
      ConnectionError: no such answer; the message has the reason.
    """
    from starwire_run import protocols

    if not isinstance(server, str):
        protocol = server.server_def.protocol
        if not protocols.is_ours(protocol):
            raise ValueError(f"starwire: a server with protocol {protocol!r} has no data port: it is not one of starwire's ({', '.join(protocols.OURS)})")
        server = server.target
    address = server.rpartition("://")[2]
    texts = [device.physical_device_desc for device in _devices(address, timeout)]
    said = [text.partition(_OPEN)[2].partition(_CLOSE)[0] for text in texts if _OPEN in text]
    if not said:
        raise ConnectionError(f"starwire: the server at {address} has no data port: it runs stock grpc, or is stopping")
    fields = dict(part.partition("=")[::2] for part in said[0].split(";")[1:])
    if not fields.get("data"):
        raise ConnectionError(f"starwire: the server at {address} advertises no data port: {said[0]!r}")
    return urllib.parse.unquote(fields["data"].split(",")[0])


def _devices(address, timeout):
    import grpc  # TensorFlow depends on it
    from tensorflow.core.framework import device_attributes_pb2

    # A proxy of the environment is not for the cluster's own addresses.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask = channel.unary_unary(_METHOD, request_serializer=lambda request: b"", response_deserializer=lambda data: data)
        try:
            data = ask(None, timeout=timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError(f"starwire: no answer from {address} within {timeout:g} s") from None
            raise ConnectionError(f"starwire: {address} does not answer as a TensorFlow server: {error.details()}") from None
    return [device_attributes_pb2.DeviceAttributes.FromString(one) for one in _wire.messages(data, _DEVICE_ATTRIBUTES)]
