"""A terminal for tests: a real pseudo-terminal for a script, and what a person would see in it."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.waiting import HANG_S

ROWS = 50
PLAIN = {"CI": None, "NO_COLOR": None, "COLUMNS": None, "LINES": None, "TERM": "xterm-256color"}


class Terminal:
    """A script in its own terminal, and everything that is written there."""

    def __init__(self, process: "subprocess.Popen[bytes]", master: int) -> None:
        self.process = process
        self._master = master
        self._bytes = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 65536):
                self._bytes += data
        except OSError:  # the last process has left it
            return

    @property
    def text(self) -> str:
        """All that was written, escape codes included."""
        return bytes(self._bytes).decode(errors="replace")

    def press_ctrl_c(self) -> None:
        """Have the terminal send SIGINT to all processes in its foreground."""
        os.write(self._master, b"\x03")

    def wait(self) -> int:
        """Wait for the script's end and return its exit status."""
        status = self.process.wait(HANG_S)
        self._reader.join(HANG_S)
        return status


@contextmanager
def in_terminal(
    script: Path, *args: str, columns: int = 100, **environment: str | None
) -> Iterator[Terminal]:
    """Run a script in a terminal; None drops a variable."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    # `setsid -c` makes it the controlling terminal, so that Ctrl-C is a signal.
    process = subprocess.Popen(
        ["setsid", "-c", sys.executable, str(script), *args],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment_with({**PLAIN, **environment}),
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def environment_with(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return this process's environment with changes; None drops a variable."""
    merged = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def seen_in(text: str) -> tuple[list[str], list[str]]:
    """Return the lines that stay on the screen, and those that were erased, as a person saw them.

    It knows the few codes that the bar uses: return, erase line, up, colors.
    """
    lines, erased, row, column = [""], [], 0, 0
    for token in re.findall(r"\x1b\[\??[\d;]*[A-Za-z]|\n|\r|[^\x1b\r\n]+", text):
        if token == "\n":
            row += 1
            lines += [""] if row == len(lines) else []
        elif token == "\r":
            column = 0
        elif token.startswith("\x1b["):
            if token.endswith("K"):
                erased.append(lines[row])
                lines[row] = ""
            elif token.endswith("A"):
                row -= int(token[2:-1] or 1)
        else:
            before = lines[row].ljust(column)
            lines[row] = before[:column] + token + before[column + len(token) :]
            column += len(token)
    return lines, [line for line in erased if line.strip()]
