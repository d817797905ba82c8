"""Metrics of a run, read back in columns: its records and its epochs."""

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.protocol.metric_names import is_validation
from prefect_torch_ddp.records.reading import Stretch, list_parts, read_parts, superseded
from prefect_torch_ddp.results import EpochRow
from prefect_torch_ddp.storage.formats import METRICS
from prefect_torch_ddp.storage.protocol import Storage

if TYPE_CHECKING:
    import pandas as pd

MEASURED = "\0"
BEFORE_START = -2
"""The samples of what was reported before it was known where the attempt begins."""
ROW = np.dtype(
    [
        ("step", np.int64),
        ("epoch", np.int32),
        ("rank", np.int32),
        ("attempt", np.int32),
        ("time", np.float64),
        ("num_samples", np.int64),
    ]
)
"""What every record has besides its metrics; epochs count from 1, the time is in Unix seconds.

Samples that aren't known, though the record is of a step, are `UNKNOWN_SAMPLES` of
`records/log.py`. Those of a record from before the attempt's start was known are `BEFORE_START`.
"""

Ints = NDArray[np.signedinteger[Any]]
Floats = NDArray[np.float64]

_fields_of_row = itemgetter(*ROW.names or ())


@dataclass(frozen=True)
class Records:
    """What ranks reported, in columns; a row is what one rank reported at one step."""

    rows: NDArray[Any]
    """Of ROW: `rows["step"]` are all steps."""
    metrics: Mapping[str, tuple[Ints, Floats]]
    """By name: the numbers of the rows that have the metric, and its values in them."""

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, mask: NDArray[np.bool_]) -> "Records":
        """Return some of the rows."""
        numbers = np.cumsum(mask) - 1
        metrics = {
            name: (numbers[having[mask[having]]], values[mask[having]])
            for name, (having, values) in self.metrics.items()
            if mask[having].any()
        }
        return Records(self.rows[mask], metrics)

    def reordered(self, order: Ints) -> "Records":
        """Return the rows in another order, given as their numbers."""
        positions = np.empty(len(order), np.int64)
        positions[order] = np.arange(len(order))
        metrics = {}
        for name, (having, values) in self.metrics.items():
            moved = positions[having]
            by_position = np.argsort(moved, kind="stable")
            metrics[name] = moved[by_position], values[by_position]
        return Records(self.rows[order], metrics)

    def sums(self, metric: str, bins: Ints, num_bins: int, *, only_finite: bool = False) -> Floats:
        """Add up a metric's records by the bins of all rows; those of bin -1 are left out.

        Returns:
            [5, num_bins]: the values times samples, the samples, the values, their number, and
            their steps. `means` makes means of it; sums of two may be added.
        """
        having, values = self.metrics[metric]
        kept = bins[having] >= 0
        if only_finite:
            kept &= np.isfinite(values)
        having, values = having[kept], values[kept]
        weights = np.maximum(self.rows["num_samples"][having], 0).astype(np.float64)
        with np.errstate(invalid="ignore"):  # a training that diverged has inf and -inf
            weighted = np.where(weights > 0, values * weights, 0.0)
        columns = (weighted, weights, values, np.ones(len(having)), self.rows["step"][having])
        return np.stack([np.bincount(bins[having], column, num_bins) for column in columns])


def means(metric: str, sums: Floats) -> Floats:
    """Return the mean of each bin that has records, weighed by their samples.

    Records without samples count, equally, only if there are no others. Records of a validation
    metric always count equally: the samples are those of the training step under way.
    """
    weighted, samples, unweighted, count = sums[:4]
    by_samples = np.zeros(samples.shape, bool) if is_validation(metric) else samples > 0
    values: Floats = np.where(by_samples, weighted, unweighted) / np.where(
        by_samples, samples, count
    )
    return values


def records_of(lines: Iterable[tuple[tuple[Any, ...], Mapping[str, float]]]) -> Records:
    """Make columns of the fields and the metrics of each record."""
    found: defaultdict[str, tuple[array[int], array[float]]]
    found = defaultdict(lambda: (array("i"), array("d")))

    def rows() -> Iterator[tuple[Any, ...]]:
        for number, (fields, metrics) in enumerate(lines):
            for name, value in metrics.items():
                numbers, values = found[name]
                numbers.append(number)
                values.append(value)
            yield fields

    columns = np.fromiter(rows(), ROW)
    metrics = {name: (np.array(each[0]), np.array(each[1])) for name, each in found.items()}
    return Records(columns, metrics)


