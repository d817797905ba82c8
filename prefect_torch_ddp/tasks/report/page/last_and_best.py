"""How a run differs from the last one and from the best one of its experiment."""

import math
from collections.abc import Mapping

from prefect_torch_ddp.protocol.metric_names import Direction, direction, is_validation
from prefect_torch_ddp.records.run_record import RunRecord
from prefect_torch_ddp.records.score import best_metric, judged_values
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
    is_evaluated = view.train_report is not None
    now = judged_values(view.train_report.evaluation) if view.train_report else view.curves.last
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
    name, better = best_metric(view.curves.last, view.record)
    is_telling = is_validation(name) or name == view.record.best_metric
    return (name, better) if is_telling else ("", None)


def _judged(view: RunView) -> tuple[list[str], str, Direction | None]:
    """Return which metrics are compared, the one that decides, and which values are better."""
    if view.train_report is not None:
        names = list(judged_values(view.train_report.evaluation))[:MAX_HEADLINE_METRICS]
        first = names[0] if names else ""
        return names, first, direction(first)
    name, better = best_metric(view.curves.last, view.record)
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
    return {} if record.evaluation is None else judged_values(record.evaluation)


def _began(record: RunRecord) -> str:
    return f"{record.began:%Y-%m-%d %H:%M}"


def _cell(now: float, then: float | None, better: Direction | None) -> str:
    if then is None or not math.isfinite(then):
        return ""
    return f"{number(then)}, now {_change(now, then, better)}"


def _change(now: float, then: float, better: Direction | None) -> str:
    if now == then:
        return "the same"
    if number(now) == number(then):  # as gangs of two sizes round
        return "nearly the same"
    return f"{number(abs(now - then))} {_direction(now - then, better)}"


def _direction(by: float, better: Direction | None) -> str:
    if better is None:
        return "higher" if by > 0 else "lower"
    return "better" if (by > 0) == (better == "max") else "worse"
