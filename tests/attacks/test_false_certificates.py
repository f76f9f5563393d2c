"""Certificates that speak for another task, or for none, and files that are replaced one by one."""

import shutil
import ssl

import client
import cluster as harness
import pytest
import wire
from false_certificates import Issuer
from waiting import wait_until

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="needs the openssl command")

TASK = "/job:worker/replica:0/task:0"
# Three ways to name a task, of which one suffices. The ClusterSpec has the address 127.0.0.1.
PEERS = "{host},spiffe://example.org/train/{job}/{task},{job}-{task}.train.svc"
ID = "URI:spiffe://example.org/train/worker/0"
NAMES = {
    "the address": (["IP:127.0.0.1"], True),
    "the id": ([ID], True),
    "the host": (["DNS:worker-0.train.svc"], True),
    "every host of the domain": (["DNS:*.train.svc"], True),
    "one of several": (["DNS:other.example", "IP:10.0.0.1", "URI:spiffe://example.org/other", ID], True),
    "no name": ([], False),
    "several others": (["DNS:other.example", "IP:127.0.0.2", "URI:spiffe://example.org/train/ps/0", "DNS:worker-1.train.svc"], False),
    "the address as a host": (["DNS:127.0.0.1"], False),
    "the address, mapped": (["IP:::ffff:127.0.0.1"], False),
    "the address in a URI": (["URI:spiffe://127.0.0.1/train/worker/0"], False),
    "another trust domain": (["URI:spiffe://example.com/train/worker/0"], False),
    "a longer trust domain": (["URI:spiffe://example.org.evil/train/worker/0"], False),
    "the trust domain as a user": (["URI:spiffe://example.org@evil/train/worker/0"], False),
    "the id in capitals": (["URI:spiffe://EXAMPLE.org/train/worker/0"], False),
    "another scheme": (["URI:https://example.org/train/worker/0"], False),
    "the beginning of the id": (["URI:spiffe://example.org/train/worker"], False),
    "the id and more": ([f"{ID}/"], False),
    "the id by way of another": (["URI:spiffe://example.org/train/ps/../worker/0"], False),
    "the id with an escape": (["URI:spiffe://example.org/train/worker%2F0"], False),
    "the pattern": (["URI:spiffe://example.org/train/{job}/{task}"], False),
    "the id in a host": (["DNS:spiffe.example.org"], False),
    "the host in an address of mail": (["email:x@worker-0.train.svc"], False),
    "the domain": (["DNS:train.svc"], False),
    "every domain": (["DNS:*.svc"], False),
    "everything": (["DNS:*"], False),
    "a part of a label": (["DNS:worker-*.train.svc"], False),
    "two labels": (["DNS:*.*.svc"], False),
    "a longer host": (["DNS:worker-0.train.svc.evil"], False),
    "a host with the domain in front": (["DNS:a.worker-0.train.svc"], False),
}
CA = "basicConstraints=critical,CA:TRUE\n"
HOST = "DNS:worker-0.train.svc"
CONSTRAINED = {
    "permitted": ("permitted;DNS:train.svc", HOST, True),
    "another domain": ("permitted;DNS:other.svc", HOST, False),
    "an excluded domain": ("excluded;DNS:train.svc", HOST, False),
    "another network": ("permitted;IP:10.0.0.0/255.0.0.0", "IP:127.0.0.1", False),
    "another trust domain": ("permitted;URI:example.com", ID, False),
    "an excluded trust domain": ("excluded;URI:example.org", ID, False),
}


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    """Two whose certificates the server accepts, and one with the name of the first."""
    folder = tmp_path_factory.mktemp("authorities")
    return Issuer(folder / "first"), Issuer(folder / "second"), Issuer(folder / "third", subject="first")


