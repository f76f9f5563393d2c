"""Compares stock gRPC with every configuration of starwire ("way"): tests expect what stock TensorFlow does.

A scenario is a function that takes a cluster and returns plain data. `Compared.check` runs it over stock gRPC, once for all ways, and over one way, and
compares the outcomes. Nothing here knows the right outcome; a scenario asserts it where it is not obvious.
"""

import cluster as harness

# Fuse everything that may be fused, however long one tensor waits for another: fusing independent tensors wrongly then hangs.
EAGER_FUSE = {"STARWIRE_TENSOR_FUSE": "1", "STARWIRE_TENSOR_FUSE_LIMITS": "wait_us=60000000,message_us=1000000"}
WAYS = {
    "grpc": ("grpc", {}),
    "grpc++": ("grpc++", {}),
    "fused": ("grpc++", EAGER_FUSE),
    "star_server": ("star_server", {}),
    "star_server_lite": ("star_server_lite", {}),
}
OURS = [way for way in WAYS if way != "grpc"]
SHAPE = (("ps", 2), ("worker", 2))


class Compared:
    """Clusters by way and shape, and the outcome of each scenario over stock gRPC."""

    def __init__(self, runner):
        self.runner = runner
        self._clusters = {}
        self._stock = {}

    def cluster(self, way, shape=SHAPE, replace=True):
        """Returns a cluster that is kept while tests of this way run, and replaced if a test left it dead or busy."""
        for other in [other for other in self._clusters if other[0] not in (way, "grpc") and way != "grpc"]:
            self._clusters.pop(other).close()
        key = (way, shape)
        if replace and key in self._clusters and not self._clusters[key].usable():
            self._clusters.pop(key).close()
        if key not in self._clusters:
            self._clusters[key] = self.fresh(way, shape)
        return self._clusters[key]

    def fresh(self, way, shape=SHAPE, **options):
        protocol, environment = WAYS[way]
        return harness.Cluster(self.runner, protocol, dict(shape), environment={**environment, **options.pop("environment", {})}, **options)

    def stock(self, scenario, *args, fresh=False, shape=SHAPE):
        key = (scenario, args)
        if key not in self._stock:
            self._stock[key] = self.run("grpc", scenario, *args, fresh=fresh, shape=shape)
        return self._stock[key]

    def run(self, way, scenario, *args, fresh=False, shape=SHAPE):
        if not fresh:
            return scenario(self.cluster(way, shape), *args)
        with self.fresh(way, shape) as cluster:
            return scenario(cluster, *args)

    def check(self, way, scenario, *args, fresh=False, shape=SHAPE):
        """Asserts that both outcomes are equal; returns the outcome."""
        stock = self.stock(scenario, *args, fresh=fresh, shape=shape)
        ours = self.run(way, scenario, *args, fresh=fresh, shape=shape)
        assert ours == stock, f"{way} (left) and stock gRPC (right) differ"
        return ours

    def close(self):
        for cluster in self._clusters.values():
            cluster.close()


def outcome(function, *args, **kwargs):
    """Returns the result of a call, or the type and TensorFlow code of its error, as plain data."""
    from cluster import tf

    try:
        return "value", function(*args, **kwargs)
    except tf.errors.OpError as error:
        return type(error).__name__, error.error_code
    except (RuntimeError, TypeError, ValueError, KeyboardInterrupt) as error:
        return type(error).__name__, str(error)[:60]
