"""STARWIRE_PROTOCOL and `starwire run` of one process: the hook, and the replacement of the protocol."""

import ast
import re
import shutil

import pytest

from launcher import ROOT, SITE, free_port, python, run, script


# The hook, with a package that only has TensorFlow's name. ------------------------------------------------------------


@pytest.fixture
def hooked(tmp_path):
    """Runs code under the hook, with another TensorFlow."""
    fake = tmp_path / "fake" / "tensorflow"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("print('executed', __spec__.loader.get_source('tensorflow') is not None)\n")

    def call(code, *more, **variables):
        return python("-c", code, paths=(*more, SITE, ROOT / "python", fake.parent), **variables)

    return call


def test_a_process_without_tensorflow_loads_next_to_nothing(hooked):
    code, out, err = hooked("import sys; print(sorted(m for m in sys.modules if 'starwire' in m or 'argparse' in m or 'tensorflow' in m))", STARWIRE_PROTOCOL="star_server")
    assert (code, err) == (0, "")
    assert ast.literal_eval(out) == ["starwire_run", "starwire_run.hook", "starwire_run.protocols"]


def test_without_the_variable_nothing_happens(hooked):
    code, out, err = hooked("import sys; print([m for m in sys.modules if 'starwire' in m]); import tensorflow")
    assert (code, out, err) == (0, "[]\nexecuted True\n", "")


def test_an_unknown_protocol_fails_the_import_before_it_starts_and_every_time(hooked):
    code, out, err = hooked(
        "for _ in range(2):\n    try:\n        import tensorflow\n    except ImportError as error:\n        print(error)",
        STARWIRE_PROTOCOL="star-server",
    )
    message = "starwire: STARWIRE_PROTOCOL is 'star-server', which is not a protocol: use grpc++, star_server, star_server_lite, grpc+verbs, or grpc for TensorFlow's own\n"
    assert (code, out, err) == (0, 2 * message, "")


def test_stock_grpc_changes_nothing(hooked):
    assert hooked("import tensorflow, sys; print('starwire' in sys.modules)", STARWIRE_PROTOCOL="grpc") == (0, "executed True\nFalse\n", "")


def test_a_tensorflow_that_starwire_does_not_know_is_an_error(hooked):
    code, _, err = hooked("import tensorflow", STARWIRE_PROTOCOL="grpc++")
    assert code == 1
    assert "ImportError" in err or "ModuleNotFoundError" in err


def test_a_folder_with_the_name_is_not_tensorflow(tmp_path):
    (tmp_path / "tensorflow").mkdir()
    code = "import sys; sys.path = [path for path in sys.path if 'site-packages' not in path]; import tensorflow; print(tensorflow.__file__)"
    assert python("-c", code, paths=(SITE, ROOT / "python", tmp_path), STARWIRE_PROTOCOL="grpc++") == (0, "None\n", "")


