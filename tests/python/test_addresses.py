"""Where data ports are: .endpoint_map in its three places, the rule without a file, IPv6, host names, binding, and incompatible peers."""

import contextlib
import os
import re
import socket

import pytest

import steps
import wire
from cluster import RemoteError, free_port, is_tensorflow_1, load, start_server, state, tf, worker_call, write_map
from metrics import data_port, metric
from settings import SECRET

pytestmark = pytest.mark.ours


def lines_for(spec, host="127.0.0.1"):
    return [f"{address}={host}:{free_port()}" for addresses in spec.values() for address in addresses]


def run(cluster, count=5, **options):
    return worker_call(cluster, steps.run_steps, count, **options)


def used_the_data_port(cluster):
    """True if tensors travelled over starwire, not over another working path."""
    return metric(data_port(cluster["ps", 0]), "starwire_tensor_requests_received_total") > 0


# With an .endpoint_map. -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["TF_SEASTAR_ENDPOINT_MAP_PATH", "STARWIRE_ENDPOINT_MAP", "working directory"])
def test_endpoint_map_places(fresh_cluster, tmp_path, place):
    cluster = fresh_cluster(start=False)
    lines = ["# data addresses", "", *lines_for(cluster.spec), "   "]
    if place == "STARWIRE_ENDPOINT_MAP":
        cluster.environment[place] = write_map(tmp_path, lines, "addresses.txt")
    else:
        write_map(tmp_path, lines)
        if place == "TF_SEASTAR_ENDPOINT_MAP_PATH":
            cluster.environment[place] = tmp_path
    for job in ("ps", "worker"):
        task = cluster.runner.task(f"mapped-{job}", cluster.environment, directory=tmp_path if place == "working directory" else None)
        cluster.tasks[job, 0] = task
        task.call(start_server, cluster.spec, job, 0, cluster.protocol)
        expected = next(line for line in lines if line.startswith(cluster.spec[job][0])).split("=")[1]
        assert data_port(task).rsplit(":", 1)[1] == expected.rsplit(":", 1)[1]
    assert run(cluster) == 5
    assert used_the_data_port(cluster)


def test_first_place_wins(fresh_cluster, tmp_path):
    """If the environment names a file, the one in the working directory is not even read."""
    cluster = fresh_cluster(start=False)
    (tmp_path / "here").mkdir()
    write_map(tmp_path / "here", ["this is garbage"])
    write_map(tmp_path / "named", lines_for(cluster.spec))
    cluster.environment["TF_SEASTAR_ENDPOINT_MAP_PATH"] = tmp_path / "named"
    for job in ("ps", "worker"):
        cluster.tasks[job, 0] = task = cluster.runner.task(f"mapped-{job}", cluster.environment, directory=tmp_path / "here")
        task.call(start_server, cluster.spec, job, 0, cluster.protocol)
    assert run(cluster) == 5


BAD_MAPS = {  # lines ({ps} and {worker}: addresses of the ClusterSpec), number of the faulty line, text of the message
    "no equals sign": (["{ps}=127.0.0.1:7001", "{worker} 127.0.0.1:7002"], 2, "="),
    "two equals signs": (["{ps}=127.0.0.1:7001", "", "{worker}=127.0.0.1:7002=x"], 3, "more than one"),
    "no port": (["# a comment", "{ps}=127.0.0.1", "{worker}=127.0.0.1:7002"], 2, "port"),
    "port too large": (["{ps}=127.0.0.1:70000", "{worker}=127.0.0.1:7002"], 1, "70000"),
    "port zero": (["{ps}=127.0.0.1:0", "{worker}=127.0.0.1:7002"], 1, "port"),
    "no host": (["{ps}=:7001", "{worker}=127.0.0.1:7002"], 1, "host"),
    "IPv6 without brackets": (["{ps}=::1:7001", "{worker}=127.0.0.1:7002"], 1, "bracket"),
    "the same task twice": (["{ps}=127.0.0.1:7001", "{worker}=127.0.0.1:7002", "{ps}=127.0.0.1:7003"], 3, "line 1"),
    "the same data address twice": (["{ps}=127.0.0.1:7001", "{worker}=127.0.0.1:7001"], 2, "line 1"),
    "not text": (["{ps}=127.0.0.1:7001", "\udcff\udcfe"], 2, "UTF-8"),
    "an address of every machine": (["{ps}=0.0.0.0:7001", "{worker}=127.0.0.1:7002"], 1, "0.0.0.0"),
}


