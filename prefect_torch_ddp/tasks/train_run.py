"""A run of train-ddp as its tasks share it: what it was given, resolved once, and its name."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any, Self
from uuid import UUID

from prefect.context import FlowRunContext

from prefect_torch_ddp.blocks import (
    absolute_reference,
    fingerprint_of,
    resolve_storage,
)
from prefect_torch_ddp.checkpoint.keys import CheckpointId
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint, parse_resume_from
from prefect_torch_ddp.data.datasets.dataset_store import find_dataset
from prefect_torch_ddp.params import ClusterParams, ContextParams, TrainParams
from prefect_torch_ddp.protocol.call import Call
from prefect_torch_ddp.rank.config import RankConfig, Stage
from prefect_torch_ddp.results import DatasetReport
from prefect_torch_ddp.storage.protocol import Readable, Storage
from prefect_torch_ddp.tasks.clusters.current import with_ranks_placed
from prefect_torch_ddp.tasks.sources import new_source, recorded_source
from prefect_torch_ddp.tasks.workload import checked_workload, dataset_id
from prefect_torch_ddp.tracking.description import experiment_of, recorded_params
from prefect_torch_ddp.tracking.resume import resume_point
from prefect_torch_ddp.tracking.trackers.known import check_trackers

# Named, not imported: what it leads to loads torch, which only ranks do.
RUN_STAGE: Any = Call("prefect_torch_ddp.rank.stages:run_stage", takes_context=True)
RUN_TASK: Any = Call("prefect_torch_ddp.rank.stages:run_task", takes_context=True)


@dataclass(frozen=True)
class Run:
    """One run of train-ddp, with everything that its parameters name resolved."""

    run_id: str
    params: TrainParams
    storage: Storage
    dataset_id: str
    experiment: str
    """What its report is compared with: runs of the same deployment, or flow, and workload."""
    resume_from: ResumePoint | None = None
    source: Readable | None = None
    """Where the raw data is."""
    source_dataset: DatasetReport | None = None
    """The source's tables, if they are the dataset: the workload has no `prepare`."""

    @classmethod
    def from_params(cls, params: TrainParams) -> Self:
        """Resolve everything that the run of this flow run needs, before anything is started.

        Raises:
            InvalidParamsError, CheckpointError, StorageError: something given can't work.
        """
        params = with_ranks_placed(params)
        workload = checked_workload(params)
        storage = resolve_storage(params.storage)
        check_trackers(params.trackers, storage)
        storage.check_writable()
        source, source_dataset = new_source(params, has_prepare=workload.has_prepare)
        if params.source is not None:
            # On record for evaluations and resumes, which may be started in another folder.
            absolute = {"source": absolute_reference(params.source)}
            params = params.model_copy(update=absolute)
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        run_id = run_id_of(context.flow_run.name, context.flow_run.id)
        experiment = experiment_of(params.workload)
        resume_from = resume_point(params, storage, run_id, experiment)
        raw = None if source is None or source_dataset else fingerprint_of(source)
        named = source_dataset and source_dataset.dataset_id
        return cls(
            run_id=run_id,
            params=params,
            storage=storage,
            dataset_id=named or dataset_id(workload, params.data_options, raw),
            experiment=experiment,
            resume_from=resume_from,
            source=source,
            source_dataset=source_dataset,
        )

    @classmethod
    def from_checkpoint(
        cls, checkpoint: str, storage: str | None, cluster: ClusterParams | None
    ) -> tuple[Self, ResumePoint]:
        """Resolve an earlier run from its record, to evaluate its checkpoint.

        Args:
            checkpoint: its URI, or a run's for its newest.
            storage: the block of the run's storage; None: the URI says where it is.
            cluster: which Dask cluster evaluates; None: one like the run's.

        Returns:
            The run, and the checkpoint, which is there.

        Raises:
            InvalidParamsError: there is no record of such a run, or it isn't one of train_flow.
            CheckpointError: there is no such checkpoint any more, or it is damaged.
        """
        own = resolve_storage(storage or checkpoint.rpartition("/runs/")[0] or ".")
        point = parse_resume_from(checkpoint, own, resolve_storage)
        point.manifest()
        changes: dict[str, Any] = {"max_world_size": None}  # only a training grows
        if cluster is not None:
            changes |= {"cluster": cluster, "ranks_per_worker": None}
        params, dataset, experiment = recorded_params(own, point.run_id, replaced=changes)
        params = params.model_copy(update=changes)
        params = with_ranks_placed(params)
        source, source_dataset = recorded_source(params, own, point.run_id, dataset)
        run = cls(
            run_id=point.run_id,
            params=params,
            storage=own,
            dataset_id=(source_dataset or dataset).dataset_id,
            experiment=experiment,
            source=source,
            source_dataset=source_dataset,
        )
        return run, point

    def find_dataset(self) -> DatasetReport | None:
        """Return the dataset if it is there; None if it has to be prepared."""
        return self.source_dataset or find_dataset(self.storage, self.dataset_id)

    def rank_config(
        self,
        stage: Stage,
        attempt: int,
        restore: CheckpointId | None = None,
        results: str | None = None,
    ) -> RankConfig:
        """Describe the context of one stage's ranks.

        Args:
            stage: which one.
            attempt: of the run.
            restore: the checkpoint that an evaluation restores.
            results: where an evaluation saves its files.
        """
        params = self.params
        config = partial(
            rank_config, params, self.run_id, attempt, stage, self.storage, source=self.source
        )
        if stage == "prepare":
            # What it draws belongs to the dataset, which all seeds share; a seed for it is one of
            # data_options.
            return config(dataset_id=self.dataset_id, options=params.data_options, seed=0)
        return config(
            dataset_id=None if self.source_dataset else self.dataset_id,
            source_dataset=self.source_dataset,
            options={**params.data_options, **params.options},
            resume_from=self.resume_from if stage == "train" else None,
            restore=restore and ResumePoint(self.storage, self.run_id, *restore),
            results=results,
            evaluate_on=params.evaluate_on,
        )


def rank_config(
    params: ContextParams, run_id: str, attempt: int, stage: Stage, storage: Storage, **more: Any
) -> RankConfig:
    """Describe the context of a gang's ranks, as the parameters and what comes on top say."""
    chosen = {
        "options": dict(params.options),
        "seed": params.seed,
        "checkpoint": params.checkpoint,
        "determinism": params.determinism,
        "virtual_ranks": params.virtual_ranks,
        "ledger": params.ledger,
    }
    return RankConfig(run_id, attempt, stage, storage, **{**chosen, **more})


def run_id_of(name: str, prefect_id: UUID) -> str:
    """Name a training so that a person finds it in the storage and in the UI.

    Of Prefect's id, equal for all retries, the last 12 digits count: they are random. The first
    ones are the time, and those of runs that are scheduled together are equal.
    """
    return f"{slug(name)}-{prefect_id.hex[-12:]}"


def slug(name: str) -> str:
    """Return a name as a part of a key."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "run"
