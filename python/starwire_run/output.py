"""The tasks' output on one terminal."""

import errno
import os
import select
import sys
import time

# Readable on dark and light backgrounds.
_COLORS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_LONGEST_LINE = 1 << 16
_CLEAR_LINE = b"\r\x1b[K"
# For so long a run that stops waits for a reader.
_PATIENCE = 1


class Printer:
    """Prefixes each line with its task's name. On a terminal, the last line shows the progress."""

    def __init__(self, names, color, quiet):
        self.stream = sys.stdout.buffer
        os.set_blocking(self.stream.fileno(), True)  # a reader that is slow has not gone
        self.is_stopping = lambda: False
        self.patience = _PATIENCE
        terminal = self.stream.isatty()
        self.colored = color == "always" or (color == "auto" and terminal and not os.environ.get("NO_COLOR"))
        self.live = terminal and os.environ.get("TERM") != "dumb"
        self.quiet = quiet
        width = max([len(name) for name in names] + [len("starwire")])
        self.prefixes = {name: self._paint(f"{name:<{width}} |", _COLORS[i % len(_COLORS)]) + b" " for i, name in enumerate(names)}
        self.own = f"{'starwire':<{width}} | ".encode()
        self.partial = {name: b"" for name in names}
        self.shown = b""

    def output(self, name, data):
        """Some bytes that a task wrote."""
        if self.quiet:
            return
        lines = (self.partial[name] + data).split(b"\n")
        self.partial[name] = lines.pop()
        if len(self.partial[name]) > _LONGEST_LINE:
            lines.append(self.partial[name])
            self.partial[name] = b""
        self._write([self._line(name, line) for line in lines])

    def end_of_output(self, name):
        rest, self.partial[name] = self.partial[name], b""
        if rest:
            self._write([self._line(name, rest)])

    def say(self, text, bad=False):
        """A message of the launcher."""
        self._write([self._paint(self.own.decode() + text, 31 if bad else 1) + b"\n"])

    def progress(self, text):
        if self.live:
            width = self._columns()
            line = self._paint(text[: max(width - 1, 1)], 2)
            if line != self.shown:
                self._write([], progress=line)

    def close(self):
        if self.shown:
            self._write([], progress=b"")

    def _line(self, name, line):
        # Progress bars overwrite themselves; only their last state matters.
        line = line.rstrip(b"\r")
        line = line[line.rfind(b"\r") + 1 :]
        reset = b"\x1b[0m" if self.colored and b"\x1b[" in line else b""
        return self.prefixes[name] + line + reset + b"\n"

    def _write(self, lines, progress=None):
        if progress is None:
            progress = self.shown
        data = memoryview((_CLEAR_LINE if self.shown else b"") + b"".join(lines) + progress)
        self.shown = progress
        try:
            # So much fits into a pipe that has room.
            while data and self._has_room():
                data = data[os.write(self.stream.fileno(), data[: select.PIPE_BUF]) :]
        except OSError as error:
            # The run goes on, and the logs have everything. A disk that is full may have room again.
            if error.errno not in (errno.EPIPE, errno.EIO):
                return
            # `| head` has seen enough, or the terminal has gone. Nothing else that Python writes there may fail at exit.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
            self.live, self.shown = False, b""

    def _has_room(self):
        """Waits for the reader. One that does not read keeps no run from stopping."""
        begun = None
        while not select.select([], [self.stream], [], 0 if self.is_stopping() else 0.1)[1]:
            if self.is_stopping():
                begun = begun or time.monotonic()
                if time.monotonic() >= begun + self.patience:
                    self.patience = 0
                    return False
                time.sleep(0.01)
        self.patience = _PATIENCE
        return True

    def _paint(self, text, code):
        return f"\x1b[{code}m{text}\x1b[0m".encode() if self.colored else text.encode()

    def _columns(self):
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80
