"""Abusive HTTP on the data port must not disturb the cluster manager's probes."""

import contextlib

import arena as arenas
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
    """Fills the service and keeps sending requests. Every other names a host that this is not: refusals must not log a line each."""
    held, served, refused = [], 0, 0
    for round_ in pace(300, least=220):
        if len(held) < 70:
            held.append(client.Http2(target))
            continue
        with contextlib.suppress(OSError), target.connect(2) as one:
            one.settimeout(1)
            one.sendall(b"GET /metrics HTTP/1.1\r\nhost: %s\r\n\r\n" % [b"localhost", b"elsewhere.example"][round_ % 2])
            answer = one.recv(64)
            served += answer.startswith(b"HTTP/1.1 200")
            refused += answer.startswith(b"HTTP/1.1 421")
    return served, refused


def test_refused_requests(trainer):
    outcome = trainer.under(refused_requests)
    assert min(outcome.result) > arenas.MOST_LOG_LINES, outcome.result
