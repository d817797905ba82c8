"""The report of a gang that a flow of your own starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect.utilities.context import get_task_and_flow_run_ids

from prefect_torch_ddp.blocks import resolve_storage
from prefect_torch_ddp.checkpoint.attempts import newest_attempt
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.params import ContextParams
from prefect_torch_ddp.tasks.report.live import LiveReport
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from prefect_torch_ddp.tasks.train_run import run_id_of
from prefect_torch_ddp.tasks.watch.run_log import log_to_run
from prefect_torch_ddp.tasks.watch.terminal import display_here
from prefect_torch_ddp.tracking.attempt_log import RunAttemptLog
from prefect_torch_ddp.tracking.description import draft_record, experiment_of
from prefect_torch_ddp.tracking.recorder import RunRecorder


@exported_by("prefect_torch_ddp")
@contextmanager
def gang_report(name: str, storage: str | None = None) -> Iterator[dict[str, Any]]:
    """Show a `run_gang` of your own flow on a page, like a `ddp_task`; use it in a `with`.

    The run gets a page with its progress, a run record and events. The ranks' lines go to the run's
    log, and are kept in the storage.

    Args:
        name: the name under which gangs of this flow or deployment are compared from run to run.
            Give each gang of a flow run another name.
        storage: the storage of the record and the lines, with the same default as for `ddp_task`.

    Yields:
        Keyword arguments for `run_gang`: `name`, `attempt_log` and `on_event`.

    Raises:
        InvalidParamsError: it is called outside of a flow run, or `storage` names no storage.
        StorageError: the storage can't be used.

    Example:
        In a flow, with a client of its cluster:

            from prefect_torch_ddp import gang_report, run_gang

            with gang_report("sweep") as shown:
                run_gang(client, fn, **shown)
    """
    own = resolve_storage(storage or ContextParams().storage)
    own.check_writable()
    prefect_id = next(filter(None, get_task_and_flow_run_ids()), None)
    if prefect_id is None:
        msg = "gang_report shows a gang in a Prefect run, but there is no run: call it in a flow"
        raise InvalidParamsError(msg)
    run_id = run_id_of(name, prefect_id)
    draft = draft_record(None, run_id, experiment_of(name), own, workload=name)
    shown = TrainingProgress(attempt=newest_attempt(own, run_id) + 1)
    with LiveReport(own, shown, RunRecorder(own, draft)) as report, display_here():
        yield {
            "name": run_id,
            "attempt_log": RunAttemptLog(own, run_id, knows_steps=False),
            "on_event": log_to_run(report.receive, shown, name),
        }
