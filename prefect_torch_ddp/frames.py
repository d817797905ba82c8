"""Which frames of a traceback are shown: those of the user's own code."""

import re
import sys
from pathlib import Path
from traceback import StackSummary, TracebackException
from types import TracebackType

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)"')
_NOT_THE_USERS = re.compile(
    r"/(site|dist)-packages/|/lib/python3\.\d+/|^<frozen "
    r"|/prefect_torch_ddp/(checkpoint|data|gang|rank|storage|tasks)/\w"
)
"""Ranks may run on other machines, so the paths aren't those of this Python."""
_SHORTENED: set[type[BaseException]] = set()


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


def users_traceback(error: BaseException) -> str:
    """Format an error of this process as Python does, with its notes, but only the user's frames.

    Causes without such frames are left out: the error's text says what they were.
    """
    return "".join(_users_part(TracebackException.from_exception(error)).format())


def _users_part(shown: TracebackException) -> TracebackException:
    shown.stack = StackSummary.from_list([each for each in shown.stack if _is_users(each.filename)])
    for name in ("__cause__", "__context__"):
        before: TracebackException | None = getattr(shown, name)
        if before is not None and not _users_part(before).stack:
            setattr(shown, name, None)
    return shown


def _is_users(file: str) -> bool:
    return _NOT_THE_USERS.search(file) is None and Path(file).parent != Path(__file__).parent


def shorten_uncaught(kind: type[BaseException]) -> None:
    """Have Python end by an uncaught error of this kind with `users_traceback`.

    Prefect, Dask and this package would add 30 to 70 lines. The error itself keeps all frames, for
    whoever catches it. A hook that somebody else has set, such as rich's, is left alone.
    """
    _SHORTENED.add(kind)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_uncaught


def _print_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if isinstance(error, tuple(_SHORTENED)):
        sys.stderr.write(users_traceback(error))
    else:
        sys.__excepthook__(kind, error, traceback)
