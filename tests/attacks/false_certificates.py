"""Certificates that a CA should not have issued, that say too little, or that other CAs have issued."""

from authority import NEW_KEY, Authority, openssl

USES = "serverAuth,clientAuth"


class Issuer(Authority):
    """An authority that issues whatever it is asked for."""

    def __init__(self, folder, subject=None):
        """`subject`: the common name, which another CA may have as well."""
        folder.mkdir()
        self.folder, self.chain = folder, ""
        openssl("req", "-x509", *NEW_KEY, "-days", 2, "-subj", f"/CN={subject or folder.name}", "-keyout", folder / "ca.key", "-out", folder / "ca.crt")

    def extended(self, name, extensions):
        """Returns the path of a certificate with these extensions; its key is beside it."""
        path = self.folder / name
        path.with_suffix(".ext").write_text(extensions)
        openssl("req", *NEW_KEY, "-subj", f"/CN={name}", "-keyout", path.with_suffix(".key"), "-out", path.with_suffix(".csr"))
        ca = ("-CA", self.folder / "ca.crt", "-CAkey", self.folder / "ca.key", "-CAcreateserial")
        openssl("x509", "-req", "-in", path.with_suffix(".csr"), *ca, "-days", 2, "-extfile", path.with_suffix(".ext"), "-out", path.with_suffix(".crt"))
        return path

    def issue(self, name, *names, uses=USES):
        """As Authority's; without names, the common name is all there is."""
        path = self.extended(name, (f"subjectAltName={','.join(names)}\n" if names else "") + f"extendedKeyUsage={uses}\n")
        with path.with_suffix(".crt").open("a") as file:
            file.write(self.chain)
        return {"STARWIRE_TLS_CERT": path.with_suffix(".crt"), "STARWIRE_TLS_KEY": path.with_suffix(".key"), "STARWIRE_TLS_CA": self.folder / "ca.crt"}

    def below(self, name, extensions):
        """Returns an intermediate authority; whether its certificate lets it be one is up to `extensions`."""
        path = self.extended(name, extensions)
        made = object.__new__(Issuer)
        made.folder = self.folder / f"{name}-issued"
        made.folder.mkdir()
        for suffix in (".crt", ".key"):
            (made.folder / f"ca{suffix}").write_text(path.with_suffix(suffix).read_text())
        made.chain = path.with_suffix(".crt").read_text() + self.chain
        return made
