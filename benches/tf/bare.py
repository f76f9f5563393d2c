"""Runs the bare limits (bare.c): the same bytes per step over a plain socket, and memcpy."""

import functools
import json
import pathlib
import subprocess


def compiled(source: pathlib.Path, folder: pathlib.Path):
    """Compiles a C program of one file; → its path."""
    binary = folder / source.stem
    subprocess.run(["cc", "-O3", "-Wall", "-o", str(binary), str(source)], check=True)
    return binary


class Bare:
    def __init__(self, folder: pathlib.Path):
        self.binary = compiled(pathlib.Path(__file__).with_name("bare.c"), folder)

    def limits(self, case, warm):
        """What bounds a case: {kind: function of the seconds}. `warm`: a turn of every column, not needed here."""
        if not case.bare:
            return {}
        count, size, kinds = case.bare
        return {kind: functools.partial(self.run, kind, count, size) for kind in kinds}

    def run(self, kind, count, size, seconds, *more):
        """kind: tcp, unix, tcp+math, unix+math or memcpy; wire and wire+overlap take more (see bare.c)."""
        command = [str(self.binary), kind, str(count), str(size), f"{seconds:.3f}", *map(str, more)]
        out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60 + 10 * seconds)
        return json.loads(out.stdout)
