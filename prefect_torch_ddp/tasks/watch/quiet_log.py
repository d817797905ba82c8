"""What Prefect logs of our own errors: their texts and notes, without frames."""

import copy
import logging
import re

from prefect_torch_ddp.errors import PrefectTorchDdpError
from prefect_torch_ddp.frames import shorten_uncaught

_IS_LONG = (
    r"(?=.*\\n.*Traceback \(most recent call last\)"
    r"|\w+ run encountered an exception:? (?:RankFailedError|GangHungError): )"
)
_STATE = re.compile(rf"""(Finished in state \w+\((['"]){_IS_LONG}.*?)\\n.*""")
"""Prefect logs a failed run's state by its repr: 20 lines in one, with escaped ends of lines."""


class WithoutFrames(logging.Formatter):
    """Another formatter, but without the frames of our own errors: their texts say what is wrong.

    Whoever runs the flow gets the error itself, with all of them. The notes are kept, since they
    say how to continue and where the report is. Of a state with a traceback, or with an error of a
    gang, only the first line is logged: the run's page and state, and the error, have all of it.
    """

    def __init__(self, inner: logging.Formatter) -> None:
        """Keep what formats the records."""
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        if record.levelno <= logging.DEBUG:
            return self._inner.format(record)
        if isinstance(record.msg, str) and (state := _STATE.fullmatch(record.msg)) is not None:
            record = copy.copy(record)
            record.msg = f"{state[1]}{state[2]})"
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, PrefectTorchDdpError):
            return self._inner.format(record)
        record = copy.copy(record)
        record.exc_info = record.exc_text = None
        return "\n".join([self._inner.format(record), *getattr(error, "__notes__", ())])


def quiet_frames() -> None:
    """Have Prefect's log, in this terminal and in the UI, leave out the frames of our own errors.

    Prefect's engine logs them, of a deployed run too: "Engine execution exited with unexpected
    exception". Nor does Python show those of a cancel when a script ends by one.
    """
    import prefect.main  # noqa: F401, PLC0415 - configures logging
    from prefect.exceptions import CancelledRun  # noqa: PLC0415 - takes a second with the others
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
    shorten_uncaught(CancelledRun)
