"""What a browser on this host can be made to ask of the control service by a page of another site, and what peers can write into its answers."""

import contextlib
import http.client
import re

import client
import cluster as harness
import pytest
import wire

EVIL = "evil.example"
# As a page's DNS server can make them (rebinding), and as they may be mistaken for this host.
FOREIGN = [
    EVIL, f"{EVIL}:2222", f"127.0.0.1.{EVIL}", f"localhost.{EVIL}", f"localhost@{EVIL}", f"{EVIL}#localhost", f"{EVIL}/localhost", f"[::1]{EVIL}", f"{EVIL},localhost",
    "localhostx", "xlocalhost", "2130706433", "0x7f000001", "*", ".", "[::1", "127.0.0.1:x", "127.0.0.1:2222:2222", "localhost:65536", "\xff",
]  # fmt: skip
OWN = ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:2222"]


@pytest.fixture(scope="module")
def target(runner):
    with harness.Cluster(runner, "star_server", {"ps": 1, "worker": 1}, start=False) as cluster:
        cluster.start("ps", 0)
        proof, address = runner._proof, cluster.spec["ps"][0]
        certificates = proof if "STARWIRE_TLS_CERT" in proof else {}
        yield client.Target(address, address, "/job:ps/replica:0/task:0", "star_server", proof.get("STARWIRE_SECRET", ""), "", "127.0.0.1", certificates)


def ask(target, method="GET", path="/metrics", host="localhost", **headers):
    """Returns status, headers and body, as a browser of this host would get them."""
    connection = http.client.HTTPConnection(*target.address.rsplit(":", 1), timeout=30)
    with contextlib.closing(connection):
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in {"Host": host, **headers}.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()


def test_names_of_other_sites(target):
    for host in OWN:
        assert ask(target, host=host)[0] == 200, host
    for host in FOREIGN:
        for more in ({}, {"X_Forwarded_Host": "localhost", "Forwarded": "host=localhost", "Origin": "http://localhost"}):
            status, _, body = ask(target, host=host, **more)
            assert status in (400, 421) and "/job:" not in body and "starwire_" not in body, (host, status, body)


def test_answers_are_not_for_other_sites(target):
    for path in ("/", "/metrics", "/healthz", "/nowhere"):
        _, headers, _ = ask(target, path=path)
        assert headers.get("x-content-type-options") == "nosniff", path
        assert headers.get("cross-origin-resource-policy") == "same-origin", path


def test_requests_of_other_sites(target):
    """No site may read the answers or send cookies, nothing can be changed, and no connection becomes another one."""
    preflight = {"Access_Control_Request_Method": "GET", "Access_Control_Request_Headers": "x", "Access_Control_Request_Private_Network": "true"}
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec_WebSocket_Version": "13", "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    for origin in (f"https://{EVIL}", "null"):
        for method in ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"):
            for path in ("/", "/metrics", "/healthz", "/starwire.control.v1.Control/Stats"):
                for headers in ({}, preflight, upgrade):
                    status, answered, _ = ask(target, method, path, Origin=origin, Sec_Fetch_Site="cross-site", **headers)
                    assert status != 101 and not [name for name in answered if name.startswith(("access-control", "set-cookie", "location"))], (method, path, answered)
                    refused = status >= 400 or answered.get("grpc-status", "0") != "0"
                    assert refused or method in ("GET", "HEAD"), (method, path, status, answered)
    _, answered, _ = ask(target, path="/", Origin=f"https://{EVIL}")
    assert "frame-ancestors 'none'" in answered["content-security-policy"]


NAMES = [
    "/job:<img src=x onerror=alert(1)>/replica:0/task:0", '/job:x"} 1e9 /replica:0/task:0', "/job:x\\/replica:0/task:0", '/job:x\\"} 1/replica:0/task:0', "</script><!--",
    "# HELP starwire_losses_total", '",task="/job:ps/replica:0/task:0', "\u202e\u2028\u2029\ufeff", "x" * 512,
]  # fmt: skip
LINE = re.compile(r'(#.*|\w+(\{\w+="([^"\\\n]|\\[\\"n])*"(,\w+="([^"\\\n]|\\[\\"n])*")*\})? [-+.\deInfNa]+)')
PEER = re.compile(r'peer="((?:[^"\\]|\\.)*)"')


def test_names_of_peers(target):
    """Names are what the peer sent, within a label, and nowhere on the page."""
    if target.certificates:
        pytest.skip("with TLS, the name must be that of a certificate")
    for name in NAMES:
        with client.Member(target, task=name) as member:
            assert member.devices()
    body = wire.http_get(target.address, "/metrics")[1]
    # A line ends where Prometheus says that it does.
    wrong = [line for line in body.rstrip("\n").split("\n") if not LINE.fullmatch(line)]
    assert not wrong, wrong
    told = {re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), label) for label in PEER.findall(body)}
    assert told == set(NAMES), told ^ set(NAMES)
    page = wire.http_get(target.address, "/")[1]
    assert not any(name in page for name in NAMES)
