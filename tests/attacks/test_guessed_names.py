"""The names of unix sockets beside a task's port can be guessed: processes of another user take them before the task starts."""

import os
import subprocess
import sys

import cluster as harness
import metrics
import pytest
import steps

# Takes every name that may be beside the ports. What connects is accepted and never answered, or waits in a queue that is full from the start.
SQUATTER = """
import os, select, socket, sys
os.setgid(65534)
os.setuid(65534)
answers, ports = sys.argv[1] == "accepts", sys.argv[2:]
held, fillers = [], []
for port in ports:
    for name in (f"starwire-*:{port}", f"starwire-127.0.0.1:{port}"):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\\0" + name)
        listener.listen(64 if answers else 0)
        while not answers:
            filler = socket.socket(socket.AF_UNIX)
            filler.setblocking(False)
            try:
                filler.connect("\\0" + name)
            except BlockingIOError:
                break
            fillers.append(filler)
        held.append(listener)
print("up", flush=True)
came, read = [], 0
while True:
    ready, _, _ = select.select([sys.stdin, *(held if answers else []), *came], [], [])
    if sys.stdin in ready:
        break
    for one in ready:
        if one in held:
            came.append(one.accept()[0])
        else:
            data = one.recv(65536)
            read += len(data)
            if not data:
                came.remove(one)
print(len(came), read)
"""


def squat(how, addresses):
    ports = [address.rsplit(":", 1)[1] for address in addresses]
    process = subprocess.Popen([sys.executable, "-c", SQUATTER, how, *ports], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("how", ["accepts", "is full"])
def test_names_that_another_user_took(runner, how):
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    cluster = harness.Cluster(runner, "star_server", {"ps": 1, "worker": 1}, environment={"STARWIRE_PORTS": "one"}, start=False)
    squatter = squat(how, cluster.spec["ps"] + cluster.spec["worker"])
    try:
        ps, worker = cluster.start("ps", 0), cluster.start("worker", 0)
        assert worker.call(steps.run_steps, cluster.target("worker", 0), 5) == 5
        # The socket that cannot be had is done without, and nothing is said to who holds its name.
        _, read = map(int, squatter.communicate("\n", timeout=10)[0].split())
        assert read == 0, "the squatter was spoken to"
        for task in (ps, worker):
            # Nor waited for: no attempt to connect failed.
            assert metrics.metric(metrics.data_port(task), "starwire_connect_failures_total") == 0
            warnings = [line for line in task.full_log().splitlines() if "starwire: " in line and line[0] in "WE"]
            assert len(warnings) == 1 and "tasks on this host will connect over TCP" in warnings[0], warnings
    finally:
        squatter.kill()
        squatter.wait()
        cluster.close()
