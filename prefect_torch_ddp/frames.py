"""Which frames of a traceback are shown: those of the user's own code."""

import re
import sys
from pathlib import Path
from traceback import StackSummary, TracebackException
from types import TracebackType

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)"')
_OURS = re.compile(
    r"/prefect_torch_ddp/"
    r"(checkpoint|cli|data|doctor|gang|integrations|protocol|rank|records|storage|tasks|tracking)/"
)
_NOT_THE_USERS = re.compile(rf"/(site|dist)-packages/|/lib/python3\.\d+/|^<frozen |{_OURS.pattern}")
_BASE = re.compile(rf"/lib/python3\.\d+/(?!site-packages)|<frozen |{_OURS.pattern}")
"""Ranks may run on other machines, so the paths aren't those of this Python."""
_OUR_ERROR = re.compile(r"^prefect_torch_ddp\.[\w.]+: (?!.*^Traceback )", re.MULTILINE | re.DOTALL)
"""The last of a chain of errors, if it is of this package."""
_SHORTENED: set[type[BaseException]] = set()


def users_frames(traceback: str) -> str:
    """Return a formatted traceback without the frames of installed packages and of Python.

    If there are no others it is returned whole. It is empty if all are of this package and of
    Python, or if the error is of this package: then its text says what to do.
    """
    kept: list[str] = []
    is_kept = is_base = True
    num_frames = 0
    for line in traceback.splitlines():
        if (frame := _FRAME.match(line)) is not None:
            is_kept = _NOT_THE_USERS.search(frame["file"]) is None
            is_base &= _BASE.search(frame["file"]) is not None
            num_frames += is_kept
        elif not line.startswith("    "):
            is_kept = True
        if is_kept:
            kept.append(line)
    if num_frames:
        return "\n".join(kept)
    return "" if is_base or _OUR_ERROR.search(traceback) else traceback


def innermost_frame(traceback: str) -> str:
    """Return the last frame of a formatted traceback, with its line of code; empty if none is."""
    lines = traceback.splitlines()
    last = max((at for at, line in enumerate(lines) if _FRAME.match(line)), default=len(lines))
    code = [line for line in lines[last + 1 : last + 2] if line.startswith("    ")]
    return "\n".join([*lines[last : last + 1], *code])


def users_stacks(stacks: str) -> str:
    """Return a rank's stacks without threads of this package or of Python only.

    The main thread, which comes last, stays. Calls of this package that led to it are left out.

    Args:
        stacks: as `faulthandler` writes them, the innermost call first.
    """
    *others, main = stacks.rstrip().split("\n\n")
    kept = [each for each in others if not all(map(_is_base, each.splitlines()[1:]))]
    return "\n\n".join(map(_without_base, [*kept, main]))


def _is_base(frame: str) -> bool:
    return _BASE.search(frame) is not None or "(most recent call first)" in frame


def _without_base(stack: str) -> str:
    head, *frames = stack.splitlines()
    kept = len(frames)
    while kept and re.search(rf"<frozen |{_OURS.pattern}", frames[kept - 1]):
        kept -= 1
    return "\n".join([head, *(frames[:kept] or frames)])


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
