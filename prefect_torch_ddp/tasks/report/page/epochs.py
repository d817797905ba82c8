"""The table of epochs: all of a short training, what matters of a long one."""

import math
from collections.abc import Sequence

from prefect_torch_ddp.protocol.metric_names import Direction
from prefect_torch_ddp.results import EpochRow
from prefect_torch_ddp.tasks.report.markdown import count, number, short, table

MAX_EPOCH_ROWS = 20
"""Of more there are the first one, the best one and the last `NUM_LAST_EPOCHS`."""
NUM_LAST_EPOCHS = 10
MAX_METRIC_COLUMNS = 6


def epoch_table(rows: Sequence[EpochRow], judged: tuple[str, Direction | None] = ("", None)) -> str:
    """Lay out the epochs; of many the first, the best and the last ones. Nothing without any.

    Args:
        rows: by epoch.
        judged: the metric by which an epoch is the best, and which of its values are better.
    """
    every = list(dict.fromkeys(name for row in rows for name in row.metrics))
    if judged[0] in every[MAX_METRIC_COLUMNS:]:
        every.insert(0, every.pop(every.index(judged[0])))
    names = every[:MAX_METRIC_COLUMNS]
    top = _best_epoch(rows, *judged)
    shown = rows
    if len(rows) > MAX_EPOCH_ROWS:
        last = rows[-NUM_LAST_EPOCHS:]
        shown = [row for row in rows if row is rows[0] or row is top or row in last]
    lines = []
    for row in shown:
        values = [number(row.metrics[name]) if name in row.metrics else "" for name in names]
        number_ = f"{row.epoch} (best)" if row is top else str(row.epoch)
        samples = count(row.num_samples)
        if not row.epoch:  # steps that are of none, such as those of ctx.steps(total=...)
            number_, samples = "none", samples if row.num_samples else ""
        lines.append([number_, count(row.num_steps), samples, *values])
    header = ["epoch", "steps", "samples", *map(short, names)]
    num_left_out = len(rows) - len(lines)
    which = "the first, the best and" if top is not None else "the first and"
    left_out = f"{num_left_out} epochs are left out: here are {which} the last {NUM_LAST_EPOCHS}."
    endings = [left_out] if num_left_out else []
    if len(every) > len(names):
        endings.append(f"{len(every) - len(names)} more metrics are left out: see Metrics.")
    laid_out = table(header, lines, align="r" * len(header))
    return "\n\n".join([laid_out, *endings]) if rows else ""


def _best_epoch(rows: Sequence[EpochRow], name: str, better: Direction | None) -> EpochRow | None:
    of = [row for row in rows if math.isfinite(row.metrics.get(name, math.nan))]
    if better is None or not of:
        return None
    return (max if better == "max" else min)(of, key=lambda row: row.metrics[name])
