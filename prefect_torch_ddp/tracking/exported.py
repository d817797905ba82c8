"""Writing a run's records into a folder as plain files: JSON lines, CSV and Parquet."""

import importlib.util
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import orjson

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.records.growing import GrowingRecords
from prefect_torch_ddp.records.metrics import (
    ROW,
    Records,
    frame_of,
    import_pandas,
    surviving_records,
)
from prefect_torch_ddp.records.run_record import read_run_record
from prefect_torch_ddp.storage.names import absolute_folder
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tracking.runs import storage_of

if TYPE_CHECKING:
    import pandas as pd

ExportFormat = Literal["json", "csv", "parquet"]
INTERVAL_S = 2.0
OF_RANK = re.compile(r"rank-(?:[0-9]{5}|[1-9][0-9]{5,})\.jsonl")
"""What `_name` gives; a folder may also have a user's own rank-notes.jsonl."""
WRITE_SHARE = 10
"""While it follows, the pauses are so many times as long as a write took."""

logger = logging.getLogger(__name__)


@exported_by("prefect_torch_ddp")
def export_records(  # noqa: PLR0913 - all but where to have defaults
    storage: Storage | str | Path,
    run_id: str,
    folder: str | Path,
    *,
    follow: bool = False,
    idle_s: float | None = None,
    formats: Sequence[ExportFormat] = ("json", "csv", "parquet"),
) -> None:
    """Write a run's metrics into a folder: JSON lines of each rank, and a table as CSV and Parquet.

    `rank-00000.jsonl` has a line for each record of rank 0, with the columns of
    `read_metrics(by="record")`. `metrics.csv` and `metrics.parquet` are
    `read_metrics(by="step")`. Superseded records are left out, as in `read_metrics`. Times are in
    UTC. In JSON, nan and infinity are texts. Each file is replaced as a whole, so a reader never
    sees a part of one. Files of ranks that an earlier call left and that have no records now are
    deleted; files with other names stay.

    Args:
        storage: where the run is, as for `read_metrics`.
        run_id: the name of its folder below `runs`.
        folder: where to; it is made if it isn't there.
        follow: write again whenever there are new records, until the run has ended: it has
            completed, was cancelled, or its task failed and Prefect doesn't retry that task. If the
            flow is retried or resumed later, call it again.
        idle_s: with `follow`, end also if there was no new record for so many seconds. A run whose
            process was killed looks as if it still trained, so it is followed forever if this is
            None.
        formats: some of "json", "csv", "parquet".

    Raises:
        InvalidParamsError: there is no record of the run, a format is unknown, `idle_s` isn't
            positive, pandas isn't installed, or pyarrow isn't, which Parquet needs.
        StorageError: the storage can't be read.
        OSError: the folder can't be written.

    Example:
        While it trains, for a notebook next to it:

            from prefect_torch_ddp import export_records

            export_records("runs", run_id, "out", follow=True, idle_s=3600)
    """
    write = _writers(formats)
    if idle_s is not None and not idle_s > 0:
        msg = f"idle_s is {idle_s!r}; give a positive number of seconds, or None"
        raise InvalidParamsError(msg)
    where, out = storage_of(storage), absolute_folder(folder)
    records, num_written, news_s = GrowingRecords(where, run_id), -1, time.monotonic()
    while True:
        # First: what is reported before this state is read below.
        is_over = read_run_record(where, run_id).is_over or not follow
        began_s = time.monotonic()
        found = records.read()
        if len(found) != num_written:
            out.mkdir(parents=True, exist_ok=True)
            for each in write:
                each(surviving_records(found), out)
            num_written, news_s = len(found), time.monotonic()
        if is_over:
            return
        if idle_s is not None and time.monotonic() - news_s >= idle_s:
            words = "run %s has had no new record for %g s and is no longer followed"
            logger.warning(words, run_id, idle_s)
            return
        time.sleep(max(INTERVAL_S, WRITE_SHARE * (time.monotonic() - began_s)))


def _writers(formats: Sequence[str]) -> list[Callable[[Records, Path], None]]:
    unknown = [each for each in formats if each not in WRITERS]
    if isinstance(formats, str) or unknown or not formats:
        msg = f"formats is {formats!r}; give a list of some of {', '.join(WRITERS)}"
        raise InvalidParamsError(msg)
    if {"csv", "parquet"} & set(formats):
        import_pandas("export_records")
    if "parquet" in formats and importlib.util.find_spec("pyarrow") is None:
        msg = (
            "export_records writes Parquet by pyarrow, which isn't installed: run "
            "`pip install pyarrow`, install prefect-torch-ddp with its extra `tables`, or give "
            "formats=['json', 'csv']"
        )
        raise InvalidParamsError(msg)
    return [WRITERS[each] for each in dict.fromkeys(formats)]


def _write_json(records: Records, folder: Path) -> None:
    lines = _lines(records)
    ranks = records.rows["rank"]
    order = np.lexsort((records.rows["attempt"], records.rows["step"]))
    there = np.unique(ranks).tolist()
    # Of a rank whose steps don't count any longer.
    old = {path for path in folder.iterdir() if OF_RANK.fullmatch(path.name)}
    for path in old - {folder / _name(rank) for rank in there}:
        path.unlink()
    for rank in there:
        mine = order[ranks[order] == rank].tolist()
        content = b"".join(
            orjson.dumps(lines[number], option=orjson.OPT_APPEND_NEWLINE) for number in mine
        )
        _replace(folder / _name(rank), partial(Path.write_bytes, data=content))


def _name(rank: int) -> str:
    return f"rank-{rank:05d}.jsonl"


def _lines(records: Records) -> list[dict[str, Any]]:
    names = ROW.names or ()
    lines = [dict(zip(names, row, strict=True)) for row in records.rows.tolist()]
    for line in lines:
        line["time"] = datetime.fromtimestamp(line["time"], UTC)
        line["num_samples"] = max(line["num_samples"], 0)
    for name, (having, values) in records.metrics.items():
        column = f"metric.{name}" if name in names else name
        for number, value in zip(having.tolist(), values.tolist(), strict=True):
            # JSON has no number for nan and infinity; float() reads their text back.
            lines[number][column] = value if math.isfinite(value) else str(value)
    return lines


def _write_csv(records: Records, folder: Path) -> None:
    frame = _by_step(records)
    _replace(folder / "metrics.csv", lambda path: frame.to_csv(path, index=False))


def _write_parquet(records: Records, folder: Path) -> None:
    frame = _by_step(records)
    _replace(folder / "metrics.parquet", lambda path: frame.to_parquet(path, engine="pyarrow"))


def _by_step(records: Records) -> "pd.DataFrame":
    return frame_of(records, by_step=True)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    new = path.with_name(f".{path.name}.new")
    write(new)
    new.replace(path)


WRITERS: Mapping[str, Callable[[Records, Path], None]] = {
    "json": _write_json,
    "csv": _write_csv,
    "parquet": _write_parquet,
}
