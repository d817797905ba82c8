"""What is printed of our own errors: a few lines, and no frames but the user's own."""

import copy
import logging
import re

from prefect_torch_ddp.errors import PrefectTorchDdpError, RankFailedError

FRAME = re.compile(r'^  File "(?P<file>[^"]+)"')
NOT_THE_USERS = re.compile(
    r"/(site|dist)-packages/|/lib/python3\.\d+/|^<frozen "
    r"|/prefect_torch_ddp/(checkpoint|data|gang|rank|storage|tasks)/\w"
)
"""Ranks may run on other machines, so the paths aren't those of this Python."""


def in_few_lines(error: PrefectTorchDdpError) -> str:
    """Return an error's text; of a rank's traceback only the frames of the user's own code."""
    text = str(error)
    if isinstance(error, RankFailedError) and error.traceback_text:
        whole = error.traceback_text.rstrip()
        text = text.replace(whole, users_frames(whole))
    return text


def users_frames(traceback: str) -> str:
    """Return a formatted traceback without the frames of installed packages and of Python.

    If there are no others it is returned whole.
    """
    kept: list[str] = []
    num_frames, is_kept = 0, True
    for line in traceback.splitlines():
        if (frame := FRAME.match(line)) is not None:
            is_kept = NOT_THE_USERS.search(frame["file"]) is None
            num_frames += is_kept
        elif not line.startswith("    "):
            is_kept = True
        if is_kept:
            kept.append(line)
    return "\n".join(kept) if num_frames else traceback


class WithoutFrames(logging.Formatter):
    """Another formatter, but without the frames of our own errors: their texts say what is wrong.

    Whoever runs the flow gets the error itself, with all of them.
    """

    def __init__(self, inner: logging.Formatter) -> None:
        """Keep what formats the records."""
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        error = record.exc_info[1] if record.exc_info else None
        if record.levelno <= logging.DEBUG or not isinstance(error, PrefectTorchDdpError):
            return self._inner.format(record)
        record = copy.copy(record)
        record.exc_info = record.exc_text = None
        return self._inner.format(record).replace(str(error), in_few_lines(error))


def quiet_frames() -> None:
    """Have Prefect's log, in this terminal and in the UI, leave out the frames of our own errors.

    A deployed run's error has no frames when its flow raises it, but Prefect's engine adds its own
    and logs them: "Engine execution exited with unexpected exception".
    """
    import prefect.main  # noqa: F401, PLC0415 - configures logging
    from prefect.logging.handlers import (  # noqa: PLC0415 - the same
        APILogHandler,
        PrefectConsoleHandler,
    )

    for name in ("", *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            formatter = handler.formatter or logging.Formatter()  # what a handler without one uses
            is_ours = isinstance(formatter, WithoutFrames)
            if isinstance(handler, (PrefectConsoleHandler, APILogHandler)) and not is_ours:
                handler.setFormatter(WithoutFrames(formatter))
