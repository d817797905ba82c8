"""The gang of a stage that doesn't train: prepare, evaluate."""

from typing import Any

from prefect_torch_ddp.gang.restarts import CallAttemptLog
from prefect_torch_ddp.gang.run import run_gang
from prefect_torch_ddp.params import GangOptions, TrainParams
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.records.rank_log import LogFolder
from prefect_torch_ddp.tasks.clusters.current import current_client
from prefect_torch_ddp.tasks.train_run import RUN_STAGE, Run
from prefect_torch_ddp.tasks.watch.run_log import log_to_run


def options_of_stage(params: TrainParams, world_size: int) -> GangOptions:
    """Return the options of a gang of so many ranks that doesn't train."""
    options = params.options_of_gang()
    # An evaluation doesn't wait for ranks that a training had once grown to.
    least = params.min_world_size or params.world_size
    options["min_world_size"] = min(least, world_size)
    options["max_world_size"], options["max_restarts"] = None, 0  # only a training resumes
    return options


def run_stage(run: Run, config: RankConfig, world_size: int, logs: str) -> Any:
    """Run a stage's function on a gang, once; return what rank 0's returned."""
    options = options_of_stage(run.params, world_size)
    if config.stage == "prepare":  # it makes no steps and no collectives
        options["progress_timeout_s"] = options["collective_timeout_s"] = None
    with current_client() as client:
        values = run_gang(
            client,
            RUN_STAGE,
            args=(config, run.params.workload),
            world_size=world_size,
            process_group="none" if config.stage == "prepare" else "default",
            name=f"{run.run_id} {config.stage}",
            attempt_log=CallAttemptLog(logs=LogFolder(run.storage, run.run_id, logs)),
            on_event=log_to_run(),
            **options,
        )
    return values[0]