def _parse(line: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, float]]:
    metrics = line["metrics"]
    for name, value in metrics.items():
        if type(value) is not float:  # a whole number, or the name of one that JSON hasn't
            metrics[name] = float(value)
    if "measured" in line:
        metrics |= {MEASURED + name: float(value) for name, value in line["measured"].items()}
    if line.get("is_before_start"):
        line["num_samples"] = BEFORE_START
    return _fields_of_row(line), metrics


def read_new_records(storage: Storage, run_id: str, known: set[str]) -> Records:
    """Read the records, those of parts whose keys are in `known` left out; new ones are added.

    What ranks measured themselves is among them, by names that begin with `MEASURED`.
    """
    new = [part for part in list_parts(storage, run_id, "metrics") if part.key not in known]
    records = records_of(read_parts(storage, new, METRICS, _parse))
    known.update(part.key for part in new)
    return records


def reported(records: Records) -> Records:
    """Leave out what ranks measured themselves, and rows that have nothing else."""
    metrics = {
        name: each for name, each in records.metrics.items() if not name.startswith(MEASURED)
    }
    has_any = np.zeros(len(records), bool)
    for having, _ in metrics.values():
        has_any[having] = True
    if has_any.all() and len(metrics) == len(records.metrics):
        return records
    return Records(records.rows, metrics).where(has_any)


def first_steps(records: Records) -> dict[Stretch, tuple[bool, int]]:
    """Return of every attempt whether it has only records without a step, and its first step.

    What one reports before its first step bears the step it resumed from, and must not supersede
    it; it is of no samples. What it reports before it knows that step is a stretch of its own. Of
    two parts of a stretch's records the smaller such pair is that of both.
    """
    firsts = {}
    for attempt in np.unique(records.rows["attempt"]).tolist():
        for stretch in (
            Stretch(attempt, is_start_known=False),
            Stretch(attempt, is_start_known=True),
        ):
            of_it = rows_of(records, stretch)
            if not of_it.any():
                continue
            trained = of_it & (records.rows["num_samples"] != 0)
            is_untrained = not stretch.is_start_known or not trained.any()
            steps = records.rows["step"][of_it if is_untrained else trained]
            firsts[stretch] = is_untrained, int(steps.min())
    return firsts


def rows_of(records: Records, stretch: Stretch) -> NDArray[np.bool_]:
    """Tell which rows are of a stretch."""
    is_start_known = records.rows["num_samples"] != BEFORE_START
    is_of_attempt = records.rows["attempt"] == stretch.attempt
    found: NDArray[np.bool_] = is_of_attempt & (is_start_known == stretch.is_start_known)
    return found


def surviving_records(records: Records) -> Records:
    """Keep what was reported and no newer attempt superseded.

    What ranks measured themselves counts before it is left out: an attempt may report nothing in
    its first steps, and takes back those of the attempt before all the same.
    """
    counts = np.ones(len(records), bool)
    for stretch, end in superseded(first_steps(records)).items():
        if end < math.inf:
            counts &= ~rows_of(records, stretch) | (records.rows["step"] < end)
    return reported(records if counts.all() else records.where(counts))


