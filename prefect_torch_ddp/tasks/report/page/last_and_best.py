"""How a run differs from the last one and from the best one of its experiment."""

import math
from collections.abc import Mapping

from prefect_torch_ddp.protocol.metric_names import Direction, direction, is_validation
from prefect_torch_ddp.records.run_record import RunRecord
from prefect_torch_ddp.results import Report
from prefect_torch_ddp.tasks.report.curves import Curves
from prefect_torch_ddp.tasks.report.markdown import count, number, short, table
from prefect_torch_ddp.tasks.report.page.headline import MAX_HEADLINE_METRICS, RunView

Scores = Mapping[str, float]


def best(view: RunView) -> str:
    """Say the best value of the metric that a training is judged by, if that is known."""
    name, better = judged_by(view)
    if better is None or not (curve := view.curves.values.get(name)):
        return ""
    step, value = (max if better == "max" else min)(curve, key=lambda point: point[1])
    of = view.curves.steps_per_point
    mean = f", as a mean over up to {of} steps" if of > 1 else ""
    return f"Best {short(name)}: {number(value)} at step {count(round(step))}{mean}"


def comparison(view: RunView) -> str:
    """Lay out the scores of the run, the last and the best one; nothing if it is the only one."""
    names, judged, better = _judged(view)
    is_evaluated = view.report is not None
    now = _values(view.report.evaluation) if view.report else view.curves.last
    names = [name for name in names if math.isfinite(now.get(name, math.nan))]
    others = _others(view, judged, better, is_evaluated=is_evaluated)
    rows = []
    for words, record in others.items():
        then = _scores(record, is_evaluated=is_evaluated)
        cells = [
            _cell(now[each], then.get(each), better if each == judged else direction(each))
            for each in names
        ]
        if any(cells):
            rows.append([f"{words}: {view.links.run(record)}", *cells, _began(record)])
    if not rows:
        return ""
    own = ["this run", *(number(now[each]) for each in names), _began(view.record)]
    header = ["compared", *map(short, names), "began (UTC)"]
    return table(header, [own, *rows], align="l" * len(header))


def judged_by(view: RunView) -> tuple[str, Direction | None]:
    """Return `best_metric`, unless it is a training loss: the best batch says nothing."""
    name, better = best_metric(view.curves, view.record)
    is_telling = is_validation(name) or name == view.record.best_metric
    return (name, better) if is_telling else ("", None)


def best_metric(curves: Curves, record: RunRecord) -> tuple[str, Direction | None]:
    """Return the metric that a training is judged by, and which of its values are better.

    It is the one that checkpoints are kept by. Without one it is the first metric on validation
    data, a score before a loss before one whose name doesn't say; else the first training loss.
    """
    if record.best_metric:
        return record.best_metric, record.best_mode
    found = [name for name in curves.last if is_validation(name)]
    found = sorted(found, key=lambda name: ("max", "min", None).index(direction(name)))
    found += [name for name in curves.last if "loss" in name.lower()]
    return (found[0], direction(found[0])) if found else ("", None)


def score_of(record: RunRecord) -> tuple[str, float] | None:
    """Return what a run is judged by, and its value: of its evaluation, else of its training."""
    if record.evaluation is not None:
        return next(iter(_values(record.evaluation).items()), None)
    if record.best_metric is not None and record.best_value is not None:
        return record.best_metric, record.best_value
    name, _ = best_metric(Curves(last=record.metrics), record)
    return (name, record.metrics[name]) if name in record.metrics else None


def _judged(view: RunView) -> tuple[list[str], str, Direction | None]:
    """Return which metrics are compared, the one that decides, and which values are better."""
    if view.report is not None:
        names = list(_values(view.report.evaluation))[:MAX_HEADLINE_METRICS]
        first = names[0] if names else ""
        return names, first, direction(first)
    name, better = best_metric(view.curves, view.record)
    return [name], name, better


def _others(
    view: RunView, judged: str, better: Direction | None, *, is_evaluated: bool
) -> dict[str, RunRecord]:
    found: dict[str, RunRecord] = {}
    if (last := view.previous) is not None:
        is_origin = view.record.weights_from == last.run_id
        found["its weights are from" if is_origin else "last"] = last

    def score(record: RunRecord) -> float:
        value = _scores(record, is_evaluated=is_evaluated).get(judged, math.nan)
        sign = 1 if better == "max" else -1
        return sign * value if math.isfinite(value) else -math.inf

    done = [each for each in view.earlier if each.state == "completed"]
    done = [each for each in done if each.began < view.record.began and score(each) > -math.inf]
    if better is not None and done:
        top = max(done, key=score)  # of equals the newest
        if last is not None and top.run_id == last.run_id:
            return {f"{words} and best": last for words in found}
        found["best"] = top
    return found


def _scores(record: RunRecord, *, is_evaluated: bool) -> Scores:
    """Return what is compared: of the evaluation, if this run was evaluated, or the training."""
    if not is_evaluated:
        return record.metrics
    return {} if record.evaluation is None else _values(record.evaluation)


def _began(record: RunRecord) -> str:
    return f"{record.began:%Y-%m-%d %H:%M}"


def _cell(now: float, then: float | None, better: Direction | None) -> str:
    if then is None or not math.isfinite(then):
        return ""
    by = now - then
    return f"{number(then)}, now {f'{number(abs(by))} {_change(by, better)}' if by else 'the same'}"


def _change(by: float, better: Direction | None) -> str:
    if better is None:
        return "higher" if by > 0 else "lower"
    return "better" if (by > 0) == (better == "max") else "worse"


def _values(evaluation: Report) -> dict[str, float]:
    # Neither good nor bad.
    counts = "num_", "non_finite_"
    return {n: value for n, value in evaluation.scores.items() if not n.startswith(counts)}
