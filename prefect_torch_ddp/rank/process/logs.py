"""Logging in a rank: its records go to the run's log with their level, its prints line by line.

In a function's rank the root logger sends what it gets, from INFO up. In a script's the root
logger is the script's own, as under torchrun; only warnings that nobody handles are sent.
"""

import functools
import logging
import logging.config
import sys
from typing import Any

from prefect_torch_ddp.protocol.events import NO_RANK, LogLine
from prefect_torch_ddp.rank.link import AgentLink

OURS = "prefect_torch_ddp"


class _LinkHandler(logging.Handler):
    def __init__(self, link: AgentLink, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            self._link.send(LogLine(NO_RANK, record.levelno, text, record.name))
        except Exception:  # noqa: BLE001 - logging must never fail the training
            self.handleError(record)


class _Enabled(logging.Logger):
    """A logger of this package, which no configuration of the user's silences by default."""

    @property
    def disabled(self) -> bool:
        return False

    @disabled.setter
    def disabled(self, value: bool) -> None:
        pass  # dictConfig and fileConfig disable all loggers that they don't name


def show_output(link: AgentLink) -> None:
    """Send prints at each line's end, and this package's records with their level."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        # Not reconfigured: the environment may want another encoding than the agent reads, and a
        # forked rank's streams were made for other files, which may have had positions.
        stream = open(fd, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    # Handlers of its own: the user may configure the root logger.
    ours = logging.getLogger(OURS)
    ours.setLevel(logging.INFO)
    ours.handlers[:] = [_LinkHandler(link)]
    ours.propagate = False
    handlers = [_LinkHandler(link)]
    # Libraries loaded by the fork server may have configured logging.
    logging.basicConfig(level=logging.INFO, handlers=handlers, format="%(message)s", force=True)
    logging.lastResort = _LinkHandler(link, logging.WARNING)
    logging.config.dictConfig = _without_prefects_root
    keep_ours_enabled()


def leave_root_to_script() -> None:
    """Make the root logger what it is in a fresh Python: the script's own."""
    root = logging.getLogger()
    root.handlers.clear()
    root.setLevel(logging.WARNING)
    logging.config.dictConfig = _dict_config


def keep_ours_enabled() -> None:
    """Have this package's loggers stay enabled, whatever the user configures.

    Those there are, and those of modules that are imported later.
    """
    manager: Any = logging.Logger.manager
    for name, logger in list(manager.loggerDict.items()):
        if _is_ours(name) and type(logger) is logging.Logger:
            logger.__class__ = _Enabled
    made_by = manager.loggerClass
    manager.loggerClass = lambda name: (
        _Enabled(name) if _is_ours(name) else (made_by or logging.getLoggerClass())(name)
    )


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == OURS


_dict_config = logging.config.dictConfig


@functools.wraps(_dict_config)
def _without_prefects_root(config: Any) -> None:
    """Keep Prefect, which configures logging on import, from replacing our root handler."""
    if "prefect.flow_runs" in config.get("loggers", {}):
        config = {name: part for name, part in config.items() if name != "root"}
    _dict_config(config)
