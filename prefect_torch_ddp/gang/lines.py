"""Owns the cutting of a rank's output into lines as they are finished."""

import codecs
import re
from collections import deque

MAX_LINE = 8_192
"""A line longer than this many characters is passed on in pieces, so that output without line ends can't fill memory."""
TAIL_LINES = 20


class LineCutter:
    """Turns chunks of bytes into lines; a carriage return ends a line too (progress bars)."""

    def __init__(self) -> None:
        """Start with nothing pending."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = ""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    def feed(self, chunk: bytes, *, final: bool = False) -> list[str]:
        """Return the lines that this chunk finishes; with `final` also an unfinished last one."""
        self._pending += self._decoder.decode(chunk, final)
        *lines, self._pending = re.split(r"\r\n|\r|\n", self._pending)
        while len(self._pending) > MAX_LINE:
            lines.append(self._pending[:MAX_LINE])
            self._pending = self._pending[MAX_LINE:]
        if final and self._pending:
            lines.append(self._pending)
            self._pending = ""
        lines = [line for line in lines if line.strip()]
        self.tail.extend(lines)
        return lines
