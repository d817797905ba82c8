"""What trackers are told of a run besides its metrics, and how they name the series of both."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prefect_torch_ddp.errors import TrackerError
from prefect_torch_ddp.records.hiding import without_credentials
from prefect_torch_ddp.records.run_record import RunRecord


def given(record: RunRecord) -> Mapping[str, Any]:
    """Return what a run was given, as it is stored; nested."""
    fields = record.json_fields()
    named = ("options", "data_options", "arguments", "seed")
    return {**fields["parameters"], **{name: fields[name] for name in named}}


def series_names(
    tracker: str, metrics: Iterable[str], named: Callable[[str], str] = str
) -> dict[str, str]:
    """Return the name of each metric's series in a tracker.

    Two that would be the same are refused, and not renamed: points may have been sent by the name
    before the second metric was reported.

    Args:
        tracker: its name, for the error.
        metrics: all that ranks reported.
        named: returns what the tracker has in place of a name.

    Raises:
        TrackerError: two would share one series; it names them.
    """
    by_name = defaultdict(list)
    for metric in metrics:
        by_name[named(metric)].append(metric)
    for name, several in by_name.items():
        if len(several) > 1:
            msg = f"{tracker} would call several metrics {name!r}: {', '.join(several)}"
            raise TrackerError(msg)
    return {several[0]: name for name, several in by_name.items()}


def evaluated(
    record: RunRecord, metrics: Iterable[str] = (), named: Callable[[str], str] = str
) -> dict[str, float]:
    """Return what the evaluation measured, by the names of its series; {}: nothing.

    They begin with `evaluation/`, several times if a metric or another score has the name. The
    evaluation comes last, so that all metrics are known.

    Args:
        record: of the run.
        metrics: all that ranks reported.
        named: returns what the tracker has in place of a name.
    """
    scores = {} if record.evaluation is None else record.evaluation.scores
    taken, found = set(map(named, metrics)), {}
    for name in sorted(scores, key=lambda each: named(each) != each):  # changed names come later
        series = named(f"evaluation/{name}")
        while series in taken:
            series = f"evaluation/{series}"
        taken.add(series)
        found[series] = scores[name]
    return found


def facts(record: RunRecord) -> dict[str, str]:
    """Return where the run is and how it went, as far as it is known."""
    known = {
        "experiment": record.experiment,
        "workload": record.workload,
        "storage": without_credentials(record.storage),
        "state": record.state,
        "cause": record.cause,
        "flow_run_id": record.flow_run_id,
        "dataset": record.dataset and record.dataset.dataset_id,
        "checkpoint": record.checkpoint and record.checkpoint.uri,
        **{f"model.{name}": uri for name, uri in record.model_uris.items()},
    }
    return {name: str(value) for name, value in known.items() if value}
