"""Owns what a person chooses for a run: frozen, described, validated before any work starts."""

import re
from types import ModuleType
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from prefect_torch_ddp.errors import InvalidParamsError

DEFAULT_STORAGE = "~/prefect-torch-ddp"
Determinism = Literal["default", "elastic"]
"""elastic: a training's bits are the same for every number of ranks that divides
`virtual_ranks`."""


def _at(position: int) -> dict[str, JsonValue]:
    """Fix a field's place in Prefect's run form, which is mixed otherwise."""
    return {"position": position}


def _module_name(value: object) -> object:
    return value.__name__ if isinstance(value, ModuleType) else value


class Params(BaseModel):
    """The base of all parameter models: frozen, and an unknown name is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ClusterParams(Params):
    """Which Dask cluster trains.

    Nothing given: a local one, made for the run and gone after it.
    """

    address: str | None = Field(
        default=None,
        description="Address of a running Dask scheduler, e.g. tcp://10.0.0.1:8786. Excludes cluster_class.",
        json_schema_extra=_at(0),
    )
    cluster_class: str | None = Field(
        default=None,
        description="Import path of a cluster class to start for the run, e.g. dask_jobqueue.SLURMCluster. Excludes address.",
        json_schema_extra=_at(1),
    )
    cluster_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the cluster class (or of the local cluster).",
        json_schema_extra=_at(2),
    )
    adapt_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the cluster's adapt, e.g. {'minimum': 4, 'maximum': 4}: then Dask starts lost workers anew.",
        json_schema_extra=_at(3),
    )

    @model_validator(mode="after")
    def _refuse_impossible_pairs(self) -> Self:
        if self.address and (self.cluster_class or self.cluster_kwargs or self.adapt_kwargs):
            msg = "cluster.address names a running cluster; leave cluster_class and cluster_kwargs empty with it, and adapt_kwargs"
            raise ValueError(msg)
        return self


class CheckpointParams(Params):
    """When checkpoints are written and which are kept."""

    every_steps: PositiveInt | None = Field(
        default=None,
        description="Write one every so many optimizer steps.",
        json_schema_extra=_at(0),
    )
    every_s: PositiveFloat | None = Field(
        default=60.0, description="Write one every so many seconds.", json_schema_extra=_at(1)
    )
    keep_last: PositiveInt = Field(
        default=2, description="How many of the newest are kept.", json_schema_extra=_at(2)
    )
    keep_best: int = Field(
        default=1,
        ge=0,
        description="How many of the best by best_metric are kept.",
        json_schema_extra=_at(3),
    )
    best_metric: str | None = Field(
        default=None,
        description="A metric that the training reports, e.g. validation_accuracy.",
        json_schema_extra=_at(4),
    )
    best_mode: Literal["max", "min"] = Field(
        default="max",
        description="Whether a larger or a smaller value is better.",
        json_schema_extra=_at(5),
    )
    on_failure: Literal["warn", "fail"] = Field(
        default="warn",
        description="What a training does when a checkpoint can't be written; its last one must be.",
        json_schema_extra=_at(6),
    )


class TrainParams(Params):
    """Everything one run of train-ddp is told."""

    workload: Annotated[str, BeforeValidator(_module_name)] = Field(
        default="flows.digits",
        description="Module (or module:object) with the functions prepare, train and evaluate.",
        json_schema_extra=_at(0),
    )
    world_size: PositiveInt = Field(
        default=2, description="How many ranks train together.", json_schema_extra=_at(1)
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the workload's train and evaluate.",
        json_schema_extra=_at(2),
    )
    data_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the workload's prepare; part of its cache key, and seen by train and evaluate too.",
        json_schema_extra=_at(3),
    )
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Seeds everything random.", json_schema_extra=_at(4)
    )
    storage: str = Field(
        default=DEFAULT_STORAGE,
        min_length=1,
        description="Where data, checkpoints, metrics, results go: a directory, s3://bucket/prefix, or a block (s3-bucket/name).",
        json_schema_extra=_at(5),
    )
    cluster: ClusterParams = Field(
        default_factory=ClusterParams,
        description="Which Dask cluster trains.",
        json_schema_extra=_at(6),
    )
    ranks_per_worker: PositiveInt = Field(
        default=1,
        description="Ranks on each Dask worker; more than one for a worker with several GPUs.",
        json_schema_extra=_at(7),
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto",
        description="Collectives library; auto takes nccl where CUDA is, else gloo.",
        json_schema_extra=_at(8),
    )
    checkpoint: CheckpointParams = Field(
        default_factory=CheckpointParams,
        description="When checkpoints are written, which are kept.",
        json_schema_extra=_at(9),
    )
    evaluate_on: Literal["last", "best"] = Field(
        default="last",
        description="Which checkpoint is evaluated and published.",
        json_schema_extra=_at(10),
    )
    retries: int = Field(
        default=2,
        ge=0,
        description="How often Prefect retries a failed training; it resumes.",
        json_schema_extra=_at(11),
    )
    retry_delay_s: float = Field(
        default=5.0, ge=0, description="Seconds before a retry.", json_schema_extra=_at(12)
    )
    max_restarts: int = Field(
        default=2,
        ge=0,
        description="How often a failed training is restarted at once, on warm workers, before Prefect's retries count.",
        json_schema_extra=_at(13),
    )
    min_world_size: PositiveInt | None = Field(
        default=None,
        description="How few ranks will do while workers are missing; empty: no fewer than world_size.",
        json_schema_extra=_at(14),
    )
    workers_timeout_s: PositiveFloat = Field(
        default=60.0,
        description="Seconds to wait until the cluster has enough workers.",
        json_schema_extra=_at(15),
    )
    queue_timeout_s: PositiveFloat | None = Field(
        default=None,
        description="Seconds to wait for workers that are busy; empty: no limit.",
        json_schema_extra=_at(16),
    )
    resume_from: str | None = Field(
        default=None,
        description="Run whose newest checkpoint this one starts from: its id, or <storage>/runs/<id> of another storage; "
        "a certain checkpoint with /checkpoints/step-00000400 after it.",
        json_schema_extra=_at(17),
    )
    progress_timeout_s: PositiveFloat | None = Field(
        default=60.0,
        description="Seconds without progress in a step after which a training counts as hung and is retried; empty: never.",
        json_schema_extra=_at(18),
    )

    stop_grace_s: PositiveFloat = Field(
        default=20.0,
        description="Seconds that a cancelled training gets to stop at one step and write its checkpoint; Prefect gives it 30.",
        json_schema_extra=_at(19),
    )
    determinism: Determinism = Field(
        default="default",
        description="elastic: the same weights, to the last bit, for every number of ranks that divides virtual_ranks.",
        json_schema_extra=_at(20),
    )
    virtual_ranks: PositiveInt | None = Field(
        default=None,
        description="The most ranks that the training may ever have, for determinism elastic.",
        json_schema_extra=_at(21),
    )
    ledger: bool = Field(
        default=False,
        description="Put on record which samples each step trains on; the report says whether each was used once.",
        json_schema_extra=_at(22),
    )
    source: str | None = Field(
        default=None,
        min_length=1,
        description="Raw data, for ctx.source: a directory, s3://bucket/prefix or a block; prepare runs anew when it changes.",
        json_schema_extra=_at(23),
    )

    @model_validator(mode="after")
    def _refuse_impossible_pairs(self) -> Self:
        if self.evaluate_on == "best" and self.checkpoint.best_metric is None:
            msg = "evaluate_on is 'best', but checkpoint.best_metric is empty: name the metric, or use evaluate_on='last'"
            raise ValueError(msg)
        if self.evaluate_on == "best" and self.checkpoint.keep_best == 0:
            msg = "evaluate_on is 'best', but checkpoint.keep_best is 0: keep at least one"
            raise ValueError(msg)
        if self.min_world_size is not None and self.min_world_size > self.world_size:
            sizes = f"min_world_size is {self.min_world_size} and world_size {self.world_size}"
            msg = f"{sizes}; give a min_world_size of at most world_size"
            raise ValueError(msg)
        check_virtual_ranks(self.determinism, self.virtual_ranks, self.world_size)
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*)?", self.workload):
            msg = f"workload is {self.workload!r}; write it as package.module or package.module:object"
            raise ValueError(msg)
        return self


def check_virtual_ranks(
    determinism: str, virtual_ranks: int | None, world_size: int | None = None
) -> None:
    """Refuse a kind of determinism and numbers of ranks that don't fit together.

    Args:
        determinism: the kind that was chosen.
        virtual_ranks: how many, for elastic determinism.
        world_size: how many ranks there are to be; None: not known yet.

    Raises:
        InvalidParamsError: says which, and what to give.
    """
    if determinism not in get_args(Determinism):
        msg = f"determinism is {determinism!r}; choose one of {', '.join(get_args(Determinism))}"
    elif determinism == "default" and virtual_ranks is not None:
        msg = f"virtual_ranks is {virtual_ranks}, which needs determinism='elastic'"
    elif determinism == "elastic" and (virtual_ranks is None or virtual_ranks < 1):
        given = "empty" if virtual_ranks is None else virtual_ranks
        most = "give the most ranks that the training may ever have"
        msg = f"determinism is 'elastic', but virtual_ranks is {given}: {most}"
    elif virtual_ranks is not None and world_size is not None and virtual_ranks % world_size:
        sizes = f"virtual_ranks is {virtual_ranks} and world_size {world_size}"
        msg = f"{sizes}; give a world_size that divides virtual_ranks"
    else:
        return
    raise InvalidParamsError(msg)
