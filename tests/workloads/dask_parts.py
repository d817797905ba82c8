"""What Dask workers compute in tests, so it loads no torch."""

import os
import signal
from pathlib import Path

import numpy as np
import pandas as pd

NUM_ROWS = 100
META = {"number": "int64", "half": "float32", "kind": "object"}


def part(number: int, dies_in: str | None = None) -> pd.DataFrame:
    """Return a partition; the first worker that computes number 3 dies of it. Number 2 is empty."""
    if dies_in is not None and number == 3:
        mark = Path(dies_in) / "died"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    numbers = np.arange(NUM_ROWS * number, NUM_ROWS * (number + (number != 2)))
    kinds = np.array(["even", "odd"], dtype=object)[numbers % 2]
    half = (numbers / 2).astype("float32")
    return pd.DataFrame({"number": numbers, "half": half, "kind": kinds})


def failing_part(number: int) -> pd.DataFrame:
    """Fail in one partition."""
    if number == 1:
        msg = "partition 1 can't be cleaned"
        raise ValueError(msg)
    return part(number)
