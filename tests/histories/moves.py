"""A job that counts on two servers, the first of which has two places, and moves from one to the other."""

import subprocess

import cluster
import counting
import proxy


class Moves:
    """The workers find server 0 through a link, which is told where it is."""

    def __init__(self, runner, network, folder, workers=1):
        self.folder = folder
        settings = {**counting.environment(folder / "0", "sync"), "STARWIRE_UNIX": "off", "STARWIRE_KEEPALIVE": "after_ms=500,timeout_ms=1000"}
        self.cluster = cluster.Cluster(runner, "star_server", {"ps": 2, "worker": workers}, environment=settings, start=False)
        self.places = [self.cluster.spec["ps"][0], f"127.0.0.1:{cluster.free_port()}"]
        self.at, self.known = 0, proxy.Link(network, self.places[0])
        # From the new process to the old one.
        self.between = [proxy.Link(network, place) for place in self.places]
        self.settings = {}  # of the owner of server 0
        known = {**self.cluster.spec, "ps": [self.known.address, self.cluster.spec["ps"][1]]}
        tasks = [self.begin(0), self.cluster.begin_start("ps", 1)]
        tasks += [self.cluster.begin_start("worker", number, spec=known) for number in range(workers)]
        for task in tasks:
            task.result(cluster.START_TIMEOUT)
        self.owner = tasks[0]

    def begin(self, place, **settings):
        spec = {**self.cluster.spec, "ps": [self.places[place], self.cluster.spec["ps"][1]]}
        return self.cluster.begin_start("ps", 0, spec=spec, STARWIRE_STATE=str(self.folder / str(place)), **settings)

    def begin_again(self, **more):
        """Another process, at the place where the state is."""
        self.owner = self.begin(self.at, **self.settings, **more)

    def is_marked(self, place, mark):
        return (self.folder / str(place) / "ps-0" / mark).exists()

    def _settings_there(self):
        return {"STARWIRE_STATE_FROM": f"move={self.between[self.at].address}"}

    def begin_move(self, **more):
        """A process at the other place, which takes over."""
        return self.begin(1 - self.at, **self._settings_there(), **more)

    def end_move(self, new):
        """Starts again whoever is dead, until the new process has the state."""
        there = 1 - self.at
        is_old_dead, is_new_dead, has_moved = self.owner.poll() is not None, new.poll() is not None, self.is_marked(self.at, "moved")
        if is_old_dead and not has_moved:
            # It still has the state.
            self.begin_again()
            self.owner.result(cluster.START_TIMEOUT)
        if is_new_dead:
            new = self.begin_move()
        if is_old_dead and has_moved and self.is_marked(there, "copy"):
            # Its answer was lost: only whoever sees both can say so.
            subprocess.run([counting.STARCTL, "state", "promote", self.folder / str(there) / "ps-0"], check=True, capture_output=True)
        new.result(60)
        assert self.is_marked(self.at, "moved") and not self.is_marked(there, "copy")
        self.known.target = self.places[there]
        self.owner.kill()
        self.owner, self.settings, self.at = new, self._settings_there(), there

    def close(self):
        self.cluster.close()