def test_the_hidden_sitecustomize_runs_too(hooked, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text("import sys; print('other', __file__, sys.modules['sitecustomize'].__file__)\n")
    code, out, err = python("-c", "import sitecustomize; print(sitecustomize.__file__)", paths=(SITE, tmp_path / "other"))
    other = str(tmp_path / "other" / "sitecustomize.py")
    assert (code, out, err) == (0, f"other {other} {other}\n{other}\n", "")


def test_sitecustomize_can_be_read_by_old_pythons():
    text = (SITE / "sitecustomize.py").read_text()
    ast.parse(text, feature_version=(3, 4))
    assert 'f"' not in text and "f'" not in text


def test_what_lies_beside_starwire_stays_out_of_other_pythons(tmp_path):
    """A Python that has starwire only through the launcher gets nothing else from there."""
    installed = tmp_path / "installed"
    shutil.copytree(ROOT / "python", installed, ignore=shutil.ignore_patterns("__pycache__"))
    script(installed, "", "onlythere.py")
    code = "import importlib.util as u; print([u.find_spec(name) is not None for name in ('starwire', 'starwire_run.command', 'onlythere')])"
    assert python("-c", code, paths=(installed / "starwire_run" / "site",), STARWIRE_PROTOCOL="grpc++") == (0, "[True, True, False]\n", "")


# The replacement, with TensorFlow. ------------------------------------------------------------------------------------

SERVERS = """
import subprocess, sys

if __name__ == "__main__":
    code = "import tensorflow.compat.v1 as tf; print('subprocess', tf.train.Server.create_local_server().server_def.protocol)"
    subprocess.run([sys.executable, "-c", code], check=True)

    import tensorflow as tf
    spec = tf.train.ClusterSpec({"ps": ["localhost:0"]})
    def protocol(*arguments, **named):
        server = tf.distribute.Server(*arguments, **named)
        assert server.target.startswith("grpc://"), server.target
        return server.server_def.protocol
    print("default", protocol(spec, "ps", 0))
    print("v1", tf.compat.v1.train.Server(spec, job_name="ps", task_index=0).server_def.protocol)
    made = tf.train.ServerDef(cluster=spec.as_cluster_def(), job_name="ps", task_index=0, protocol="grpc")
    print("ServerDef", protocol(made), made.protocol)
    print("named", protocol(spec, "ps", 0, protocol="star_server_lite"))
    import starwire
    server = tf.distribute.Server(spec, job_name="ps", task_index=0)
    print("stop", starwire.stop(server))
    print(sys.argv[1:])
"""
ANSWERS = """subprocess star_server
default star_server
v1 star_server
ServerDef star_server grpc
named star_server_lite
stop None
['--x', 'y']
"""


def test_servers_of_a_script(tmp_path):
    code, out, err = run("--protocol", "star_server", script(tmp_path, SERVERS), "--x", "y")
    assert (code, out) == (0, ANSWERS), err


def test_another_command_and_its_exit_status():
    code, out, err = run("sh", "-c", "echo $STARWIRE_PROTOCOL; exit 5")
    assert (code, out, err) == (5, "grpc++\n", "")
    assert run("sh", "-c", "echo $STARWIRE_PROTOCOL", STARWIRE_PROTOCOL="star_server") == (0, "star_server\n", "")


def test_eager_execution_and_collectives_of_a_module_use_it(tmp_path):
    """TensorFlow 2's ways to a server: connect_to_cluster, and a collective strategy. Also those of a process that multiprocessing starts."""
    text = """
import multiprocessing, os, sys

def spawn(pipe):
    import tensorflow as tf
    pipe.send(tf.distribute.Server({"ps": ["localhost:0"]}, job_name="ps", task_index=0, protocol="grpc").server_def.protocol)
    pipe.close()
    os._exit(0)

def eager(tf):
    server = tf.distribute.Server({"worker": ["localhost:0"]}, job_name="worker", task_index=0)
    tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec({"worker": [server.target[len("grpc://"):]]}), protocol="grpc")
    with tf.device("/job:worker/task:0"):
        print("eager", tf.add(tf.constant(1.0), 2.0).numpy(), flush=True)

def collectives(tf):
    os.environ["TF_CONFIG"] = '{"cluster": {"worker": ["localhost:%s"]}, "task": {"type": "worker", "index": 0}}' % sys.argv[2]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    print("collectives", strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(3.0))).numpy(), flush=True)

if __name__ == "__main__":
    mine, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=spawn, args=(theirs,))
    child.start()
    print("spawn", mine.recv(), flush=True)
    child.join()
    import tensorflow as tf
    for way in (eager, collectives):
        print("next way", file=sys.stderr, flush=True)
        child = os.fork()  # as a second import takes seconds
        if not child:
            way(tf)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    print(sys.argv[1:])
"""
    script(tmp_path, text, "trainer.py")
    port = str(free_port())
    code, out, err = run("--protocol", "grpc++", "-m", "trainer", "--x", port, cwd=tmp_path, TF_CPP_MIN_LOG_LEVEL="0")
    assert (code, out) == (0, f"spawn grpc++\neager 3.0\ncollectives 3.0\n['--x', '{port}']\n"), err
    # Each server of ours has one such line.
    assert [part.count("starwire: grpc++ on ") for part in err.split("next way\n")] == [1, 2, 1], err


def test_a_missing_library_fails_the_script(tmp_path):
    path = script(tmp_path, "import tensorflow\nprint('trained')\n")
    code, out, err = run(path, STARWIRE_LIBRARY="/nowhere/lib.so")
    assert (code, out) == (2, "")
    assert err.endswith("starwire run: error: STARWIRE_LIBRARY names '/nowhere/lib.so', which is not a file\n")
    code, out, err = python(path, paths=(SITE, ROOT / "python"), STARWIRE_LIBRARY="/nowhere/lib.so", STARWIRE_PROTOCOL="grpc++")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "ImportError: starwire: STARWIRE_LIBRARY names '/nowhere/lib.so', which is not a file"


def test_import_of_starwire_follows_the_variable_without_the_hook():
    """It comes before that of TensorFlow here. A server may ask for another protocol of ours."""
    code = """
import os, sys
import starwire, tensorflow as tf
for asked in ({}, {"protocol": "grpc++"}):
    print(tf.distribute.Server({"ps": ["localhost:0"]}, job_name="ps", task_index=0, **asked).server_def.protocol)
print(starwire.library_path())
del sys.modules["starwire"]
os.environ["STARWIRE_PROTOCOL"] = "typo"
try:
    import starwire
except ImportError as error:
    print(error)
"""
    status, out, err = python("-c", code, STARWIRE_PROTOCOL="star_server_lite")
    assert status == 0 and re.fullmatch(r"star_server_lite\ngrpc\+\+\n.*libstarwire\.so\n.*STARWIRE_PROTOCOL is 'typo'.*\n", out), out + err


def test_a_whole_cluster_trains(tmp_path):
    """Between-graph training over star_server; the script asks for grpc. Every task counts its steps in the same variable."""
    path = script(
        tmp_path,
        """
import json, os, time
import tensorflow as tf
v1 = tf.compat.v1
v1.disable_eager_execution()
config = json.loads(os.environ["TF_CONFIG"])
task, cluster = config["task"], config["cluster"]
server = v1.train.Server(cluster, job_name=task["type"], task_index=task["index"], protocol="grpc")
if task["type"] == "ps":
    server.join()
with v1.device(v1.train.replica_device_setter(cluster=cluster)):
    step = v1.train.get_or_create_global_step()
    count = v1.assign_add(step, 1, use_locking=True)
    done = v1.get_variable("done", initializer=tf.zeros([], tf.int32))
    finish = v1.assign_add(done, 1, use_locking=True)
filters = v1.ConfigProto(device_filters=["/job:ps", "/job:worker/task:%d" % task["index"]])
with v1.train.MonitoredTrainingSession(server.target, is_chief=task["index"] == 0, config=filters) as session:
    for _ in range(100):
        session.run(count)
    session.run(finish)
    while session.run(done) < 2:
        time.sleep(0.1)
    print("steps", session.run(step), server.server_def.protocol)
""",
    )
    code, out, err = run("--protocol", "star_server", "--ps", 1, "--worker", 2, "--logs", tmp_path / "logs", path)
    assert code == 0, out + err
    assert re.search(r"^worker 0 \| steps 200 star_server$", out, re.M) and re.search(r"^worker 1 \| steps 200 star_server$", out, re.M), out
    assert re.search(r"^starwire \| ps 0 serves at localhost:\d+ after [\d.]+ s$", out, re.M), out
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["ps-0.log", "worker-0.log", "worker-1.log"]
    assert "steps 200 star_server\n" in (tmp_path / "logs" / "worker-1.log").read_text()
