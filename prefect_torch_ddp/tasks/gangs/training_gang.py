"""The gang of a training under its run record and live report."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect.logging import get_run_logger

from prefect_torch_ddp.checkpoint.attempts import newest_attempt
from prefect_torch_ddp.gang.run import run_gang
from prefect_torch_ddp.params import ContextParams
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.clusters.current import current_client, wait_for_earlier
from prefect_torch_ddp.tasks.clusters.dashboard import dashboard_of, tunnel_to
from prefect_torch_ddp.tasks.report.live import LiveReport
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from prefect_torch_ddp.tasks.watch.run_log import log_to_run
from prefect_torch_ddp.tasks.watch.terminal import display_here
from prefect_torch_ddp.tracking.attempt_log import RunAttemptLog
from prefect_torch_ddp.tracking.recorder import RunRecorder


@contextmanager
def training_gang(
    params: ContextParams,
    recorder: RunRecorder,
    storage: Storage,
    *,
    name: str,
    is_workload: bool,
    **call: Any,
) -> Iterator[list[Any]]:
    """Train on a gang, and yield what the ranks returned; the report ends with the context.

    Args:
        params: of the training.
        recorder: of its run record.
        storage: of the run.
        name: of the gang.
        is_workload: of train_flow, whose function makes its steps by `ctx.steps`, and whose page
            another task completes.
        **call: more of what `run_gang` takes.
    """
    run_id, shown = recorder.record.run_id, TrainingProgress(params.world_size or 0)
    report = LiveReport(storage, shown, recorder, is_published=is_workload)
    with report, current_client() as client, display_here():
        if url := dashboard_of(client):
            tunnel = tunnel_to(url)
            report.link_dashboard(url, tunnel)
            from_afar = f" (from another machine: {tunnel})" if tunnel else ""
            get_run_logger().info("Dask's dashboard: %s%s", url, from_afar)
        if newest := newest_attempt(storage, run_id):
            shown.attempt = newest + 1
            wait_for_earlier(client, name, params)
        yield run_gang(
            client,
            world_size=params.world_size,
            world_size_divides=params.virtual_ranks,
            name=name,
            attempt_log=RunAttemptLog(storage, run_id, knows_steps=is_workload),
            on_event=log_to_run(report.receive, shown, recorder.record.workload),
            **call,
        )
