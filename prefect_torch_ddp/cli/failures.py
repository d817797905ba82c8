"""The exit codes of a command that fails."""

import sys

EXIT_REFUSED = 2
EXIT_CANCELLED = 130
"""What a shell reports after Ctrl-C."""


def is_cancel(error: BaseException) -> bool:
    """Whether the error is Ctrl-C or a cancel by Prefect."""
    prefect = sys.modules.get("prefect.exceptions")
    return isinstance(error, KeyboardInterrupt) or (
        prefect is not None and isinstance(error, prefect.CancelledRun)
    )
