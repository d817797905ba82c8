"""What a command printed, compared with a golden text: a line that appears, changes, moves or goes
shows in a diff.

A golden text has each line where it is printed, as often as it is printed. What a fast machine
doesn't print, and a slow one repeatedly, begins with how often at most: `3? ` for such a line at
its place, `3* ` for one at any place, which another process prints.
"""

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.support.workers import ROOT

_MARKED = re.compile(r"(?:(\d+)([?*]) )?(.*)")
_OF_A_LOADED_MACHINE = re.compile(
    r" - (Still processing items|Event loop was unresponsive|full garbage collections took)"
)
_VARIES = (
    (r"\x1b\[[0-9;]*m", ""),
    (r"^\d\d:\d\d:\d\d\.\d{3} \| ", ""),
    (r"https?://(127\.0\.0\.1|localhost):\d+", "SERVER"),
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID"),
    (r"([Ff]low run) '[\w-]+'", r"\1 'NAME'"),
    (r"(Task run '\w+)-[0-9a-f]{3}'", r"\1'"),
    (r"\b[a-z]+(-[a-z]+)*-[0-9a-f]{12}\b", "RUN"),
    (r"\b(published the report of|resume) [a-z]+-[a-z]+\b", r"\1 RUN"),
    (r"(?<!\.)\b[0-9a-f]{16}\b", "DATASET"),
    (r"- (prepare|train|evaluate): .*", r"- \1: PROGRESS"),
    (r"- (\[rank 0\] checkpoint at step) \d+", r"- \1 N"),
    (r"(?<![\w.])\d[\d,]*(\.\d+(?!\.\d)|(?= (ms|s|kB|MB|%)(?!\w)))", "N"),
)


def without_what_varies(text: str, folder: Path) -> list[str]:
    """Return the lines of a text without names, places, measured numbers and empty lines."""
    lines = text.replace(str(folder), "FOLDER").replace(str(ROOT), "CHECKOUT").splitlines()
    for pattern, name in _VARIES:
        lines = [re.sub(pattern, name, line) for line in lines]
    told = [line for line in lines if not _OF_A_LOADED_MACHINE.search(line)]
    return [line.rstrip() for line in told if line.strip()]


def differences(golden: list[str], printed: list[str]) -> list[str]:
    """Return in what a text differs from the golden one, as a diff shows it.

    Args:
        golden: lines, some of them marked.
        printed: lines, without what varies.
    """
    marked = [found.groups() for found in map(_MARKED.fullmatch, golden) if found]
    anywhere = Counter({line: int(most) for most, mark, line in marked if mark == "*"})
    here = []
    for line in printed:
        anywhere[line] -= 1
        here += [line] if anywhere[line] < 0 else []
    spare = Counter(here)
    spare.subtract(line for most, _, line in marked if not most)
    expected = []
    for most, mark, line in marked:
        times = min(int(most), max(spare[line], 0)) if mark == "?" else int(not mark)
        expected += times * [line]
        spare[line] -= times if mark else 0
    return list(difflib.unified_diff(expected, here, "golden", "printed", lineterm="", n=2))


def compared(golden: Path, text: str, folder: Path, maybe: Sequence[str] = ()) -> str:
    """Return how what was printed in a folder differs from a golden text; empty if it doesn't.

    Args:
        golden: the file.
        text: what was printed.
        folder: where.
        maybe: further marked lines.
    """
    lines = [*golden.read_text(encoding="utf-8").splitlines(), *maybe]
    differs = differences(lines, without_what_varies(text, folder))
    return "\n".join([f"{golden.name} differs:", *differs] if differs else [])
