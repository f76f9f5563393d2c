"""Abusive HTTP on the data port must not disturb the cluster manager's probes."""

import contextlib

import client


def idle(target, pace):
    """Connections that send no requests but answer pings, more than the service has room for."""
    connections, answered = [], 0
    for round_ in pace(100, least=200):
        if len(connections) < 80:
            with contextlib.suppress(OSError):
                connections.append(client.Http2(target))
        else:
            one = connections[round_ % len(connections)]
            try:
                answered += len(one.answer_pings())
            except OSError:
                one.close()
                connections.remove(one)
    return len(connections), answered


def test_idle_connections(trainer):
    outcome = trainer.under(idle, seconds=4.0)
    assert outcome.result[1] > 0, "the server sent nothing that was to be answered"


def refused_requests(target, pace):
    """Fills the service and keeps sending requests: refusals must not log a line each."""
    held, asked, refused = [], 0, 0
    for _ in pace(300, least=150):
        with contextlib.suppress(OSError):
            if len(held) < 70:
                held.append(client.Http2(target))
                continue
            with target.connect(2) as one:
                one.settimeout(1)
                one.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
                asked += 1
                refused += not one.recv(64).startswith(b"HTTP/1.1 200")
    return asked, refused


def test_refused_requests(trainer):
    outcome = trainer.under(refused_requests)
    assert outcome.result[0] > 50, outcome.result
