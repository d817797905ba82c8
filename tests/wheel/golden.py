"""What newcomers see, kept as text: a line that appears, changes, moves or goes shows in a diff.

A golden text has each line where it is printed, as often as it is printed. What a fast machine
doesn't print, and a slow one repeatedly, begins with how often at most: `3? ` for such a line at
its place, `3* ` for one at any place, which another process prints.
"""

import difflib
import re
from collections import Counter
from pathlib import Path

from tests.support.workers import ROOT

FOLDER = Path(__file__).parent / "golden"
_MARKED = re.compile(r"(?:(\d+)([?*]) )?(.*)")
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
    (r"(?<![\w.])\d[\d,]*(\.\d+|(?= (ms|s|kB|MB|%)(?!\w)))", "N"),
)


def without_what_varies(text: str, folder: Path) -> list[str]:
    """Return the lines of a text without names, places, measured numbers and empty lines."""
    lines = text.replace(str(folder), "FOLDER").replace(str(ROOT), "CHECKOUT").splitlines()
    for pattern, name in _VARIES:
        lines = [re.sub(pattern, name, line) for line in lines]
    return [line.rstrip() for line in lines if line.strip()]


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


def check(name: str, text: str, folder: Path) -> None:
    """Fail if what was printed in a folder isn't the golden text of this name."""
    golden = FOLDER / f"{name.replace(' ', '_')}.txt"
    printed = without_what_varies(text, folder)
    differs = differences(golden.read_text(encoding="utf-8").splitlines(), printed)
    assert not differs, "\n".join([f"{golden.name} differs:", *differs])