def epoch_rows(records: Records) -> tuple[EpochRow, ...]:
    """Average every metric of every epoch over the samples of all ranks."""
    epochs, index = np.unique(records.rows["epoch"], return_inverse=True)
    span = records.rows["step"].max(initial=0) + 1
    # Not np.unique: each rank's steps are in order, which a stable sort merges in no time.
    steps = np.sort(index * span + records.rows["step"], kind="stable")
    is_first = np.diff(steps, prepend=-1) > 0  # of the ranks that took this step
    num_steps = np.bincount(steps[is_first] // span, minlength=len(epochs))
    sums = {name: records.sums(name, index, len(epochs)) for name in records.metrics}
    rows = []
    for at, epoch in enumerate(epochs.tolist()):
        here = {name: each[:, at] for name, each in sums.items() if each[3, at]}
        # One sample may be in several records (its loss, later its accuracy), so those of one
        # metric are counted. Held-out samples are no training samples, unless there are no others.
        counted = [name for name in here if not is_validation(name)] or list(here)
        rows.append(
            EpochRow(
                epoch=epoch,
                num_steps=int(num_steps[at]),
                num_samples=max((int(here[name][1]) for name in counted), default=0),
                metrics={name: float(means(name, each)) for name, each in here.items()},
            )
        )
    return tuple(rows)


def records_frame(
    storage: Storage, run_id: str, *, all_attempts: bool = False, by_step: bool = False
) -> "pd.DataFrame":
    """Return the records as a pandas DataFrame: a row a record, a column a metric.

    A metric that is named like a column of every record, such as `time`, is in `metric.time`.

    With `all_attempts` also those that a newer attempt superseded. With `by_step` a row is what
    all ranks of an attempt recorded at a step, see `by_steps`.

    Raises:
        InvalidParamsError: pandas isn't installed.
    """
    records = read_new_records(storage, run_id, set())
    records = reported(records) if all_attempts else surviving_records(records)
    return frame_of(records, all_attempts=all_attempts, by_step=by_step)


def frame_of(
    records: Records, *, all_attempts: bool = False, by_step: bool = False
) -> "pd.DataFrame":
    """Return records as `records_frame` does, which has left out the superseded ones."""
    pd = import_pandas("read_metrics")
    records = by_steps(records) if by_step else records
    columns = {name: records.rows[name] for name in ROW.names or ()}
    columns["num_samples"] = np.maximum(columns["num_samples"], 0)
    columns["time"] = pd.to_datetime(columns["time"], unit="s", utc=True)
    if by_step:
        del columns["rank"]
    for name, (having, values) in records.metrics.items():
        column = f"metric.{name}" if name in (ROW.names or ()) else name
        columns[column] = np.full(len(records), np.nan)
        columns[column][having] = values
    order = ["attempt", "step", "rank"] if all_attempts else ["step", "rank", "attempt"]
    order = [name for name in order if name in columns]
    return pd.DataFrame(columns).sort_values(order, kind="stable", ignore_index=True)


def by_steps(records: Records) -> Records:
    """Make one row of what the ranks of an attempt recorded at one step.

    A metric is the mean over the ranks, as `means` weighs it; the samples are those of all ranks;
    the time is the latest. The row's rank is 0.
    """
    span = int(records.rows["step"].max(initial=0)) + 1
    keys = records.rows["attempt"].astype(np.int64) * span + records.rows["step"]
    _, first, index = np.unique(keys, return_index=True, return_inverse=True)
    rows = records.rows[first].copy()
    rows["rank"] = 0
    rows["epoch"] = 0
    np.maximum.at(rows["epoch"], index, records.rows["epoch"])
    np.maximum.at(rows["time"], index, records.rows["time"])
    rows["num_samples"] = _samples(records, index, len(rows))
    metrics = {}
    for name in records.metrics:
        sums = records.sums(name, index, len(rows))
        having = np.flatnonzero(sums[3])
        metrics[name] = having, means(name, sums[:, having])
    return Records(rows, metrics)


def _samples(records: Records, index: Ints, num_rows: int) -> Ints:
    """Add up over the ranks how many samples each trained on in a step.

    A rank may have several records of a step, each of which has all of its samples.
    """
    if not num_rows:
        return np.zeros(0, np.int64)
    num_ranks = int(records.rows["rank"].max()) + 1
    keys = index * num_ranks + records.rows["rank"]
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    known = np.maximum(records.rows["num_samples"], 0)
    most = np.maximum.reduceat(known[order], starts)
    total: Ints = np.bincount(keys[order][starts] // num_ranks, most, num_rows).astype(np.int64)
    return total


def import_pandas(asked_by: str) -> Any:
    """Return the module pandas, which is optional, and heavy.

    Raises:
        InvalidParamsError: it isn't installed.
    """
    try:
        import pandas as pd  # noqa: PLC0415
    except ImportError as error:
        msg = (
            f"{asked_by} returns a pandas DataFrame, and pandas isn't installed: run "
            "`pip install pandas`, or install prefect-torch-ddp with its extra `analysis`"
        )
        raise InvalidParamsError(msg) from error
    return pd
