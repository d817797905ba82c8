"""The digits as a workload that notes when each step was done; see bench_job."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.examples import digits
from prefect_torch_ddp.examples.digits import evaluate, prepare

__all__ = ["evaluate", "prepare", "train"]


def train(ctx: RankContext) -> None:
    """Train as the digits do; rank 0 writes the time after each step, with its validation, to the
    file of the option `times`."""
    options, steps, times = dict(ctx.options), ctx.steps, list[float]()
    place, ctx.options = Path(options.pop("times")), options

    def noted(loader: Any, *, epochs: int) -> Iterator[Any]:
        times.append(time.time())
        for batch in steps(loader, epochs=epochs):
            yield batch
            times.append(time.time())

    ctx.steps = noted  # type: ignore[method-assign,assignment]
    digits.train(ctx)
    if ctx.rank == 0:
        place.write_text(json.dumps(times))
