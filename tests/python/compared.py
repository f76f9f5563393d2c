"""The same thing done over stock gRPC and over every way that starwire offers: what a test expects of ours is what stock TensorFlow does.

A scenario is a function that takes a cluster and gives plain data. `Compared.check` runs it over stock gRPC, once for all ways, and over one of ours, and compares. Nothing here
knows what the right outcome is; a scenario asserts that by itself where it is not obvious.
"""

import cluster as harness

# Whatever may travel together does, however long one of them has to wait for the other: grouping that ties what must not be tied ends in a hang.
EAGER_FUSE = {"STARWIRE_TENSOR_FUSE": "1", "STARWIRE_TENSOR_FUSE_WAIT_US": "60000000", "STARWIRE_TENSOR_FUSE_MESSAGE_US": "1000000"}
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
    """Clusters by way and shape, and what stock gRPC gave for each scenario."""

    def __init__(self, runner):
        self.runner = runner
        self._clusters = {}
        self._stock = {}

    def cluster(self, way, shape=SHAPE, replace=True):
        """One that is kept while tests of this way run; replaced if a test left it dead or busy."""
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
        """Both outcomes are equal; gives it back."""
        stock = self.stock(scenario, *args, fresh=fresh, shape=shape)
        ours = self.run(way, scenario, *args, fresh=fresh, shape=shape)
        assert ours == stock, f"{way} (left) and stock gRPC (right) differ"
        return ours

    def close(self):
        for cluster in self._clusters.values():
            cluster.close()


def outcome(function, *args, **kwargs):
    """What a call gives or raises, as plain data; of an error the type and TensorFlow's code."""
    from cluster import tf

    try:
        return "value", function(*args, **kwargs)
    except tf.errors.OpError as error:
        return type(error).__name__, error.error_code
    except (RuntimeError, TypeError, ValueError, KeyboardInterrupt) as error:
        return type(error).__name__, str(error)[:60]
