"""Workers and parameter servers that own a device that is not a CPU: tensors are staged through the device's context in both directions.

Everything runs over stock gRPC with the same device as well, and must have the same outcome there, and that of the CPUs. The device is that of tests/device:
whoever takes its tensors for host memory ends the process. With a GPU, and a TensorFlow that uses it, all tests run on it too.

What TensorFlow itself cannot do with such a device, over gRPC either: receive lists in lists (test_lists); order a copy of a reference variable to another
device after an update of it (so graphs.CASES without variable_kinds); make an eager ZerosLike of int32, which ends the process without any server.
"""

import os
import signal

import pytest

from cluster import TaskDied, free_port
from counting import flush
from device import GPU_ENVIRONMENT, OURS, DeviceChiefs, Devices, await_held, count_gpus, counts, hold, read_memory
from device_programs import begin_training, close_queue, collect, continue_training, fail_in_mid_copy, freeze_case, lists, receive_too_much, relay, remote_functions, run_case, scheduled, train
from graphs import CASES
from metrics import fused_counters, star_calls
from tf2_job import chief_call

pytestmark = [pytest.mark.ours]
DTYPES = ("float32", "float64", "half", "bfloat16", "int64", "complex64", "bool", "uint8")
STAR = ("star_server", "star_server_lite")
GRAPHS = [name for name in CASES if name not in ("variable_kinds", "variants")]
ONE_WORKER = (("ps", 2), ("worker", 1))


@pytest.fixture(scope="module", params=["TESTDEV", *(["GPU"] if os.path.exists("/dev/nvidiactl") else [])])
def kind(request, runner):
    if request.param == "GPU":
        probe = runner.task("gpus", environment=GPU_ENVIRONMENT, spawn=True)
        try:
            if not probe.call(count_gpus):
                pytest.skip("this TensorFlow sees no GPU")
        finally:
            probe.kill()
    return request.param


@pytest.fixture(scope="module")
def devices(runner, kind):
    made = Devices(runner, kind)
    yield made
    made.close()


@pytest.fixture
def controlled(devices, kind):
    """The devices, if they are those of tests/device: only these count their copies, hold them, and have little memory."""
    if kind != "TESTDEV":
        pytest.skip("not the device of tests/device")
    return devices


@pytest.fixture(scope="module")
def device_chiefs(runner, kind):
    made = DeviceChiefs(runner, kind)
    yield made
    made.close()


def on_worker(cluster, program, *args):
    """What a program returns in worker 0, which is its session's master."""
    return cluster["worker", 0].call(program, cluster.target("worker", 0), *args, timeout=240)


def assert_close(kind, ours, cpu):
    """Equal up to the order of sums. Kernels of other hardware differ more."""
    import numpy as np

    tolerance = {"rtol": 1e-6, "atol": 1e-8} if kind == "TESTDEV" else {"rtol": 1e-3, "atol": 1e-5}
    assert len(ours) == len(cpu)
    for (dtype, shape, data), expected in zip(ours, cpu):
        if dtype.startswith("float"):
            assert (dtype, shape) == expected[:2]
            np.testing.assert_allclose(np.frombuffer(data, dtype), np.frombuffer(expected[2], dtype), **tolerance)
        else:
            assert (dtype, shape, data) == expected


def test_the_host_cannot_touch_the_memory(controlled):
    task = controlled.task("reader")
    task.expected_exit, task.allow_scary = -signal.SIGSEGV, ("Fatal Python error", "Segmentation fault")
    with pytest.raises(TaskDied):
        task.call(read_memory)


# The workers' devices alone: what is left of each kind of graph when the servers' nodes are fused or called. Many tensors cross the engine over grpc++ only.
QUICK = {("grpc++", "all"): GRAPHS, ("fused", "workers"): ("fetch_everywhere", "cond_small_v2", "dead_branches", "while_v2", "functions")}
QUICK["star_server", "workers"] = [name for name in GRAPHS if name != "many_small"]


@pytest.mark.quick(lambda of: of["name"] in QUICK.get((of["way"], of["owners"]), ()), reason="nodes of a device are left to send and receive")
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("owners", ["all", "workers"])
@pytest.mark.parametrize("way", OURS, scope="module")
def test_graphs(devices, kind, way, owners, name):
    """Branches and their dead tensors, loops, gradients, small tensors, strings, handles: with all nodes on the devices that have kernels there."""
    frozen = devices.stock(on_worker, freeze_case, name)
    ours = devices.check(way, on_worker, run_case, f"{kind}:0", owners, frozen)
    cpu = devices.stock(on_worker, run_case, "CPU:0", "all", frozen)
    for step, expected in zip(ours, cpu):
        assert_close(kind, step, expected)