@pytest.mark.parametrize("kind", BAD_MAPS)
def test_bad_endpoint_map(fresh_cluster, tmp_path, kind):
    cluster = fresh_cluster(start=False)
    lines, number, words = BAD_MAPS[kind]
    path = tmp_path / ".endpoint_map"
    text = "\n".join(lines).replace("{ps}", cluster.spec["ps"][0]).replace("{worker}", cluster.spec["worker"][0])
    path.write_bytes(text.encode(errors="surrogateescape") + b"\n")
    error = cluster.start_error(TF_SEASTAR_ENDPOINT_MAP_PATH=tmp_path)
    assert error.type == "InvalidArgumentError", error
    assert f"{path}:{number}:" in error.message, error.message
    assert words in error.message, error.message


def test_endpoint_map_without_a_task(fresh_cluster, tmp_path):
    cluster = fresh_cluster(start=False)
    path = write_map(tmp_path, [f"{cluster.spec['worker'][0]}=127.0.0.1:{free_port()}"])
    error = cluster.start_error(TF_SEASTAR_ENDPOINT_MAP_PATH=tmp_path)
    assert str(path) in error.message and "/job:ps/replica:0/task:0" in error.message and cluster.spec["ps"][0] in error.message, error.message


def test_missing_endpoint_map(fresh_cluster, tmp_path):
    cluster = fresh_cluster(start=False)
    error = cluster.start_error(TF_SEASTAR_ENDPOINT_MAP_PATH=tmp_path / "nowhere")
    assert "TF_SEASTAR_ENDPOINT_MAP_PATH" in error.message and str(tmp_path / "nowhere") in error.message, error.message


def test_occupied_data_port(fresh_cluster, tmp_path):
    cluster = fresh_cluster(start=False)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        write_map(tmp_path, [f"{cluster.spec['worker'][0]}=127.0.0.1:{port}", f"{cluster.spec['ps'][0]}=127.0.0.1:{free_port()}"])
        error = cluster.start_error(TF_SEASTAR_ENDPOINT_MAP_PATH=tmp_path)
    assert str(port) in error.message, error.message


@pytest.mark.parametrize("secret", [True, False], ids=["secret", "no secret"])
def test_swapped_entries(fresh_cluster, tmp_path, secret):
    """If the map swaps two tasks, the caller logs it; with a secret, which proves names, it refuses them."""
    environment = {"STARWIRE_SECRET": SECRET} if secret else {}
    cluster = fresh_cluster(shape=(("ps", 2), ("worker", 1)), start=False, environment=environment)
    good = lines_for(cluster.spec)
    write_map(tmp_path / "good", good)
    # In the worker's map, ps 0 and ps 1 are swapped.
    zero, one = (line.split("=") for line in good[:2])
    write_map(tmp_path / "bad", [f"{zero[0]}={one[1]}", f"{one[0]}={zero[1]}", *good[2:]])
    for index in range(2):
        cluster.start("ps", index, TF_SEASTAR_ENDPOINT_MAP_PATH=tmp_path / "good")
    worker = cluster.start("worker", 0, TF_SEASTAR_ENDPOINT_MAP_PATH=tmp_path / "bad")
    if not secret and not os.environ.get("STARWIRE_TEST_PROOF"):
        # TensorFlow may notice that the devices have other names.
        with contextlib.suppress(RemoteError):
            run(cluster)
        log = worker.wait_for_log("check job_name and task_index of both tasks")
        line = next(line for line in log.splitlines() if "check job_name" in line)
        assert "reports its name as /job:ps/replica:0/task:" in line and f"{tmp_path / 'bad'}/.endpoint_map:" in line, line
        return
    with pytest.raises(RemoteError) as caught:
        run(cluster)
    assert caught.value.type == "FailedPreconditionError", caught.value
    for words in ("/job:ps/replica:0/task:0", "/job:ps/replica:0/task:1", "endpoint_map"):
        assert words in caught.value.message, caught.value.message


def lead_astray(cluster, tmp_path, address):
    """Gives the worker a map with a wrong data address for the ps. Returns the faulty place as file:line."""
    good = lines_for(cluster.spec)
    write_map(tmp_path / "good", good)
    path = write_map(tmp_path / "bad", ["# data ports", f"{cluster.spec['ps'][0]}={address}", *good[1:]])
    cluster.per_task = {("ps", 0): {"TF_SEASTAR_ENDPOINT_MAP_PATH": tmp_path / "good"}, ("worker", 0): {"TF_SEASTAR_ENDPOINT_MAP_PATH": tmp_path / "bad"}}
    return f"{path}:2"


