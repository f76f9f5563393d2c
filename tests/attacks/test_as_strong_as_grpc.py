"""The same attack on starwire's data port and on stock gRPC's port: starwire must hold up at least as well."""

import contextlib
import os

import arena
import client
import pytest


def garbage(target, pace):
    """Connections that begin with random bytes."""
    made = 0
    for _ in pace(300, least=150):
        with contextlib.suppress(OSError), target.connect() as one:
            one.sendall(os.urandom(64 + made % 4000))
            made += 1
    return made


def comes_and_goes(target, pace):
    """Connections that close, or are reset, at once."""
    made = 0
    for _ in pace(500, least=150):
        with contextlib.suppress(OSError), target.connect():
            made += 1
    return made


def idle(target, pace):
    """A thousand connections that send nothing."""
    held = []
    for _ in pace(1000, least=1000):
        if len(held) < 1000:
            with contextlib.suppress(OSError):
                held.append(target.connect())
    return len(held)


def rapid_reset(target, pace):
    """Streams that are reset as soon as they are opened."""
    streams, connections = 0, 0
    one = None
    for _ in pace(200, least=60):
        try:
            if one is None:
                one = client.Http2(target)
                connections += 1
            frames = b""
            for _ in range(20):
                stream, headers = one.request()
                frames += headers + one.reset(stream)
            one.socket.sendall(frames)
            streams += 20
            one.answer_pings()
        except OSError:
            one = None
    return streams, connections


@pytest.mark.parametrize("attack", [garbage, comes_and_goes, idle, rapid_reset], ids=lambda attack: attack.__name__)
def test_as_strong_as_grpc(trainer, stock, attack):
    ours = trainer.under(attack, seconds=1.5)
    theirs = stock.under(attack, seconds=1.5, judged=False)
    figures = f"starwire: {ours.line()}\ngrpc: {theirs.line()}"
    for outcome in (ours, theirs):
        made = outcome.result[0] if attack is rapid_reset else outcome.result
        assert made > 100, outcome.result
    assert ours.extra_memory <= theirs.extra_memory + (8 << 20), figures
    assert ours.peak_threads - ours.base_threads <= theirs.peak_threads - theirs.base_threads + 2, figures
    if arena.MEASURES:
        assert ours.visit <= theirs.visit + 0.5, figures
        assert ours.median_kept() >= min(0.9, theirs.median_kept() - 0.1), f"the training keeps less of its pace than over grpc:\n{figures}"
