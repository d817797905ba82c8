"""What user code holds open at a rank's end, in a module, in a cycle, in handlers and in threads.

Runs as a script for torchrun too: `open_files.py FOLDER [END]`.
"""

import atexit
import csv
import gzip
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

NUM_LINES = 100
KINDS = (
    *("text.csv", "bytes.txt", "packed.gz", "zipped.zip", "own.txt", "cycle.txt"),
    *("exit.txt", "thread.txt"),
)
KEPT: list[Any] = []


class Report:
    """Writes what it was given when it is freed, as objects of C libraries do."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []
        self.itself: Any = None

    def add(self, line: str) -> None:
        self._lines.append(line)

    def __del__(self) -> None:
        self._path.write_text("".join(self._lines))


def keep_open(folder: str, end: str = "returns") -> None:
    """Leave everything open and return, raise or leave by sys.exit."""
    where = Path(folder)
    writer = csv.writer(text := (where / "text.csv").open("w"))
    raw = (where / "bytes.txt").open("wb")
    packed = gzip.GzipFile(where / "packed.gz", "wb")
    zipped = zipfile.ZipFile(where / "zipped.zip", "w")
    own, cycle = Report(where / "own.txt"), Report(where / "cycle.txt")
    cycle.itself = cycle
    KEPT.extend((text, raw, packed, zipped, own))
    for number in range(NUM_LINES):
        line = f"{number},0.5\n"
        writer.writerow([number, 0.5])
        raw.write(line.encode())
        packed.write(line.encode())
        own.add(line)
        cycle.add(line)
    zipped.writestr("lines", f"{line}" * NUM_LINES)
    lines = line * NUM_LINES
    atexit.register((where / "exit.txt").write_text, lines)
    threading.Thread(target=_write_at_the_end, args=(where / "thread.txt", lines)).start()
    if end == "raises":
        msg = "boom"
        raise ValueError(msg)
    if end == "leaves":
        sys.exit(3)


def _write_at_the_end(path: Path, lines: str) -> None:
    threading.main_thread().join()
    path.write_text(lines)


def lines_of(folder: Path) -> dict[str, int]:
    """Count the lines in what was left."""
    found = {}
    for path in folder.iterdir():
        if path.suffix == ".gz":
            data = gzip.decompress(path.read_bytes())
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as zipped:
                data = zipped.read("lines")
        else:
            data = path.read_bytes()
        found[path.name] = len(data.splitlines())
    return found


if __name__ == "__main__":
    keep_open(*sys.argv[1:])
