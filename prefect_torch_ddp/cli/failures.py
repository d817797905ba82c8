"""How the command ends if it fails."""

import sys

EXIT_REFUSED = 2
EXIT_CANCELLED = 130
"""As a shell has it after Ctrl-C."""


def is_cancel(error: BaseException) -> bool:
    """Whether it ended by Ctrl-C or Prefect's cancel."""
    prefect = sys.modules.get("prefect.exceptions")
    return isinstance(error, KeyboardInterrupt) or (
        prefect is not None and isinstance(error, prefect.CancelledRun)
    )
