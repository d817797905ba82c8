"""By what a run is judged, and its value: a run's score in each list of runs."""

from collections.abc import Mapping

from prefect_torch_ddp.protocol.metric_names import Direction, direction, is_validation
from prefect_torch_ddp.records.run_record import RunRecord
from prefect_torch_ddp.results import Report


def score_of(record: RunRecord) -> tuple[str, float] | None:
    """Return a run's score, by the name of its metric; None if it has none.

    It is the first one of the evaluation, else the value of the best checkpoint. A completed
    training has at least its last metrics; those of one that trains, failed or was cancelled are
    of some step in its middle, and aren't its score.
    """
    if record.evaluation is not None:
        return next(iter(judged_values(record.evaluation).items()), None)
    if record.best_metric is not None and record.best_value is not None:
        return record.best_metric, record.best_value
    if record.state != "completed":
        return None
    name, _ = best_metric(record.metrics, record)
    return (name, record.metrics[name]) if name in record.metrics else None


def best_metric(last: Mapping[str, float], record: RunRecord) -> tuple[str, Direction | None]:
    """Return the metric that a training is judged by, and which of its values are better.

    It is the one that checkpoints are kept by. Without one it is the first metric on validation
    data, a score before a loss before one whose name doesn't say; else the first training loss.

    Args:
        last: the training's last values.
        record: the run's.
    """
    if record.best_metric:
        return record.best_metric, record.best_mode
    found = [name for name in last if is_validation(name)]
    found = sorted(found, key=lambda name: ("max", "min", None).index(direction(name)))
    found += [name for name in last if "loss" in name.lower()]
    return (found[0], direction(found[0])) if found else ("", None)


def judged_values(evaluation: Report) -> dict[str, float]:
    """Return the scores of an evaluation without its counts, which are neither good nor bad."""
    counts = "num_", "non_finite_"
    return {n: value for n, value in evaluation.scores.items() if not n.startswith(counts)}