def waits_for_the_ps(cluster, *words):
    """Starts a session, which waits; the log soon names the ps, its address and the reason."""
    cluster["worker", 0].begin(steps.run_steps, cluster.target("worker", 0), 5)
    log = cluster["worker", 0].wait_for_log("cannot reach", 60)
    line = next(line for line in log.splitlines() if "cannot reach" in line)
    for word in ("/job:ps/replica:0/task:0", cluster.spec["ps"][0], *words):
        assert word in line, line
    assert not cluster["worker", 0].ready()


@pytest.mark.parametrize("wrong", ["port", "name"])
def test_line_that_leads_nowhere(fresh_cluster, tmp_path, wrong):
    """A session waits as for any task that is down; the log has file and line."""
    cluster = fresh_cluster(start=False)
    address = {"port": f"127.0.0.1:{free_port()}", "name": "no-such-host.invalid:3333"}[wrong]
    place = lead_astray(cluster, tmp_path, address)
    cluster.start("ps", 0)
    cluster.start("worker", 0)
    waits_for_the_ps(cluster, place, address)


@pytest.mark.parametrize("kind", ["gRPC port", "star_server"])
def test_line_for_a_server_of_another_kind(fresh_cluster, protocol, tmp_path, kind):
    """FailedPrecondition with file and line."""
    cluster = fresh_cluster(start=False, endpoint_map=kind == "star_server")
    if kind == "star_server":
        cluster.start("ps", 0, protocol=kind)
        place = str(cluster.endpoint_map)
    else:
        place = lead_astray(cluster, tmp_path, cluster.spec["ps"][0])
        cluster.start("ps", 0)
    cluster.start("worker", 0)
    with pytest.raises(RemoteError) as caught:
        run(cluster)
    assert caught.value.type == "FailedPreconditionError", caught.value
    for words in (place, "/job:ps/replica:0/task:0", protocol):
        assert words in caught.value.message, caught.value.message


def test_mapped_task_that_starts_late(fresh_cluster):
    cluster = fresh_cluster(start=False, endpoint_map=True)
    cluster.start("worker", 0)
    waits_for_the_ps(cluster, "refused", str(cluster.endpoint_map))
    cluster.start("ps", 0)
    assert cluster["worker", 0].result(60) == 5


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("STARWIRE_BIND", "nonsense", "nonsense"),
        ("STARWIRE_BIND", "192.0.2.77", "192.0.2.77"),
        ("STARWIRE_DRIVER", "kqueue", "epoll"),
        ("STARWIRE_REACTORS", "0", "STARWIRE_REACTORS"),
        ("STARWIRE_SECRET", "short", "16"),
        ("STARWIRE_SECRET_FILE", "/nonexistent/secret", "/nonexistent/secret"),
        ("NETWORK_WORKER_CORE_NUMBER", "many", "many"),
        ("WORKER_ENABLE_POLLING", "perhaps", "perhaps"),
        ("NETWORK_MAX_CONNECTION_TIMEOUT", "-1", "-1"),
        ("STARWIRE_BIND", "127.0.0.1:7", "port 7 was chosen"),
        ("STARWIRE_PORT_OFFSET", "0", "1 to 65534"),
    ],
)
def test_bad_variable(fresh_cluster, name, value, words):
    error = fresh_cluster(start=False).start_error(**{name: value})
    assert error.type in ("InvalidArgumentError", "FailedPreconditionError", "UnavailableError"), error
    assert name in error.message and words in error.message, error.message


def test_invalid_cluster_address(fresh_cluster):
    """TensorFlow notices only after opening its port."""
    cluster = fresh_cluster(start=False)
    cluster.spec["ps"] = ["nowhere"]
    error = cluster.start_error()
    assert error.type == "InvalidArgumentError" and "nowhere" in error.message, error


def test_misspelt_variable_is_a_warning(fresh_cluster):
    cluster = fresh_cluster(environment={"STARWIRE_DRIVRE": "epoll"})
    assert "STARWIRE_DRIVER" in cluster["ps", 0].wait_for_log("STARWIRE_DRIVRE")
    assert run(cluster) == 5


# Without a file. ------------------------------------------------------------------------------------------------------


