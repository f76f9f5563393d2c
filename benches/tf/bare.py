"""Runs the bare limits (bare.c): the same bytes per step over a plain socket, and memcpy."""

import json
import pathlib
import subprocess


class Bare:
    def __init__(self, folder: pathlib.Path):
        self.binary = folder / "bare"
        source = pathlib.Path(__file__).with_name("bare.c")
        subprocess.run(["cc", "-O3", "-Wall", "-o", str(self.binary), str(source)], check=True)

    def run(self, kind, count, size, seconds):
        """kind: tcp, unix, tcp+math, unix+math or memcpy."""
        command = [str(self.binary), kind, str(count), str(size), f"{seconds:.3f}"]
        out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60 + 10 * seconds)
        return json.loads(out.stdout)
