"""Owns the lines in which a rank's metrics reach the storage."""

import json
import math
from collections.abc import Mapping
from typing import Any

from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.storage.record_log import RecordLog

_encode = json.JSONEncoder(allow_nan=False).encode  # made once: json.dumps would make one for each record


class MetricLog(RecordLog):
    """Appends records to `runs/<run_id>/metrics/rank-00000/<attempt>-<part>.jsonl`.

    A record's metrics may be anything that `float()` takes. One that says by `is_ready()` that it isn't yet is waited for in the
    background.
    """

    def __init__(self, storage: Storage, run_id: str, rank: int, attempt: int, **options: Any) -> None:
        """Make it; nothing is written yet. See RecordLog for the options: first_interval_s and copies."""
        super().__init__(
            storage,
            f"runs/{run_id}/metrics",
            rank=rank,
            attempt=attempt,
            what="metric",
            to_line=_line,
            is_ready=_is_ready,
            **options,
        )


def _is_ready(record: Mapping[str, Any]) -> bool:
    return all(isinstance(value, float) or getattr(value, "is_ready", lambda: True)() for value in record["metrics"].values())


def _line(record: Mapping[str, Any]) -> str:
    metrics = {name: _json_number(float(value)) for name, value in record["metrics"].items()}
    return _encode({**record, "metrics": metrics}) + "\n"


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has no nan; float() reads the text back
