"""The exit codes of a command that fails."""

import sys

EXIT_REFUSED = 2
EXIT_CANCELLED = 130
"""What a shell reports after Ctrl-C."""
CTRL_C = "cancelled by Ctrl-C (SIGINT)"


def cancel_in_words(error: BaseException) -> str:
    """Return how Ctrl-C or a cancel by Prefect ended the command; empty if neither did."""
    if isinstance(error, SystemExit):
        # typer makes this of a Ctrl-C that comes before, or after, the flow's own code.
        return CTRL_C if error.code == EXIT_CANCELLED else ""
    if isinstance(error, KeyboardInterrupt):
        return CTRL_C
    prefect = sys.modules.get("prefect.exceptions")
    if prefect is not None and isinstance(error, prefect.CancelledRun):
        return str(error) or "cancelled"
    return ""