@pytest.fixture(scope="module")
def server(runner, authorities, tmp_path_factory):
    """A parameter server that accepts two CAs; its files, and its address."""
    folder = tmp_path_factory.mktemp("server")
    files = authorities[0].issue("server", "IP:127.0.0.1")
    for name, path in files.items():
        shutil.copy(path, folder / name)
    with (folder / "STARWIRE_TLS_CA").open("a") as both:
        both.write((authorities[1].folder / "ca.crt").read_text())
    environment = {**{name: folder / name for name in files}, "STARWIRE_TLS_PEERS": PEERS, "STARWIRE_UNIX": "off"}
    with harness.Cluster(runner, "star_server", {"ps": 1, "worker": 1}, environment=environment, start=False) as cluster:
        yield cluster.start("ps", 0), folder, cluster.spec["ps"][0]


def refusal(server, certificates, task=TASK):
    """Returns the reason that the server gives a client that is `task`; nothing if it is accepted."""
    _, _, address = server
    target = client.Target(address, address, "", "star_server", server[0].runner._proof.get("STARWIRE_SECRET", ""), "", "127.0.0.1", certificates)
    try:
        with client.Member(target, task) as member:
            assert member.devices()
            return ""
    except ConnectionRefusedError as refused:
        return refused.args[1]
    except (ConnectionError, ssl.SSLError) as ended:
        return f"an alert: {ended}"


def accepted(*arguments):
    return not refusal(*arguments)


@pytest.mark.parametrize("case", NAMES)
def test_names_of_certificates(server, authorities, case):
    names, expected = NAMES[case]
    reason = refusal(server, authorities[0].issue(case.replace(" ", "-"), *names))
    assert reason == "" if expected else "does not speak for" in reason, reason


@pytest.mark.parametrize("case", CONSTRAINED)
def test_constraints_of_an_authority(server, authorities, case):
    constraint, name, expected = CONSTRAINED[case]
    below = authorities[0].below(f"constrained-{case.replace(' ', '-')}", f"{CA}nameConstraints=critical,{constraint}\n")
    reason = refusal(server, below.issue("task", name))
    assert reason == "" if expected else "alert" in reason, reason


def test_authorities_that_are_none(server, authorities):
    first, second, third = authorities
    assert accepted(server, second.issue("task", ID)), "a CA of the file"
    assert not accepted(server, third.issue("task", ID)), "another CA of that name"
    assert accepted(server, first.below("intermediate", CA).issue("task", ID))
    assert not accepted(server, first.below("leaf", f"subjectAltName={ID}\nbasicConstraints=critical,CA:FALSE\n").issue("task", ID))
    assert not accepted(server, first.below("task", f"subjectAltName={ID}\n").issue("task", ID)), "an old certificate, without constraints"
    for uses in ("serverAuth", "emailProtection"):
        assert not accepted(server, first.issue(f"for-{uses}", ID, uses=uses)), uses
    assert not accepted(server, first.issue("ps", "URI:spiffe://example.org/train/ps/0"))
    assert accepted(server, first.issue("ps", "URI:spiffe://example.org/train/ps/0"), "/job:ps/replica:0/task:0")


def test_files_in_the_wrong_order(server, authorities):
    """A new key lies beside the old certificate for a while, and a new certificate beside half a list of CAs."""
    task, folder, address = server
    own = authorities[0].issue("member", ID)
    new = authorities[0].issue("renewed", "IP:127.0.0.1")

    def shown():
        with wire.Peer(address, tls=client.tls_with(own)) as peer:
            return ssl.DER_cert_to_PEM_cert(peer.socket.getpeercert(binary_form=True))

    def replace(name, text):
        (folder / "new").write_text(text)
        (folder / "new").rename(folder / name)

    old, size = shown(), task.log_size()
    all_of_them = (folder / "STARWIRE_TLS_CA").read_text()
    for name, text in (("STARWIRE_TLS_KEY", new["STARWIRE_TLS_KEY"].read_text()), ("STARWIRE_TLS_CA", all_of_them[: len(all_of_them) // 3])):
        replace(name, text)
        wait_until(lambda: accepted(server, own) and "still using what they contained before" in task.full_log()[size:], 30, "a look at the files")
        assert shown() == old and accepted(server, own)
        size = task.log_size()
    replace("STARWIRE_TLS_CERT", new["STARWIRE_TLS_CERT"].read_text())
    replace("STARWIRE_TLS_CA", all_of_them)
    wait_until(lambda: shown() != old, 30, "the new certificate")
    assert accepted(server, own)
