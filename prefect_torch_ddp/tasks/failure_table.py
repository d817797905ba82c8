"""Owns the table of a run's failed attempts. Pure."""

from collections.abc import Sequence

from prefect_torch_ddp.results import FailedAttempt
from prefect_torch_ddp.tasks.markdown import count, table, text

MAX_ROWS = 50


def failure_section(failures: Sequence[FailedAttempt]) -> list[str]:
    """Lay out the attempts that failed under a heading, the newest ones where there are many; nothing where none failed."""
    if not failures:
        return []
    lines = [
        [str(one.attempt), str(one.world_size or ""), "" if one.step is None else count(one.step), text(one.summary)]
        for one in failures[-MAX_ROWS:]
    ]
    return ["## Failed attempts", table(["attempt", "ranks", "step", "failure"], lines, align="rrrl")]
