"""Settings in Dask's configuration: files, environment variables or `dask.config.set`."""

import functools
import logging

import dask.config

logger = logging.getLogger(__name__)


def seconds_setting(name: str, default_s: float) -> float:
    """Return a setting, or the default, with a warning, where that is no positive number."""
    value = dask.config.get(name, default=default_s)
    try:
        if (seconds := float(value)) > 0:
            return seconds
    except (TypeError, ValueError):
        pass
    _warn_once(name, repr(value), default_s)
    return default_s


@functools.cache
def _warn_once(name: str, value: str, default_s: float) -> None:
    text = "%s is %s and must be a positive number of seconds; using %g"
    logger.warning(text, name, value, default_s)
