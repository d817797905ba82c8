"""Owns the ledger of a run: the record of which samples each rank trained on in each step, and how it is read back."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from prefect_torch_ddp.data.ledger_check import EndLine, LoopLine, StepLine, check_ledger
from prefect_torch_ddp.results import LedgerReport
from prefect_torch_ddp.storage.protocol import Storage, StoredObject
from prefect_torch_ddp.storage.record_log import RecordLog
from prefect_torch_ddp.storage.records import first_steps, read_parts, record_parts

_encode = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps would make one for each line


class LedgerLog(RecordLog):
    """Appends to `runs/<run_id>/ledger/rank-00000/<attempt>-<part>.jsonl`: a line for each step and each loop."""

    def __init__(self, storage: Storage, run_id: str, rank: int, attempt: int, **options: Any) -> None:
        """Make it; nothing is written yet. See RecordLog for the options: first_interval_s and copies."""
        super().__init__(storage, _folder(run_id), rank=rank, attempt=attempt, what="ledger", to_line=_line, **options)
        self._who = {"rank": rank, "attempt": attempt}

    def put(self, line: LoopLine | StepLine | EndLine) -> None:
        """Put a line on record, as this rank's."""
        self.append({**vars(line), **self._who})


def read_ledger(storage: Storage, run_id: str) -> LedgerReport:
    """Check the ledger of a run; see `prefect_torch_ddp.read_ledger`.

    Raises:
        StorageError: the storage can't be read.
    """
    parts = record_parts(storage, _folder(run_id))
    # Steps only grow, so the first part of each rank has its attempt's first step.
    firsts = first_steps(read_parts(storage, _first_parts(parts), _parse))
    return check_ledger(run_id, firsts, read_parts(storage, parts, _parse))


def _first_parts(parts: Sequence[StoredObject]) -> list[StoredObject]:
    first: dict[str, StoredObject] = {}
    for part in parts:
        first.setdefault(part.key.rpartition("-")[0], part)
    return list(first.values())


def _folder(run_id: str) -> str:
    return f"runs/{run_id}/ledger"


def _line(record: Mapping[str, Any]) -> str:
    return _encode(record) + "\n"


def _parse(line: dict[str, Any]) -> LoopLine | StepLine | EndLine:
    if "samples" in line:
        return StepLine(**line)
    return LoopLine(**line) if "num_samples" in line else EndLine(**line)