def test_several_tasks_on_one_host(fresh_cluster):
    """Six tasks without a file: each has its own data port, and all work together."""
    cluster = fresh_cluster(shape=(("ps", 3), ("worker", 3)))
    assert len({data_port(task) for task in cluster.tasks.values()}) == 6
    for index in range(3):
        cluster["worker", index].begin(steps.run_steps, cluster.target("worker", index), 10, index, f"model{index}")
    assert [cluster["worker", index].result() for index in range(3)] == [10] * 3


def start_line(cluster, job="ps"):
    return next(line for line in cluster[job, 0].full_log().splitlines() if re.search(r"starwire: .* on \d+ reactor", line))


def test_start_up_line(fresh_cluster):
    """One log line shows the effective configuration."""
    cluster = fresh_cluster(environment={"STARWIRE_REACTORS": 2, "STARWIRE_DRIVER": "epoll"})
    line = start_line(cluster)
    assert re.search(r"starwire: grpc\+\+ on 2 reactors \(epoll, poll=off, pin=off\), data port ", line), line
    assert sum("reactors (" in one for one in cluster["ps", 0].full_log().splitlines()) == 1


@pytest.mark.parametrize("driver", ["epoll", "io_uring"])
@pytest.mark.parametrize("unix", ["auto", "off"])
def test_drivers_and_ways(fresh_cluster, driver, unix):
    cluster = fresh_cluster(environment={"STARWIRE_DRIVER": driver, "STARWIRE_UNIX": unix, "STARWIRE_REACTORS": 2})
    assert f"({driver}," in start_line(cluster)
    assert run(cluster, 20) == 20
    assert used_the_data_port(cluster)


@pytest.mark.parametrize("settings", [{"WORKER_ENABLE_POLLING": "true", "PS_ENABLE_POLLING": "1"}, {"WORKER_DISABLE_PIN_CORES": "false", "PS_DISABLE_PIN_CORES": "0"}], ids=["polling", "pinning"])
def test_polling_and_pinning(fresh_cluster, settings):
    cluster = fresh_cluster(environment=settings)
    line = start_line(cluster)
    assert ("poll=on" in line) == ("PS_ENABLE_POLLING" in settings), line
    assert ("pin=on" in line or "pin=off" not in line) == ("PS_DISABLE_PIN_CORES" in settings), line
    assert run(cluster, 20) == 20


@pytest.mark.parametrize("host", ["[::1]", "localhost", socket.gethostname()], ids=["IPv6", "localhost", "host name"])
def test_hosts(fresh_cluster, host):
    """ClusterSpecs with an IPv6 address, the loopback's name and the machine's host name."""
    if host == "[::1]":
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 on this machine's loopback")
    elif host != "localhost":
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            pytest.skip(f"{host} does not resolve")
    cluster = fresh_cluster(host=host)
    assert run(cluster) == 5
    if host == "[::1]":
        assert "[::1]:" in start_line(cluster) or "[::]:" in start_line(cluster)


def test_bind_behind_a_map(fresh_cluster, tmp_path):
    """The ps listens on one address and port; the map leads there."""
    port = free_port()
    cluster = fresh_cluster(start=False, environment={"TF_SEASTAR_ENDPOINT_MAP_PATH": tmp_path})
    write_map(tmp_path, [f"{cluster.spec['ps'][0]}=127.0.0.2:{port}", *lines_for({"worker": cluster.spec["worker"]})])
    cluster.start("ps", 0, STARWIRE_BIND=f"127.0.0.2:{port}")
    cluster.start("worker", 0, STARWIRE_UNIX="off")
    assert f"127.0.0.2:{port}" in start_line(cluster)
    assert run(cluster) == 5
    assert wire.http_get(f"127.0.0.2:{port}", "/healthz")[0] == 200
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 2)


TWO = {"STARWIRE_PORTS": "two"}


@pytest.mark.parametrize("unix", ["auto", "off"])
def test_two_ports(fresh_cluster, unix):
    cluster = fresh_cluster(environment={**TWO, "STARWIRE_UNIX": unix})
    for (job, index), task in cluster.tasks.items():
        host, port = cluster.spec[job][index].rsplit(":", 1)
        assert data_port(task) == f"{host}:{int(port) + 1000}"
    assert run(cluster) == 5
    assert used_the_data_port(cluster)


