"""Variables of the servers under test, for `environment`."""

SECRET = "correct horse battery staple"
QUICK = {"STARWIRE_KEEPALIVE": "after_ms=1000,timeout_ms=10000"}
ONE = {"STARWIRE_PORTS": "one"}
# Tasks of one host would use unix sockets, without TLS.
TCP = {**ONE, "STARWIRE_UNIX": "off"}
