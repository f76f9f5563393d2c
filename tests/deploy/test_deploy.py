"""The deployment kit, offline: everything parses, fits together, and is valid as far as there are tools for it on this machine."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MONITORING = DEPLOY / "monitoring"
KUBERNETES = DEPLOY / "kubernetes"
TLS = DEPLOY / "kubernetes-tls"
DASHBOARD = MONITORING / "grafana-dashboard.json"


def documents(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def run(*words, **options):
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=120, **options)


# Monitoring. ----------------------------------------------------------------------------------------------------------


def documented_metrics():
    """{name: kind} of docs/metrics.md."""
    rows = re.findall(r"^\| `(starwire_\w+)` \| (counter|gauge|histogram) \|", (ROOT / "docs/metrics.md").read_text(), re.M)
    assert len(rows) > 50
    return dict(rows)


def used_metrics(expression):
    return set(re.findall(r"\bstarwire_\w+", expression))


def dashboard_expressions():
    dashboard = json.loads(DASHBOARD.read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    variables = [variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    return found + variables


def alert_expressions():
    return [rule["expr"] for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("source", [dashboard_expressions, alert_expressions])
def test_metrics_exist_and_are_used_as_what_they_are(source):
    kinds = documented_metrics()
    expressions = source()
    assert len(expressions) > 10
    for expression in expressions:
        for name in used_metrics(expression):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            kind = kinds.get(name) or ("histogram part" if kinds.get(base) == "histogram" else None)
            assert kind, f"{name} is not in docs/metrics.md: {expression}"
            is_rate = bool(re.search(rf"\b(rate|increase)\({name}\b", expression))
            if kind in ("counter", "histogram part"):
                assert is_rate, f"{name} is a {kind} without a rate: {expression}"
            elif kind == "gauge":
                assert not is_rate, f"{name} is a gauge: {expression}"
            else:
                pytest.fail(f"{name} is a histogram: use {name}_bucket: {expression}")


def test_dashboard_is_complete():
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["title"] and panel["description"].endswith("."), panel["title"]
            assert panel["targets"] and all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", " ".join(dashboard_expressions()))) - {"__rate_interval"}
    assert used <= names, used - names


def test_every_alert_says_what_to_do():
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical") and rule["annotations"]["summary"], rule["alert"]
            assert f"`{rule['alert']}`" in (DEPLOY / "README.md").read_text(), f"{rule['alert']} is not in deploy/README.md"


def test_the_operator_gets_the_same_rules():
    (rule,) = documents(KUBERNETES / "prometheusrule.yaml")
    assert rule["spec"] == yaml.safe_load((MONITORING / "alerts.yaml").read_text())


promtool = pytest.mark.skipif(not (os.environ.get("PROMTOOL") or shutil.which("promtool")), reason="promtool is not on PATH (or in $PROMTOOL)")


def call_promtool(*words):
    return run(os.environ.get("PROMTOOL") or "promtool", *words, cwd=MONITORING)


@promtool
def test_promtool_accepts_rules_and_configuration(tmp_path):
    for words in (("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml"), ("check", "config", "prometheus.yaml")):
        result = call_promtool(*words)
        assert result.returncode == 0, result.stdout + result.stderr


@promtool
def test_promtool_parses_the_queries_of_the_dashboard(tmp_path):
    values = {"$__rate_interval": "1m", "$task": ".*", "$protocol": ".*"}
    rules = []
    for i, expression in enumerate(one for one in dashboard_expressions() if not one.startswith("label_values")):
        for variable, value in values.items():
            expression = expression.replace(variable, value)
        rules.append({"record": f"query:{i}", "expr": expression})
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    result = call_promtool("check", "rules", path)
    assert result.returncode == 0 and f"{len(rules)} rules found" in result.stdout, result.stdout + result.stderr


# Kubernetes. ----------------------------------------------------------------------------------------------------------

BUILT_IN = ["cluster.yaml", "services.yaml", "ps.yaml", "worker.yaml", "networkpolicy.yaml"]


def test_manifests_follow_the_schemas_of_kubernetes():
    """Every field, strictly; the schemas are in the package."""
    import kubernetes_validate

    for name in BUILT_IN:
        for document in documents(KUBERNETES / name):
            kubernetes_validate.validate(document, "1.30", strict=True)


def test_manifests_that_need_an_operator_hold_valid_pods():
    import kubernetes_validate

    (job,) = documents(KUBERNETES / "tfjob.yaml")
    for kind, replica in job["spec"]["tfReplicaSpecs"].items():
        assert kind in ("Chief", "PS", "Worker") and replica["replicas"] >= 1
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": replica["template"]["spec"]}
        kubernetes_validate.validate(pod, "1.30", strict=True)
        assert [container["name"] for container in pod["spec"]["containers"]] == ["tensorflow"]
    for name in ("podmonitor.yaml", "prometheusrule.yaml"):
        (document,) = documents(KUBERNETES / name)
        assert document["apiVersion"] == "monitoring.coreos.com/v1" and document["metadata"]["name"]


def merged(base, patch):
    """A strategic merge, as far as the overlays use it: lists of containers by name, null removes."""
    if isinstance(base, dict) and isinstance(patch, dict):
        made = {key: merged(base.get(key), value) for key, value in patch.items() if value is not None}
        return {**{key: value for key, value in base.items() if key not in patch}, **made}
    if isinstance(base, list) and isinstance(patch, list) and all(isinstance(one, dict) for one in [*base, *patch]):
        return [merged(one, next((other for other in patch if other["name"] == one["name"]), {})) for one in base]
    return patch


def test_the_job_with_tls():
    """Every patch finds what it changes; the result is valid, has no secret, and its files and names fit together."""
    import kubernetes_validate

    (overlay,) = documents(TLS / "kustomization.yaml")
    assert overlay["resources"] == ["../kubernetes", "certificates.yaml"]
    results = {}
    for path in (patch["path"] for patch in overlay["patches"]):
        (patch,) = documents(TLS / path)
        (base,) = [one for one in documents(KUBERNETES / path) if (one["kind"], one["metadata"]["name"]) == (patch["kind"], patch["metadata"]["name"])]
        results[path] = merged(base, patch)
        kubernetes_validate.validate(results[path], "1.30", strict=True)
    (container,) = results["ps.yaml"]["spec"]["template"]["spec"]["containers"]
    probe = container["readinessProbe"]
    assert probe["exec"]["command"] == ["starctl", "health", "127.0.0.1:2222"] and "grpc" not in probe
    settings = results["cluster.yaml"]["data"]
    assert not {"STARWIRE_SECRET_FILE", "STARWIRE_CONTROL"} & settings.keys() and settings["CLUSTER"]
    files = {settings[f"STARWIRE_TLS_{name}"] for name in ("CERT", "KEY", "CA")}
    assert files == {f"/etc/starwire/{name}" for name in ("tls.crt", "tls.key", "ca.crt")}  # as cert-manager names them
    certificates = {one["metadata"]["name"]: one["spec"] for one in documents(TLS / "certificates.yaml") if one["kind"] == "Certificate"}
    issuers = {one["metadata"]["name"] for one in documents(TLS / "certificates.yaml") if one["kind"] == "Issuer"}
    assert all(one["issuerRef"]["name"] in issuers for one in certificates.values())
    mounted = {volume["secret"]["secretName"] for _, pod in pods() for volume in pod["volumes"]}
    assert certificates["training"]["dnsNames"] == [settings["STARWIRE_TLS_PEERS"]] and {certificates["training"]["secretName"]} == mounted
    assert {"server auth", "client auth"} <= set(certificates["training"]["usages"])
    (monitor,), (plain,) = documents(TLS / "podmonitor.yaml"), documents(KUBERNETES / "podmonitor.yaml")
    (endpoint,), (without, _) = monitor["spec"].pop("podMetricsEndpoints"), plain["spec"].pop("podMetricsEndpoints")
    asks = endpoint.pop("tlsConfig")
    assert (monitor, endpoint.pop("scheme"), endpoint) == (plain, "https", without)
    assert asks["serverName"] == settings["STARWIRE_TLS_PEERS"] and asks["keySecret"]["name"] == certificates["training-scraper"]["secretName"]


def probes_that_restart(container):
    return {name: container[name] for name in ("startupProbe", "livenessProbe") if name in container}


def test_no_probe_restarts_a_server_that_restores_or_has_moved():
    """The first probe waits for the port, the second asks whether it is still open: that needs no certificate, and a server that has moved passes."""
    (servers,), (patch,) = documents(KUBERNETES / "ps.yaml"), documents(TLS / "ps.yaml")
    (container,) = servers["spec"]["template"]["spec"]["containers"]
    found = probes_that_restart(container)
    assert [probe["tcpSocket"]["port"] for probe in found.values()] == 2 * ["starwire"]
    assert found["startupProbe"]["periodSeconds"] * found["startupProbe"]["failureThreshold"] >= 3600
    (patched,) = patch["spec"]["template"]["spec"]["containers"]
    assert not probes_that_restart(patched)


def test_every_pod_ends_at_sigterm_and_is_scraped():
    """The kernel drops a SIGTERM to process 1 that has no handler. The operator drops pods that have no port of the name it is given."""
    (monitor,) = documents(KUBERNETES / "podmonitor.yaml")
    scraped = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    used = set()
    for name, pod in pods():
        assert pod["shareProcessNamespace"] is True, name
        (port,) = pod["containers"][0]["ports"]
        used.add(port["name"])
    assert scraped == used


def test_the_volume_for_a_state_in_the_documentation():
    """The lines of docs/elastic.md, in the manifest: valid, and mounted where the state is."""
    import kubernetes_validate

    section = (ROOT / "docs/elastic.md").read_text().split("## Servers that come back")[1].split("\n## ")[0]
    lines = yaml.safe_load(re.search(r"```yaml\n(.*?)```", section, re.S)[1])
    (servers,) = documents(KUBERNETES / "ps.yaml")
    servers["spec"]["volumeClaimTemplates"] = lines["spec"]["volumeClaimTemplates"]
    (added,) = lines["spec"]["template"]["spec"]["containers"]
    (container,) = servers["spec"]["template"]["spec"]["containers"]
    assert added.pop("name") == container["name"]
    (mount,) = added.pop("volumeMounts")
    (setting,) = added.pop("env")
    assert not added and setting == {"name": "STARWIRE_STATE", "value": mount["mountPath"]}
    assert mount["name"] == lines["spec"]["volumeClaimTemplates"][0]["metadata"]["name"]
    container["volumeMounts"].append(mount)
    container["env"] = [setting]
    kubernetes_validate.validate(servers, "1.30", strict=True)


def pods():
    """(name, pod's spec) of every workload."""
    for name in BUILT_IN:
        for document in documents(KUBERNETES / name):
            if document["kind"] in ("StatefulSet", "Job"):
                yield document["metadata"]["name"], document["spec"]["template"]["spec"]
    (job,) = documents(KUBERNETES / "tfjob.yaml")
    for kind, replica in job["spec"]["tfReplicaSpecs"].items():
        yield kind, replica["template"]["spec"]


# The chart. -----------------------------------------------------------------------------------------------------------

CHART = DEPLOY / "helm" / "starwire-training"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    program = tmp_path_factory.mktemp("render") / "render"
    environment = {**os.environ, "GO111MODULE": "off", "GOPATH": "/usr/share/gocode", "GOFLAGS": "", "GOCACHE": str(program.parent / "cache")}
    built = subprocess.run(["go", "build", "-o", program, Path(__file__).with_name("render.go")], capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stderr
    return program


def chart(renderer, release="training", **changes):
    """The documents of the chart with these values, by kind and name; or the error that Helm would show."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert changes.keys() <= values.keys()
    values = {key: merged(value, changes[key]) if key in changes else value for key, value in values.items()}
    templates = {path.name: path.read_text() for path in (CHART / "templates").iterdir()}
    result = run(renderer, input=json.dumps({"templates": templates, "release": release, "values": values}))
    if result.returncode:
        return result.stderr
    return by_name(document for document in yaml.safe_load_all(result.stdout) if document)


def by_name(found):
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def kustomized(paths):
    """The same documents from the kustomization; with its image, and commands as the chart writes them."""
    (image,) = documents(KUBERNETES / "kustomization.yaml")[0]["images"]
    found = by_name(document for path in paths for document in documents(path))
    for one in found.values():
        if one["kind"] in ("StatefulSet", "Job"):
            (container,) = one["spec"]["template"]["spec"]["containers"]
            container["image"] = f"{image['newName']}:{image['newTag']}"
    return found


def kustomized_with_tls():
    found = kustomized([KUBERNETES / name for name in BUILT_IN] + [TLS / "certificates.yaml"])
    for patch in documents(TLS / "cluster.yaml") + documents(TLS / "ps.yaml"):
        key = patch["kind"], patch["metadata"]["name"]
        found[key] = merged(found[key], patch)
    return found


def with_json(found):
    """CLUSTER is JSON in the text of YAML: spaces in it mean nothing."""
    for one in found.values():
        if one["kind"] == "ConfigMap":
            one["data"]["CLUSTER"] = json.loads(one["data"]["CLUSTER"])
    return found


def test_the_chart_makes_the_same_job(renderer):
    assert with_json(chart(renderer)) == with_json(kustomized(KUBERNETES / name for name in BUILT_IN))


def test_the_chart_makes_the_same_job_with_tls(renderer):
    made = with_json(chart(renderer, proof="tls", monitoring={"podMonitor": True}))
    monitor = made.pop(("PodMonitor", "training"))
    (other,) = documents(TLS / "podmonitor.yaml")
    assert made == with_json(kustomized_with_tls()) and monitor["spec"] == other["spec"]


def test_values_of_the_chart(renderer):
    import kubernetes_validate

    changes = {"ps": {"replicas": 3}, "worker": {"replicas": 12, "backoffLimit": 4}, "port": 3333, "args": ["train.py", "--epochs", "2"]}
    changes["env"] = {"STARWIRE_TENSOR_FUSE": 1, "LARGE": 8589934592, "PART": 0.25, "FLAG": True, "TEXT": "1e3"}
    made = chart(renderer, release="ads", secretName="mine", **changes)
    assert len(made) == 6
    for one in made.values():
        kubernetes_validate.validate(one, "1.30", strict=True)
    settings = made["ConfigMap", "ads-cluster"]["data"]
    cluster = json.loads(settings["CLUSTER"])
    assert cluster == {job: [f"ads-{job}-{i}.ads-{job}:3333" for i in range(count)] for job, count in (("ps", 3), ("worker", 12))}
    expected = {"STARWIRE_TENSOR_FUSE": "1", "LARGE": "8589934592", "PART": "0.25", "FLAG": "true", "TEXT": "1e3"}
    assert {name: settings[name] for name in expected} == expected
    pod = made["Job", "ads-worker"]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["secret"]["secretName"] == "mine" and pod["containers"][0]["args"] == changes["args"]
    assert made["StatefulSet", "ads-ps"]["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["grpc"] == {"port": 3333}
    assert "it must be secret or tls" in chart(renderer, proof="none")


def test_pods_are_not_root_and_can_read_the_secret():
    found = list(pods())
    assert len(found) == 5
    for name, pod in found:
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] == 10001, name
        (volume,) = [volume for volume in pod["volumes"] if "secret" in volume]
        # The file belongs to root and to this group; starwire refuses a file that everybody can read.
        assert security["fsGroup"] == security["runAsGroup"] and volume["secret"]["defaultMode"] == 0o440, name
        (container,) = pod["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}, name
        (mount,) = container["volumeMounts"]
        assert mount["name"] == volume["name"] and mount["mountPath"] == "/etc/starwire"


def test_names_of_the_cluster_are_those_of_the_pods():
    settings = documents(KUBERNETES / "cluster.yaml")[0]["data"]
    cluster = json.loads(settings["CLUSTER"])
    (servers,), (workers,) = documents(KUBERNETES / "ps.yaml"), documents(KUBERNETES / "worker.yaml")
    services = {service["metadata"]["name"]: service["spec"] for service in documents(KUBERNETES / "services.yaml")}
    for job, service, owner, count in (
        ("ps", servers["spec"]["serviceName"], servers, servers["spec"]["replicas"]),
        ("worker", workers["spec"]["template"]["spec"]["subdomain"], workers, workers["spec"]["completions"]),
    ):
        name = owner["metadata"]["name"]
        assert cluster[job] == [f"{name}-{i}.{service}:2222" for i in range(count)]
        labels = owner["spec"]["template"]["metadata"]["labels"]
        assert services[service]["clusterIP"] == "None" and services[service]["publishNotReadyAddresses"] is True
        assert services[service]["selector"].items() <= labels.items()
    assert workers["spec"]["parallelism"] == workers["spec"]["completions"]
    # One port everywhere.
    assert settings["STARWIRE_PORTS"] == "one" and "STARWIRE_BIND" not in settings
    policy = documents(KUBERNETES / "networkpolicy.yaml")[0]["spec"]["ingress"]
    assert [[one["port"] for one in rule["ports"]] for rule in policy] == [[2222], [2222]]
    for name, pod in pods():
        assert [one["containerPort"] for one in pod["containers"][0]["ports"]] == [2222], name
    assert servers["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["grpc"]["port"] == 2222


@pytest.mark.parametrize("name, job", [("ps.yaml", "ps"), ("worker.yaml", "worker")])
def test_the_command_of_a_pod_makes_its_tf_config(name, job, tmp_path):
    (container,) = documents(KUBERNETES / name)[0]["spec"]["template"]["spec"]["containers"]
    (tmp_path / "starwire").write_text('#!/bin/sh\necho "$@"\necho "$TF_CONFIG"\n')
    (tmp_path / "starwire").chmod(0o755)
    settings = documents(KUBERNETES / "cluster.yaml")[0]["data"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOSTNAME": f"training-{job}-12", **settings}
    result = run(*container["command"], *container["args"], env=environment)
    assert result.returncode == 0, result.stderr
    words, config = result.stdout.splitlines()
    assert words == "run train.py"
    assert json.loads(config) == {"cluster": json.loads(settings["CLUSTER"]), "task": {"type": job, "index": 12}}


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not on PATH")
@pytest.mark.parametrize("tls", [False, True])
def test_kustomize_builds_the_job(tls):
    result = run("kubectl", "kustomize", TLS if tls else KUBERNETES)
    assert result.returncode == 0, result.stderr
    made = by_name(yaml.safe_load_all(result.stdout))
    wanted = kustomized_with_tls() if tls else kustomized(KUBERNETES / name for name in BUILT_IN)
    assert with_json(made) == with_json(wanted)
    assert re.findall(r"image: (\S+)", result.stdout) == 2 * ["registry.example.org/my-training:1"]
    assert len(re.findall(r"defaultMode: (?:288|0440)\b", result.stdout)) == 2


def test_every_manifest_is_used():
    files = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}
    named = set(documents(KUBERNETES / "kustomization.yaml")[0]["resources"])
    assert named == set(BUILT_IN) and files - named == {"tfjob.yaml", "podmonitor.yaml", "prometheusrule.yaml"}
    (overlay,) = documents(TLS / "kustomization.yaml")
    named = {"kustomization.yaml", "certificates.yaml", "podmonitor.yaml"} | {patch["path"] for patch in overlay["patches"]}
    assert {path.name for path in TLS.iterdir()} == named


# Docker. --------------------------------------------------------------------------------------------------------------


def test_the_image_is_not_root_and_copies_what_exists():
    lines = re.sub(r"\\\n", " ", (DEPLOY / "docker/Dockerfile").read_text()).splitlines()
    instructions = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    known = {"ARG", "FROM", "RUN", "COPY", "ENV", "WORKDIR", "USER", "EXPOSE", "CMD"}
    assert {name for name, _ in instructions} <= known
    stages = [rest.split()[2] for name, rest in instructions if name == "FROM" and " AS " in rest]
    for name, rest in instructions:
        for stage in re.findall(r"--from=(\S+)", rest) if name == "COPY" else []:
            assert stage in stages, stage
    final = instructions[max(i for i, one in enumerate(instructions) if one[0] == "FROM") :]
    assert dict(final)["USER"] == "10001:10001"
    assert [name for name, _ in final].index("USER") > max(i for i, one in enumerate(final) if one[0] == "RUN")
    assert json.loads(dict(final)["CMD"])[:2] == ["starwire", "run"]
    # The newest TensorFlow that the Makefile builds for.
    newest = re.search(r"^DEFAULT_TF_VERSION := (\S+)$", (ROOT / "Makefile").read_text(), re.M)[1]
    assert [rest for name, rest in instructions if name == "ARG" and rest.startswith("TENSORFLOW")] == 2 * [f"TENSORFLOW={newest}"]
    rust = re.search(r'^rust-version = "(\S+)"$', (ROOT / "Cargo.toml").read_text(), re.M)[1]
    assert ["ARG", f"RUST={rust}"] in instructions


# Slurm. ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def slurm(tmp_path):
    """sbatch's environment with srun and scontrol that run everything here. Returns a function: (status, output)."""
    tools = {
        "scontrol": 'for i in 0 1 2 3; do echo "node$i"; done',
        "starwire": 'shift; exec "$@"',
        "srun": f"""exec {shlex.quote(sys.executable)} - "$@" <<'END'
import os, signal, subprocess, sys
words = sys.argv[1:]
count = int(next(word for word in words if word.startswith("--ntasks=")).split("=")[1])
first = int(next(word for word in words if word.startswith("--relative=")).split("=")[1])
assert first + count <= 4 and f"--nodes={{count}}" in words, words
while words[0].startswith("--"):
    words.pop(0)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
unblock = lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
tasks = [subprocess.Popen(words, env=dict(os.environ, SLURM_PROCID=str(i)), preexec_fn=unblock) for i in range(count)]
signal.signal(signal.SIGTERM, lambda *_: ([task.kill() for task in tasks], os._exit(143)))
unblock()
status = 0
for task in tasks:
    status = task.wait() or status
sys.exit(status)
END""",
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in tools.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)

    def call(text, nodes=4, **variables):
        script = tmp_path / "train.sh"
        script.write_text(f"#!/bin/bash\n{text}\n")
        script.chmod(0o755)
        environment = {"PATH": f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": "node[0-3]"}
        environment.update({"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7", **variables})
        result = run("bash", DEPLOY / "slurm/starwire.sbatch", script, "--x", env=environment, cwd=tmp_path)
        return result.returncode, result.stdout + result.stderr

    return call


TASK = """
echo "$TF_CONFIG $STARWIRE_PROTOCOL $STARWIRE_CLUSTER_ID $1 ${STARWIRE_SLURM_HOSTS-unset}"
said=$(dirname "$0")/said
mktemp "$said.XXXXXX" >/dev/null
case "$TF_CONFIG" in *'"type": "ps"'*) exec sleep 600;; esac
until [ "$(ls "$said".* | wc -l)" -ge 4 ]; do sleep 0.05; done
"""


@pytest.mark.parametrize("chief", [0, 1])
def test_slurm_starts_the_cluster_and_ends_with_the_workers(slurm, chief):
    status, out = slurm(TASK, CHIEF=str(chief))
    assert status == 0, out
    said = [json.loads(line.split(" star_server ")[0]) for line in out.splitlines() if line.startswith("{")]
    expected = {"ps": ["node0:2222", "node1:2222"], "worker": ["node2:2222", "node3:2222"]}
    if chief:
        expected.update(chief=["node2:2222"], worker=["node3:2222"])
    assert all(one["cluster"] == expected for one in said), out
    tasks = sorted((one["task"]["type"], one["task"]["index"]) for one in said)
    assert tasks == sorted((job, i) for job, addresses in expected.items() for i in range(len(addresses)))
    assert out.count("star_server slurm-7 --x unset") == 4


def test_slurm_ends_with_the_status_of_a_worker(slurm):
    # The parameter servers are stopped: they sleep for longer than `slurm` waits.
    status, out = slurm(TASK + "sleep 0.2; case \"$TF_CONFIG\" in *'\"index\": 1'*) exit 5;; esac")
    assert status == 5, out


def test_slurm_ends_when_the_parameter_servers_fail(slurm):
    status, out = slurm("case \"$TF_CONFIG\" in *'\"type\": \"ps\"'*) sleep 0.3; exit 6;; esac; exec sleep 600", CHIEF="1")
    assert status == 6, out


def test_slurm_refuses_too_few_nodes(slurm):
    status, out = slurm(TASK, nodes=2)
    assert status == 2 and "2 nodes are not enough for 2 parameter servers, 0 chiefs and a worker" in out


# systemd and Ray. -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not on PATH")
def test_units_are_valid(tmp_path):
    for unit in sorted((DEPLOY / "systemd").glob("*.service")):
        # The programs are not installed here.
        text = re.sub(r"/opt/starwire/bin/\w+", "/bin/true", unit.read_text())
        # A state's folder ps-0 is not the task's own.
        folder, state = re.search(r"^StateDirectory=(\S+)$", text, re.M)[1], re.search(r"STARWIRE_STATE=(/[\w/%]+)", text)[1]
        assert state.startswith(f"/var/lib/{folder}/") and re.search("^StateDirectoryMode=0700$", text, re.M)
        name = unit.name.replace("@", "@ps-0")
        (tmp_path / name).write_text(text)
        result = run("systemd-analyze", "verify", "--man=no", tmp_path / name)
        ours = [line for line in result.stderr.splitlines() if name in line]
        assert result.returncode == 0 and not ours, result.stderr


def test_ray_runs_the_cluster(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed")
    script = tmp_path / "train.py"
    script.write_text(
        "import json, os, sys, time\nconfig = json.loads(os.environ['TF_CONFIG'])\ntask = config['task']\n"
        f"open({str(tmp_path)!r} + '/' + task['type'] + str(task['index']), 'w').write(json.dumps(config['cluster']) + os.environ['STARWIRE_PROTOCOL'])\n"
        "time.sleep(60 if task['type'] == 'ps' else 0.5)\nsys.exit(3 if sys.argv[1:] == ['fail'] else 0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "RAY_USAGE_STATS_ENABLED": "0"}
    words = [sys.executable, DEPLOY / "ray/starwire_on_ray.py", "--ps", "1", "--worker", "2", "--cpus", "0", script]
    result = run(*words, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    written = {path.name: path.read_text() for path in tmp_path.iterdir() if path.suffix == ""}
    assert set(written) == {"ps0", "worker0", "worker1"} and len(set(written.values())) == 1
    assert written["ps0"].endswith("star_server") and json.loads(written["ps0"][: -len("star_server")]).keys() == {"ps", "worker"}
    assert run(*words, "fail", env=environment).returncode == 3