def test_another_offset(fresh_cluster):
    """A session waits for a task with another offset as for one that is down."""
    cluster = fresh_cluster(start=False, environment=TWO)
    port, elsewhere = sorted([free_port(), free_port()])
    cluster.spec["ps"] = [f"127.0.0.1:{port}"]
    cluster.start("ps", 0, STARWIRE_PORT_OFFSET=elsewhere - port)
    cluster.start("worker", 0)
    waits_for_the_ps(cluster, f"(data port 127.0.0.1:{port + 1000})", "refused")
    cluster["ps", 0].kill()
    cluster.start("ps", 0)
    assert cluster["worker", 0].result(60) == 5


def test_port_without_a_data_port(fresh_cluster):
    cluster = fresh_cluster(start=False, environment=TWO)
    cluster.spec["ps"] = ["127.0.0.1:65000"]
    error = cluster.start_error()
    assert error.type == "InvalidArgumentError" and "127.0.0.1:65000" in error.message and "STARWIRE_PORT_OFFSET" in error.message, error


# Incompatible peers. --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ports", ["one", "two"])
def test_peer_that_runs_stock_grpc(fresh_cluster, protocol, ports):
    """
    ps on stock gRPC, worker on ours: FailedPrecondition, naming the task and the protocol it must be started with. With two ports, it is as a task that is down.
    """
    if ports == "one" and is_tensorflow_1():
        pytest.skip("1.15 has two ports")
    cluster = fresh_cluster(start=False, environment={"STARWIRE_PORTS": ports})
    cluster.start("ps", 0, protocol="grpc")
    cluster.start("worker", 0)
    if ports == "two":
        return waits_for_the_ps(cluster, "refused")
    with pytest.raises(RemoteError) as caught:
        run(cluster)
    assert caught.value.type == "FailedPreconditionError", caught.value
    assert "/job:ps/replica:0/task:0" in caught.value.message and protocol in caught.value.message, caught.value.message


def test_caller_that_runs_stock_grpc(fresh_cluster):
    """Worker on stock gRPC, ps on ours: works correctly over TensorFlow's own gRPC port, or is refused. It must not hang."""
    cluster = fresh_cluster(start=False)
    cluster.start("ps", 0)
    cluster.start("worker", 0, protocol="grpc")
    try:
        assert run(cluster) == 5
    except RemoteError as error:
        assert error.type == "FailedPreconditionError" and "/job:" in error.message, error


def test_three_servers_of_one_process(runner, protocol):
    """A whole cluster in one process."""
    task = runner.task("all-in-one")
    assert task.call(all_in_one, protocol, [free_port() for _ in range(3)]) == 5
    assert task.exit() == 0


def all_in_one(protocol, ports):
    load(protocol)
    spec = {"ps": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{port}" for port in ports[1:]]}
    state["servers"] = [tf.distribute.Server(spec, job_name=job, task_index=i, protocol=protocol) for job, tasks in spec.items() for i in range(len(tasks))]
    return steps.run_steps(state["servers"][1].target, 5)


def test_environment_is_that_of_each_process():
    """The suite's own environment sets none of the variables under test."""
    others = ("STARWIRE_TEST_", "STARWIRE_LIBRARY", "STARWIRE_TF_SOURCE")
    ours = [name for name in os.environ if name.startswith("STARWIRE_") and not name.startswith(others)]
    assert not ours, f"unset {ours} for this suite"


# Sessions that ask every task. ----------------------------------------------------------------------------------------


def run_with_filters(target, filters):
    with tf.Graph().as_default():
        value = tf.constant(1.0) + 1.0
        with tf.compat.v1.Session(target, config=tf.compat.v1.ConfigProto(device_filters=filters)) as sess:
            return float(sess.run(value))


def test_sessions_without_filters_are_advised(fresh_cluster):
    filters, began = ["/job:ps", "/job:worker/task:0"], []
    for others, advised in ((16, True), (15, False)):
        cluster = fresh_cluster(shape=(("ps", 1), ("worker", 1 + others)), start=False)
        cluster.start("ps", 0)
        worker = cluster.start("worker", 0)
        assert worker.call(run_with_filters, cluster.target("worker", 0), filters) == 2.0
        assert "device_filters" not in worker.full_log()
        worker.begin(run_with_filters, cluster.target("worker", 0), [])
        began.append((worker, advised))
    for worker, advised in began:
        # Without filters it waits for the tasks that do not run, and TensorFlow says so after ten seconds.
        log = worker.wait_for_log("Session still waiting", timeout=60)
        assert (f'ConfigProto(device_filters=["{filters[0]}", "{filters[1]}"])' in log) == advised, log
        worker.kill()
