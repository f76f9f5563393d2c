"""Connections that stop in the middle of a handshake, and a worker that starts meanwhile."""

import client
import steps
import wire

MOST = 5000


def ask(target):
    """Begins the exchange of challenges."""
    connection = client.RawConnection(target, timeout=2)
    connection.send(wire.block(wire.frame(wire.CHALLENGE, meta=bytes(32))))
    return connection


def half_open(hosts, begin=ask):
    """`hosts`: number of addresses that the connections come from; `begin(target)`: connects one of them, which then falls silent."""

    def attack(target, pace):
        connections, refused = [], 0
        prefix = target.source.rsplit(".", 1)[0]
        for round_ in pace(4000, least=MOST):
            if len(connections) + refused >= MOST:
                pace.sleep(0.1)
                continue
            try:
                connections.append(begin(target._replace(source=f"{prefix}.{1 + round_ % hosts}")))
            except OSError:
                refused += 1
        return len(connections) + refused

    return attack


def newcomer(trainer, number):
    """Starts a worker that connects and runs steps."""
    task = trainer.cluster.start("worker", number)
    try:
        assert task.call(steps.run_steps, trainer.cluster.target("worker", number), 3, task=number, name=f"newcomer{number}", filters=True, timeout=60) == 3
    finally:
        task.kill()
    trainer.cluster.tasks.pop(("worker", number))
