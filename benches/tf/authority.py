"""Certificates for tests and benchmarks, made as docs/tls.md says."""

import subprocess

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def openssl(*words):
    run = subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


class Authority:
    """A CA and its certificates."""

    def __init__(self, folder):
        folder.mkdir()
        self.folder = folder
        openssl("req", "-x509", *NEW_KEY, "-days", 2, "-subj", f"/CN={folder.name}", "-keyout", folder / "ca.key", "-out", folder / "ca.crt")

    def issue(self, name, *names, days=2):
        """Returns the environment of a task whose certificate has these names."""
        path = self.folder / name
        path.with_suffix(".ext").write_text(f"subjectAltName={','.join(names)}\nextendedKeyUsage=serverAuth,clientAuth\n")
        openssl("req", *NEW_KEY, "-subj", f"/CN={name}", "-keyout", path.with_suffix(".key"), "-out", path.with_suffix(".csr"))
        ca = ("-CA", self.folder / "ca.crt", "-CAkey", self.folder / "ca.key", "-CAcreateserial")
        out = ("-extfile", path.with_suffix(".ext"), "-out", path.with_suffix(".crt"))
        openssl("x509", "-req", "-in", path.with_suffix(".csr"), *ca, "-days", days, *out)
        return {"STARWIRE_TLS_CERT": path.with_suffix(".crt"), "STARWIRE_TLS_KEY": path.with_suffix(".key"), "STARWIRE_TLS_CA": self.folder / "ca.crt"}


def identity_for_all(folder):
    """Returns the environment of every task of a cluster, with TLS on all connections: one identity, and TCP also within the host."""
    name = "spiffe://example.org/all"
    return {key: str(value) for key, value in {"STARWIRE_UNIX": "off", "STARWIRE_TLS_PEERS": name, **Authority(folder).issue("all", f"URI:{name}")}.items()}
