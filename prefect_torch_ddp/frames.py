"""Which frames of a rank's traceback are shown: those of the user's own code."""

import re

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)"')
_NOT_THE_USERS = re.compile(
    r"/(site|dist)-packages/|/lib/python3\.\d+/|^<frozen "
    r"|/prefect_torch_ddp/(checkpoint|data|gang|rank|storage|tasks)/\w"
)
"""Ranks may run on other machines, so the paths aren't those of this Python."""


def users_frames(traceback: str) -> str:
    """Return a formatted traceback without the frames of installed packages and of Python.

    If there are no others it is returned whole.
    """
    kept: list[str] = []
    num_frames, is_kept = 0, True
    for line in traceback.splitlines():
        if (frame := _FRAME.match(line)) is not None:
            is_kept = _NOT_THE_USERS.search(frame["file"]) is None
            num_frames += is_kept
        elif not line.startswith("    "):
            is_kept = True
        if is_kept:
            kept.append(line)
    return "\n".join(kept) if num_frames else traceback
