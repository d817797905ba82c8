"""One page for all calls of a `ddp_task` in a flow run: a table, the best one, their curves."""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from prefect import Task
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger

from prefect_torch_ddp.blocks import resolve_storage
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.records.hiding import HIDDEN
from prefect_torch_ddp.records.metrics import read_new_records
from prefect_torch_ddp.records.run_record import RunRecord, run_records_below
from prefect_torch_ddp.results import count
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.ddp_task import GangTask
from prefect_torch_ddp.tasks.report.artifacts import ArtifactWriter, key, ui_url
from prefect_torch_ddp.tasks.report.curves import MetricCurves
from prefect_torch_ddp.tasks.report.page.links import Links
from prefect_torch_ddp.tasks.sweeps.page import Trial, best_of, render_sweep
from prefect_torch_ddp.tracking.description import experiment_of

NUM_READERS = 8
CLOCKS_DIFFER = timedelta(hours=1)
"""By how much the clocks of the server and of a Dask worker may."""


@exported_by("prefect_torch_ddp")
def sweep_report(
    task: Task[..., Any], metric: str, *, mode: Literal["max", "min"]
) -> tuple[str, dict[str, Any]]:
    """Show all calls of a `ddp_task` in this flow run on one page, and return the best call.

    Call it in the flow, after its calls of the task have ended. The page is an artifact of the flow
    run: a table of the calls, best first, with the arguments, options and seeds that differ, and
    their curves together. It has the calls of earlier attempts of the flow run too. A call that
    failed, or that didn't report the metric, is never the best. Tasks of one name are told apart by
    the names of their functions: if another function made them, give each task its own name.

    Args:
        task: the task as it was called: if you changed it by `with_options`, the changed task.
        metric: name of the metric that decides which call is best. If it is the task's
            `checkpoint.best_metric`, the best value in a checkpoint of each call counts. Otherwise,
            and of a call whose checkpoints have none, the last value counts.
        mode: "max": larger values are better. "min": smaller ones are.

    Returns:
        (run id, arguments) of the best call. You can pass the id as `resume_from`. The arguments
        are those in the run record, which has a text in place of each that isn't a plain value.
        Arguments that look like secrets, by their names or their values, aren't on record and are
        left out, with a warning: pass them yourself.

    Raises:
        InvalidParamsError: it is called outside of a flow, the task isn't a `ddp_task`, or no call
            of it has the metric.
        StorageError: the storage can't be read.

    Example:
        Train the best one for more epochs:

            from prefect.futures import wait
            from prefect_torch_ddp import sweep_report

            wait(fit.map([0.01, 0.1, 1.0], epochs=4))
            run_id, best = sweep_report(fit, "validation_loss", mode="min")
            longer = fit.with_options(name="fit-longer", resume_from=run_id)
            longer(**{**best, "epochs": 8})
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        msg = "sweep_report shows the calls of a flow run, but there is none: call it in a flow"
        raise InvalidParamsError(msg)
    if not isinstance(task, GangTask):
        msg = f"sweep_report takes a ddp_task, not {task!r}; pass the task that the flow called"
        raise InvalidParamsError(msg)
    storage = resolve_storage(task.params.storage)
    experiment = experiment_of(task.code.module, task.name)
    began = context.flow_run.created or datetime.now(UTC)
    records = [
        each
        for each in run_records_below(storage, experiment, began - CLOCKS_DIFFER)
        if each.flow_run_id == str(context.flow_run.id)
        and _function(each.workload) == _function(task.code.workload)
        # Its run_key, if it has one, comes after a colon.
        and (each.experiment == experiment or each.experiment.startswith(f"{experiment}:"))
    ]
    sign = -1 if mode == "max" else 1
    records.sort(key=lambda each: (sign * _score(each, metric, mode), each.began))
    with ThreadPoolExecutor(NUM_READERS) as pool:
        trials = list(pool.map(lambda each: _trial(storage, each, metric, mode), records))
    if not trials or not math.isfinite(trials[0].score):
        raise InvalidParamsError(_why_none(task.name, metric, records))
    page = render_sweep(task.name, trials, metric, Links(ui_url()))
    with get_client(sync_client=True) as client:
        writer = ArtifactWriter(client, None, context.flow_run.id)
        line = f"{best_of(trials, metric)} · {count(len(trials), 'call')} of {task.name}"
        writer.put("markdown", key("sweep", experiment), page, line)
    return trials[0].record.run_id, _known_arguments(trials[0].record)


def _function(workload: str) -> str:
    """Return a function's name in its module, which a retried flow may load under another name."""
    return workload.rpartition(":")[2]


def _known_arguments(record: RunRecord) -> dict[str, Any]:
    """Return the arguments of a run without those that the record hides, which are logged."""
    known = {name: each for name, each in record.arguments.items() if not _has_hidden(each)}
    if left_out := [name for name in record.arguments if name not in known]:
        msg = "%s of run %s look like secrets and aren't on record: pass them yourself"
        get_run_logger().warning(msg, ", ".join(left_out), record.run_id)
    return known


def _has_hidden(value: Any) -> bool:
    """Tell whether a part of a value, at any depth, is hidden."""
    if isinstance(value, Mapping):
        return any(_has_hidden(each) for each in value.values())
    if isinstance(value, list | tuple):
        return any(_has_hidden(each) for each in value)
    return isinstance(value, str) and HIDDEN in value


def _score(record: RunRecord, metric: str, mode: str) -> float:
    """Return what a run is compared by; the worst value of all if it has none."""
    is_kept_by = (record.best_metric, record.best_mode) == (metric, mode)
    value = record.best_value if is_kept_by else None
    if value is None:  # also if it was only reported after the last checkpoint
        value = record.metrics.get(metric)
    if record.state == "completed" and value is not None and math.isfinite(value):
        return value
    return -math.inf if mode == "max" else math.inf


def _trial(storage: Storage, record: RunRecord, metric: str, mode: str) -> Trial:
    curves = MetricCurves(read_new_records(storage, record.run_id, set())).snapshot()
    return Trial(record, _score(record, metric, mode), curves.values)


def _why_none(name: str, metric: str, records: list[RunRecord]) -> str:
    if not records:
        return f"this flow run has no ended call of {name}: call it, and wait for it, before"
    ended = [each for each in records if each.state == "completed"]
    if not ended:
        causes = sorted({each.cause for each in records})
        return f"none of the {len(records)} calls of {name} was completed: {'; '.join(causes)}"
    names = sorted({each for record in ended for each in record.metrics})
    return (
        f"no completed call of {name} has a finite value of {metric!r}; they reported "
        f"{', '.join(names) or 'nothing: use ctx.report'}"
    )
