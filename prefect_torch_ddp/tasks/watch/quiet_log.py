"""What Prefect logs of our own errors: their texts and notes, without frames."""

import copy
import logging

from prefect_torch_ddp.errors import PrefectTorchDdpError


class WithoutFrames(logging.Formatter):
    """Another formatter, but without the frames of our own errors: their texts say what is wrong.

    Whoever runs the flow gets the error itself, with all of them. The notes are kept, since they
    say how to continue and where the report is.
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
        return "\n".join([self._inner.format(record), *getattr(error, "__notes__", ())])


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
