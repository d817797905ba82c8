"""Owns the lines in which a rank's metrics reach the storage."""

import json
import math
from collections.abc import Mapping
from typing import Any

from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.storage.record_log import RecordLog


class MetricLog(RecordLog):
    """Appends records to `runs/<run_id>/metrics/rank-00000/<attempt>-<part>.jsonl`.

    A record's metrics may be anything that `float()` takes: they are converted in the background.
    """

    def __init__(self, storage: Storage, run_id: str, rank: int, attempt: int, first_interval_s: float = 1.0) -> None:
        """Make it; nothing is written yet."""
        super().__init__(
            storage,
            f"runs/{run_id}/metrics",
            rank=rank,
            attempt=attempt,
            what="metric",
            to_line=_line,
            first_interval_s=first_interval_s,
        )


def _line(record: Mapping[str, Any]) -> str:
    metrics = {name: _json_number(float(value)) for name, value in record["metrics"].items()}
    return json.dumps({**record, "metrics": metrics}, allow_nan=False) + "\n"


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has no nan; float() reads the text back
