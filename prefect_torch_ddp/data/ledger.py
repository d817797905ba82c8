"""Owns the ledger of a run: the record of which samples each rank trained on in each step, and how it is read back."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect_torch_ddp.data.ledger_check import EndLine, LoopLine, StepLine, check_ledger
from prefect_torch_ddp.results import LedgerReport
from prefect_torch_ddp.storage.locate import storage_from_uri
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.storage.record_log import RecordLog
from prefect_torch_ddp.storage.records import first_steps, read_parts, record_keys


class LedgerLog(RecordLog):
    """Appends to `runs/<run_id>/ledger/rank-00000/<attempt>-<part>.jsonl`: a line for each step and each loop."""

    def __init__(self, storage: Storage, run_id: str, rank: int, attempt: int, first_interval_s: float = 1.0) -> None:
        """Make it; nothing is written yet."""
        super().__init__(
            storage, _folder(run_id), rank=rank, attempt=attempt, what="ledger", to_line=_line, first_interval_s=first_interval_s
        )
        self._who = {"rank": rank, "attempt": attempt}

    def put(self, line: LoopLine | StepLine | EndLine) -> None:
        """Put a line on record, as this rank's."""
        self.append({**vars(line), **self._who})


def read_ledger(storage: Storage | str | Path, run_id: str) -> LedgerReport:
    """Check the ledger of a run: which samples it trained on in each epoch, over all its attempts.

    What counts is what survived: steps that a later attempt did again, or took back, don't. Memory: a byte for each sample and
    epoch.

    Args:
        storage: where the run is: a Storage, a directory, or `s3://bucket/prefix`.
        run_id: the name of its folder below `runs`.

    Raises:
        StorageError: the storage can't be read.
    """
    where = storage_from_uri(os.fspath(storage)) if isinstance(storage, str | os.PathLike) else storage
    keys = record_keys(where, _folder(run_id))
    # Steps only grow, so the first part of each rank has its attempt's first step.
    firsts = first_steps(read_parts(where, _first_parts(keys), _parse))
    return check_ledger(run_id, firsts, read_parts(where, keys, _parse))


def _first_parts(keys: Sequence[str]) -> list[str]:
    first: dict[str, str] = {}
    for key in keys:
        first.setdefault(key.rpartition("-")[0], key)
    return list(first.values())


def _folder(run_id: str) -> str:
    return f"runs/{run_id}/ledger"


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"


def _parse(line: dict[str, Any]) -> LoopLine | StepLine | EndLine:
    if "samples" in line:
        return StepLine(**line)
    return LoopLine(**line) if "num_samples" in line else EndLine(**line)