@pytest.mark.quick(
    lambda of: of["dtype"] == "float32" or of["way"] == "grpc++" and of["dtype"] in ("bfloat16", "int64", "bool"),
    reason="tensors of devices cross by the same code in all ways, which knows of a type only the size of its elements",
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", OURS, scope="module")
def test_every_hop_brings_the_same_bits(devices, kind, way, dtype):
    fed, steps = devices.check(way, on_worker, relay, f"{kind}:0", dtype)
    for step in steps:
        assert step == fed


@pytest.mark.parametrize("way", OURS, scope="module")
def test_lists(devices, kind, way):
    device = f"{kind}:0"
    ours = devices.check(way, on_worker, lists, device, False)
    assert ours == devices.stock(on_worker, lists, "CPU:0", False)
    assert {how for how, _ in ours} == {"value"}
    assert {how for how, _ in devices.check(way, on_worker, lists, device, True)} == {"InternalError"}


@pytest.mark.parametrize("ps_device", ["CPU", "device"])
@pytest.mark.parametrize("way", OURS, scope="module")
def test_training(devices, kind, way, ps_device):
    """On a worker's device, with variables on the CPUs or the devices of the parameter servers."""
    place = "CPU:0" if ps_device == "CPU" else f"{kind}:0"
    calls = star_calls(devices.cluster(way)) if way in STAR else 0
    ours = devices.check(way, on_worker, train, f"{kind}:0", place)
    for values, expected in zip(ours, devices.stock(on_worker, train, "CPU:0", "CPU:0")):
        assert_close(kind, values, expected)
    if way in STAR:
        assert star_calls(devices.cluster(way)) > calls
    if way == "fused":
        assert sum(fused_counters(devices.cluster(way)["worker", 0]).values()) > 0


@pytest.mark.parametrize("way", ["grpc++", "star_server"])
def test_wire_dtype(devices, kind, way):
    """Parameters and gradients of a device cross as bfloat16 like those of a CPU."""
    ours, cpu = (devices.run(way, on_worker, train, device, "CPU:0", "bfloat16") for device in (f"{kind}:0", "CPU:0"))
    for values, expected in zip(ours, cpu):
        assert_close(kind, values, expected)
    assert ours != devices.stock(on_worker, train, f"{kind}:0", "CPU:0")


@pytest.mark.parametrize("way", ["grpc++", "fused", "star_server"])
def test_parameter_servers_without_the_device(devices, kind, way):
    programs = (train, f"{kind}:0", "CPU:0"), (relay, f"{kind}:0", "float32")
    expected = [devices.stock(on_worker, *program) for program in programs]
    with devices.fresh(way, (("ps", 2), ("worker", 2)), owners=["worker"]) as cluster:
        assert [on_worker(cluster, *program) for program in programs] == expected


def copies(cluster, function, *args):
    """By task: copies and bytes to the device, copies and bytes to the host, while worker 0 runs a function."""
    before = {task: cluster[task].call(counts) for task in cluster.tasks}
    cluster["worker", 0].call(function, *args, timeout=240)
    after = {task: cluster[task].call(counts) for task in cluster.tasks}
    return {task: [b - a for a, b in zip(before[task], after[task])] for task in cluster.tasks}


def copies_of_training(cluster, device, ps_device):
    on_worker(cluster, begin_training, device, ps_device)
    return copies(cluster, continue_training, 5)


def copies_of_relay(cluster, device, dtype):
    return copies(cluster, relay, cluster.target("worker", 0), device, dtype)


@pytest.mark.parametrize(
    "program, argument", [(copies_of_training, "CPU:0"), (copies_of_training, "TESTDEV:0"), (copies_of_relay, "float32")], ids=["training-CPU", "training-device", "relay"]
)
@pytest.mark.parametrize("way", OURS, scope="module")
def test_no_more_copies_than_stock(controlled, way, program, argument):
    stock, ours = controlled.stock(program, "TESTDEV:0", argument), controlled.run(way, program, "TESTDEV:0", argument)
    assert all(number > 0 for number in stock["worker", 0])
    for task, numbers in ours.items():
        assert all(mine <= theirs for mine, theirs in zip(numbers, stock[task])), (task, numbers, stock[task])


def mid_copy_failure(cluster, direction, holder):
    worker, keeper = cluster["worker", 0], cluster[holder]
    keeper.call(hold, direction, True)
    worker.begin(fail_in_mid_copy, cluster.target("worker", 0), "TESTDEV:0", f"held-{direction}")
    keeper.call(await_held, direction)
    cluster["worker", 1].call(close_queue, cluster.target("worker", 1), f"held-{direction}")
    keeper.call(hold, direction, False)
    return worker.result(60)


@pytest.mark.parametrize("direction, holder", [(1, ("ps", 0)), (0, ("ps", 1))], ids=["sender", "receiver"])
@pytest.mark.parametrize("way", OURS, scope="module")
def test_a_step_fails_in_mid_copy(controlled, way, direction, holder):
    """The step ends with the error that made it fail, and the next step works."""
    failed, fine = controlled.check(way, mid_copy_failure, direction, holder)
    assert failed[0] == "OutOfRangeError", failed
    assert fine[0] == "value", fine


@pytest.mark.parametrize("way", ["grpc++", "star_server"])
def test_a_peer_is_killed_in_mid_copy(controlled, way):
    """The server copies to the host what a worker asked for that is killed. The server goes on, for another worker and for the one that returns."""
    expected = controlled.stock(on_worker, relay, "TESTDEV:0", "float32")
    with controlled.fresh(way, (("ps", 2), ("worker", 2))) as cluster:
        ps = cluster["ps", 0]
        ps.call(hold, 1, True)
        cluster["worker", 0].begin(fail_in_mid_copy, cluster.target("worker", 0), "TESTDEV:0", "killed")
        ps.call(await_held, 1)
        cluster["worker", 0].kill()
        ps.call(hold, 1, False)
        cluster.start("worker", 0)
        assert on_worker(cluster, relay, "TESTDEV:0", "float32") == expected


@pytest.mark.parametrize("way", ["grpc++", "star_server"])
def test_a_server_ends_in_mid_copy(controlled, way):
    """Its process ends as without a copy, and the step fails."""
    with controlled.fresh(way, (("ps", 2), ("worker", 2))) as cluster:
        worker, ps = cluster["worker", 0], cluster["ps", 0]
        ps.call(hold, 1, True)
        worker.begin(fail_in_mid_copy, cluster.target("worker", 0), "TESTDEV:0", "ended")
        ps.call(await_held, 1)
        assert ps.exit() == 0
        failed, _ = worker.result(60)
        assert failed[0] in ("UnavailableError", "AbortedError"), failed


def test_a_state_leaves_out_variables_on_a_device(devices, kind, tmp_path):
    """The host cannot read their memory: a server that did would end."""
    with devices.fresh("star_server", ONE_WORKER, start=False) as cluster:
        for server in (0, 1):
            cluster.start("ps", server, STARWIRE_STATE=str(tmp_path))
        cluster.start("worker", 0)
        on_worker(cluster, train, f"{kind}:0", f"{kind}:0")
        flush(cluster["ps", 0], cluster["ps", 1])


@pytest.mark.deep(reason="takes ten seconds, for which TensorFlow's allocator hopes that memory is freed")
@pytest.mark.parametrize("way, error", [("grpc++", "ResourceExhaustedError"), ("star_server", "InternalError")])
def test_out_of_memory(controlled, way, error):
    """The value of a call is in the worker's memory, from where TensorFlow copies it."""
    failed, fine = controlled.run(way, on_worker, receive_too_much, "TESTDEV:0")
    assert failed[0] == error
    assert fine == ("value", 1000.0)


@pytest.mark.quick(
    lambda of: of["way"] in ("grpc++", "star_server"),
    reason="test_scheduled_functions runs functions over each way, and what is left to send and receive crosses by the same code in all",
)
@pytest.mark.parametrize("way", OURS, scope="module")
def test_functions(device_chiefs, kind, way):
    ours = device_chiefs.check(way, chief_call, remote_functions, f"{kind}:0", shape=ONE_WORKER)
    if kind == "TESTDEV":
        assert ours == device_chiefs.stock(chief_call, remote_functions, "CPU:0", shape=ONE_WORKER)


@pytest.mark.parametrize("way", OURS, scope="module")
def test_scheduled_functions(device_chiefs, kind, way):
    calls = star_calls(device_chiefs.cluster(way, ONE_WORKER)) if way in STAR else 0
    ours = device_chiefs.check(way, chief_call, scheduled, f"{kind}:0", shape=ONE_WORKER)
    if way in STAR:
        assert star_calls(device_chiefs.cluster(way, ONE_WORKER)) > calls
    assert_close(kind, ours, device_chiefs.stock(chief_call, scheduled, "CPU:0", shape=ONE_WORKER))


@pytest.fixture(scope="module")
def collected(runner, devices, kind):
    """Returns a function of protocol and device: what each of two workers gets."""
    made = {}

    def of(protocol, device):
        if (protocol, device) not in made:
            spec = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(2)]}
            tasks = [devices.task(f"collect{i}") for i in range(2)]
            for i, task in enumerate(tasks):
                task.begin(collect, protocol, spec, i, device)
            made[protocol, device] = [task.result(120) for task in tasks]
            for task in tasks:
                task.kill()
        return made[protocol, device]

    return of


@pytest.mark.parametrize("protocol", ["grpc++", "star_server"])
def test_collectives(collected, kind, protocol):
    ours = collected(protocol, f"{kind}:0")
    assert ours[0] == ours[1]
    assert ours == collected("grpc", f"{kind}:0")
    assert ours == collected("grpc", "CPU:0")
