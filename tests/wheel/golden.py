"""What newcomers see, kept as text: a line that appears, changes or goes shows in a diff."""

import re
from pathlib import Path

from tests.support.workers import ROOT

FOLDER = Path(__file__).parent / "golden"
MAYBE = "? "
"""Begins a line that isn't printed each time: a fast machine shows no progress between."""

_VARIES = (
    (r"\x1b\[[0-9;]*m", ""),
    (r"^\d\d:\d\d:\d\d\.\d{3} \| ", ""),
    (r"https?://(127\.0\.0\.1|localhost):\d+", "SERVER"),
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID"),
    (r"(Flow run|Task run) '[\w-]+'", r"\1 NAME"),
    (r"flow run '[\w-]+'", "flow run NAME"),
    (r"\b[a-z]+(-[a-z]+)*-[0-9a-f]{12}\b", "RUN"),
    (r"\b(published the report of|resume) [a-z]+-[a-z]+\b", r"\1 RUN"),
    (r"(?<!\.)\b[0-9a-f]{16}\b", "DATASET"),
    (r"- (prepare|train|evaluate): .*", r"- \1: PROGRESS"),
    (r"(?<![\w.])\d[\d,]*(\.\d+)?\b", "N"),
    (r"\s+", " "),
)


def without_what_varies(text: str, folder: Path) -> list[str]:
    """Return the lines of a text, sorted, each once, without names, numbers and
    places."""
    lines = set()
    for line in text.replace(str(folder), "FOLDER").replace(str(ROOT), "CHECKOUT").splitlines():
        for pattern, name in _VARIES:
            line = re.sub(pattern, name, line)  # noqa: PLW2901 - one after the other
        lines.add(line.strip())
    return sorted(lines - {""})


def differences(name: str, text: str, folder: Path) -> list[str]:
    """Return the lines that the golden text lacks or has in vain, as a diff shows them.

    Args:
        name: of the golden text.
        text: what was printed.
        folder: where it was printed.
    """
    golden = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    maybe = {line.removeprefix(MAYBE) for line in golden if line.startswith(MAYBE)}
    always = {line for line in golden if not line.startswith(MAYBE)}
    printed = set(without_what_varies(text, folder))
    added = [f"+ {line}" for line in sorted(printed - always - maybe)]
    return added + [f"- {line}" for line in sorted(always - printed)]
