"""What the command prints if it fails: a few lines, and no frames but the user's own."""

import copy
import logging
import re
import sys

from prefect_torch_ddp.errors import PrefectTorchDdpError, RankFailedError

EXIT_REFUSED = 2
EXIT_CANCELLED = 130
"""As a shell has it after Ctrl-C."""
FRAME = re.compile(r'^  File "(?P<file>[^"]+)"')
NOT_THE_USERS = re.compile(
    r"/(site|dist)-packages/|/lib/python3\.\d+/|^<frozen "
    r"|/prefect_torch_ddp/(checkpoint|data|gang|rank|storage|tasks)/\w"
)
"""Ranks may run on other machines, so the paths aren't those of this Python."""


def is_cancel(error: BaseException) -> bool:
    """Whether it ended by Ctrl-C or Prefect's cancel."""
    prefect = sys.modules.get("prefect.exceptions")
    return isinstance(error, KeyboardInterrupt) or (
        prefect is not None and isinstance(error, prefect.CancelledRun)
    )


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
    """Another formatter, but for our own errors: `main` prints these, once."""

    def __init__(self, inner: logging.Formatter) -> None:
        """Keep what formats the records."""
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        if record.exc_info and isinstance(record.exc_info[1], PrefectTorchDdpError):
            record = copy.copy(record)
            record.exc_info = record.exc_text = None
        return self._inner.format(record)


def quiet_frames() -> None:
    """Have Prefect's log in this terminal leave out the frames of our own errors."""
    import prefect.main  # noqa: F401 - configures logging
    from prefect.logging.handlers import PrefectConsoleHandler

    for name in ("", *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            formatter = handler.formatter
            if isinstance(handler, PrefectConsoleHandler) and formatter is not None:
                handler.setFormatter(WithoutFrames(formatter))
