"""What a command printed, compared line by line and in order with a golden text."""

import re
from difflib import unified_diff
from pathlib import Path

from tests.support.workers import ROOT

# Said once in a while, for as long as it takes: a fast machine shows none of it.
_BY_THE_CLOCK = re.compile(r" \| INFO +\| Flow run '[\w-]+' - (prepare|train|evaluate): ")
_MARKS = re.compile(r" +[\^~]+")
"""Below a line of code: each version of Python sets them in its own way."""
# Ranks that fail at the same time are told as one, or one of them and maybe the other after it.
_CONSEQUENCES = re.compile(r"\n\nas a consequence:(\n  .*)+")
_OF_RANKS = "[RANKS] "
_VARIES = (
    (r"^\d\d:\d\d:\d\d\.\d{3} \| (\w+) +\|", r"\1 |"),
    (r"https?://(127\.0\.0\.1|localhost):\d+", "SERVER"),
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID"),
    (r"\b[a-z]+(-[a-z]+)*-[0-9a-f]{12}\b", "RUN"),
    (r"(Flow run|Task run) '(\w+-[0-9a-f]{3}|[a-z-]+)'", r"\1 NAME"),
    (r"flow run '[\w-]+'", "flow run NAME"),
    (r"\b[0-9a-f]{16}\b", "DATASET"),
    (r"\d+\.\d+ [kM]B\b", "SIZE"),
    (r"\b\d+ ms\b", "N ms"),
    (r"\bfor \d+ s\b", "for N s"),
    (r"\branks? \d(, \d)* on (\S+) failed in", r"RANKS on \2 failed in"),
    (r"/rank-\d+/", "/rank-N/"),
    (r"on stderr of rank \d", "on stderr of rank N"),
    (r"\[ranks? \d(, \d)*\] (?!is at)", _OF_RANKS),
    # Of others, which differ between versions.
    (r'"[^"]*/site-packages/([^"]+)", line \d+', r'"SITE/\1", line N'),
)


def without_what_varies(text: str, folder: Path) -> list[str]:
    """Return the lines of a text, in order, without names, numbers and places.

    Args:
        text: what was printed.
        folder: where it was printed.
    """
    plain = _CONSEQUENCES.sub("", text)
    lines: list[str] = []
    for line in plain.replace(str(folder), "FOLDER").replace(str(ROOT), "CHECKOUT").splitlines():
        if _BY_THE_CLOCK.search(line) or _MARKS.fullmatch(line):
            continue
        for pattern, name in _VARIES:
            line = re.sub(pattern, name, line)  # noqa: PLW2901 - one after the other
        if line not in _newest_of_ranks(lines):
            lines.append(line.rstrip())
    return lines


def _newest_of_ranks(lines: list[str]) -> list[str]:
    """Return the last lines if they are of ranks: an equal one of another rank may follow."""
    others = [at for at, line in enumerate(lines, 1) if _OF_RANKS not in line]
    return lines[max(others, default=0) :]


def differences(golden: Path, text: str, folder: Path) -> str:
    """Return how a text differs from the golden one, as a diff; empty if it doesn't.

    Args:
        golden: file with the lines that are printed, as `without_what_varies` returns them.
        text: what was printed.
        folder: where it was printed.
    """
    printed = without_what_varies(text, folder)
    expected = golden.read_text(encoding="utf-8").splitlines()
    return "\n".join(unified_diff(expected, printed, golden.name, "printed", lineterm=""))
