"""What Dask logs in the process that starts a run's cluster: its warnings."""

import asyncio
import logging

import dask


def quiet_dask() -> None:
    """Have Dask log only warnings, unless the user set a level; else 35 to 70 lines of each run.

    Nor what a scheduler cancels as it closes. When a batch system's jobs end with the cluster,
    their workers ask it to retire them, and it would log a traceback for each.
    """
    logging.getLogger("distributed").setLevel(log_level().upper())
    logging.getLogger("distributed.scheduler").addFilter(_is_no_cancel)


def log_level() -> str:
    """Return the level that the user set for Dask; else `warning`."""
    return str(dask.config.get("logging.distributed", "warning"))


def _is_no_cancel(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
