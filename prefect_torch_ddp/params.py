"""The parameters of gangs, tasks and flows: each option, its type, default and meaning, once.

The module is long by the texts of options, from which `help`, the manual and the form are made.
"""

import ipaddress
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal, Self, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from typing_extensions import TypedDict  # what Prefect's are, to be joined with ours

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.option_lines import add_option_lines
from prefect_torch_ddp.protocol.metric_names import Direction, direction
from prefect_torch_ddp.protocol.rank import Backend, Launcher, ProcessGroupMode
from prefect_torch_ddp.refusals import with_near_names
from prefect_torch_ddp.run_form import arrange

Determinism = Literal["default", "elastic"]
TrackerName = Literal["mlflow", "tensorboard", "wandb"]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _text_of_path(value: "str | os.PathLike[str]") -> str:
    """Return a path as the text that names it, and not a Prefect block of the same letters."""
    if not isinstance(value, os.PathLike):
        return value
    text = os.fspath(value)
    # One with a colon may have been a URI, which is told so.
    is_whole = text.startswith(("/", "~")) or ":" in text
    return text if is_whole else f"./{text}"


Reference = Annotated[str, BeforeValidator(_text_of_path), Field(min_length=1)]
"""A path, a URI or a block that names a storage; a `pathlib.Path` is accepted too."""


@exported_by("prefect_torch_ddp")
class Params(BaseModel):
    """The base of all parameter models: frozen, and an unknown name is an error.

    An unknown name or an invalid value raises pydantic's ValidationError, which is a ValueError.
    `read_options`, `ddp_task` and `run_gang` raise InvalidParamsError instead.

    Example:
        The options of your own workload:

            from prefect_torch_ddp import Params, read_options

            class Options(Params):
                lr: float = 0.1

            print(read_options(Options, {"lr": 0.5}).lr)
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, json_schema_extra=arrange
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """List the options in the class's docstring, for `help`."""
        super().__pydantic_init_subclass__(**kwargs)
        if cls.__doc__:
            add_option_lines(cls, cls, cls.model_fields)

    @model_validator(mode="wrap")
    @classmethod
    def _name_the_near_one(cls, given: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return check(given)
        except ValidationError as error:
            if any(fault["type"] == "extra_forbidden" for fault in error.errors()):
                raise with_near_names(error, cls) from None
            raise


@exported_by("prefect_torch_ddp")
class GangOptions(TypedDict, total=False):
    """Options of a gang by keyword, as `run_gang` and `ddp_task` take them and explain them.

    Example:
        A function of yours that hands its options on:

            from typing import Any, Unpack
            from distributed import Client
            from prefect_torch_ddp import GangOptions, run_gang

            def run_patiently(client: Client, fn: Any, **options: Unpack[GangOptions]) -> list[Any]:
                options.setdefault("workers_timeout_s", 3600)
                return run_gang(client, fn, **options)
    """

    ranks_per_worker: int | None
    backend: Backend
    min_world_size: int | None
    max_world_size: int | None
    max_restarts: int
    workers_timeout_s: float
    queue_timeout_s: float | None
    rendezvous_timeout_s: float
    collective_timeout_s: float | None
    progress_timeout_s: float | None
    stop_grace_s: float
    resources: Mapping[str, float] | None
    interface: str | None
    launcher: Launcher
    preload: tuple[str, ...] | None


@exported_by("prefect_torch_ddp")
class GangParams(Params):
    """How a gang is placed, started, watched and stopped."""

    world_size: Count | None = None
    """Number of ranks; None takes `ranks_per_worker` for each worker."""
    ranks_per_worker: Count | None = None
    """Number of ranks on each Dask worker; more than one for a worker with several GPUs. Empty: 1.
    On the local cluster that `train_flow` starts by itself, all ranks are on its one worker, unless
    `cluster` or `min_world_size` is set."""
    backend: Backend = "auto"
    """Collectives library. auto: if every rank has its own GPU, nccl for CUDA tensors and gloo for
    CPU tensors; otherwise only gloo, for example if ranks share a GPU."""
    min_world_size: Count | None = None
    """Smallest acceptable number of ranks while workers are missing: at the start after
    `workers_timeout_s`, at a restart after 10 s. Empty: `world_size`."""
    max_world_size: Count | None = None
    """Largest number of ranks, at least `world_size`. While a training in `ctx.steps` has fewer,
    free workers are added at its start and after each checkpoint, without using up a restart.
    Empty: the training doesn't grow."""
    max_restarts: CountOrZero = 0
    """Largest number of times that a failed gang is restarted immediately, on warm workers, before
    one of Prefect's retries is used. A cancel, an ImportError, SyntaxError or InvalidParamsError,
    and the same exception at the same step twice in a row are not tried again; an OSError, lack of
    memory or an error of CUDA always is."""
    workers_timeout_s: Seconds = 60.0
    """Seconds to wait until the cluster has enough workers. `train_flow` waits for the first worker
    for the same time, except with `cluster_class`: a queued job may take any time."""
    queue_timeout_s: Seconds | None = None
    """Seconds to wait for workers that are busy. Empty: no limit."""
    rendezvous_timeout_s: Seconds = 300.0
    """Seconds that ranks wait for one another at the start."""
    collective_timeout_s: Seconds | None = None
    """Seconds until a collective of the process group fails because a rank doesn't come: `timeout`
    of torch's `init_process_group`. Raise it if one rank alone works for long while the others
    wait. Empty: torch's default, which is 30 minutes, and 10 with NCCL."""
    # A function without a RankContext makes no steps, so nobody knows how long it may be quiet.
    progress_timeout_s: Seconds | None = None
    """A gang ends as hung if no rank makes progress for so many seconds. Progress is a step, a
    collective, a report or `report_progress()`. While ranks use the CPU or the disk, the limit is
    ten times as long. Empty: no limit."""
    stop_grace_s: Seconds = 20.0
    """Limit in seconds for cancelled ranks to stop after the same step and save it. Choose less
    than 30, since Prefect kills the process of a cancelled run after 30 s. If no rank has begun
    `ctx.steps` or called `ctx.due`, the ranks are killed immediately."""
    resources: Mapping[str, float] | None = None
    """Dask resources that the gang reserves on each of its workers, e.g. `{"GPU": 1}`. Workers
    without them aren't used."""
    interface: str | None = None
    """Network that the ranks use: an interface's name (`ib0`) or a network in CIDR notation
    (`10.1.0.0/16`; `::/0` is any IPv6 one). Empty: the address by which Dask knows each worker."""
    launcher: Launcher = "auto"
    """How ranks are started. auto: fork them from the warm fork server of each Dask worker, in
    milliseconds, if that is safe. exec: start a new Python process for each."""
    preload: tuple[str, ...] | None = None
    """Installed packages that each fork server imports once, before it forks ranks, e.g.
    `("transformers",)`, so that ranks start sooner. All ranks then share what the package read from
    the environment, and the random numbers that it drew, at import. Empty: PIL and torchvision,
    each if the function's module, or the workload, imports it at the top of its file, above all
    imports of your own modules and all code that runs something."""

    def check_has_group(self, process_group: ProcessGroupMode) -> None:
        """Refuse a limit for collectives of a process group that isn't ours."""
        instead = {
            "user": "your code makes the group; give init_process_group the timeout",
            "none": "there is no group; leave it out",
        }
        if self.collective_timeout_s is not None and process_group in instead:
            given = f"collective_timeout_s is {self.collective_timeout_s:g}"
            msg = f'{given}, but with process_group="{process_group}" {instead[process_group]}'
            raise ValueError(msg)

    def options_of_gang(self) -> GangOptions:
        """Return the options that `run_gang` takes by keyword."""
        return cast(
            "GangOptions", {name: getattr(self, name) for name in GangOptions.__annotations__}
        )

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, given: Mapping[str, float] | None) -> Mapping[str, float] | None:
        if not all(0 < amount < math.inf for amount in (given or {}).values()):
            msg = f"resources is {given!r}; give positive amounts by name, e.g. {{'GPU': 1}}"
            raise ValueError(msg)
        return given

    @field_validator("interface")
    @classmethod
    def _check_interface(cls, given: str | None) -> str | None:
        hint = "give an interface's name, e.g. 'ib0', or a network, e.g. '10.1.0.0/16' or '::/0'"
        if given == "":
            msg = f"interface is ''; {hint}"
            raise ValueError(msg)
        if given is not None and "/" in given:
            try:
                ipaddress.ip_network(given, strict=False)
            except ValueError as error:
                msg = f"interface is {given!r}, which is no network ({error}); {hint}"
                raise ValueError(msg) from error
        return given

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        least, wanted = self.min_world_size, self.world_size
        if least is not None and wanted is not None and least > wanted:
            sizes = f"min_world_size is {least} and world_size {wanted}"
            msg = f"{sizes}; give a min_world_size of at most world_size"
            raise ValueError(msg)
        most, at_start = self.max_world_size, wanted or least or 1
        if most is not None and most < at_start:
            name = "world_size" if wanted else "min_world_size"
            sizes = f"max_world_size is {most} and {name} {at_start}"
            msg = f"{sizes}; give a max_world_size of at least {name}"
            raise ValueError(msg)
        return self


COUNTED_INTERVALS = {"every_steps": "step", "every_epochs": "epoch"}
"""The intervals of CheckpointParams that count something, by field, and what they count."""


@exported_by("prefect_torch_ddp")
class CheckpointParams(Params):
    """When checkpoints are written and which are kept.

    Example:
        A checkpoint for each epoch; the last two and the best three are kept:

            from prefect_torch_ddp import CheckpointParams, TrainParams

            often = CheckpointParams(every_epochs=1, keep_best=3, best_metric="validation_accuracy")
            params = TrainParams(checkpoint=often)
    """

    every_s: Seconds | Literal["auto"] | None = "auto"
    """Seconds between two checkpoints. auto: 2 to 60 s, adapted during the training so that
    checkpoints cost at most 1 % of its time (a larger share only if a single one costs more than
    0.6 s). Empty: no checkpoints by time."""
    every_steps: Count | None = None
    """A checkpoint after every so many optimizer steps, in addition to those by time."""
    every_epochs: Count | None = None
    """A checkpoint at the end of every so many epochs (1: of each), in addition to the others."""
    keep_last: Count = 2
    """How many of the newest checkpoints are kept. During a training with every_s=auto, up to 15
    more (two with every_steps or every_epochs) are kept for 30 s, so that an evaluation can still
    read the one that it found."""
    keep_best: CountOrZero = 1
    """How many of the best checkpoints by best_metric are kept in addition."""
    best_metric: str | None = None
    """A metric that the training reports, e.g. validation_accuracy."""
    best_mode: Literal["auto", "max", "min"] = "auto"
    """Whether a larger or a smaller value is better. auto: as the metric's name says, a smaller one
    of a loss or an error, else a larger one."""
    on_failure: Literal["warn", "fail"] = "warn"
    """What a training does if a checkpoint can't be written: warn and continue, or fail. If the
    last checkpoint can't be written, the training fails in any case."""
    compare_replicas: bool = True
    """Whether the ranks' weights are compared at each checkpoint. If they differ, the checkpoint
    isn't written and the attempt fails. A restart or retry resumes from the previous checkpoint."""

    @model_validator(mode="after")
    def _check_best(self) -> Self:
        if self.keep_best > 1 and self.best_metric is None:
            msg = (
                f"keep_best is {self.keep_best}, but nothing says which checkpoints are the best; "
                "give best_metric, e.g. 'validation_accuracy'"
            )
            raise ValueError(msg)
        return self

    @property
    def has_interval(self) -> bool:
        """Whether checkpoints are made during a training without being asked for."""
        return any(getattr(self, name) for name in ("every_s", *COUNTED_INTERVALS))

    @property
    def best_is(self) -> Direction:
        """Whether the best value is the largest or the smallest."""
        if self.best_mode != "auto":
            return self.best_mode
        return direction(self.best_metric or "") or "max"


@exported_by("prefect_torch_ddp")
class ContextOptions(GangOptions, total=False):
    """Options of a training by keyword, as `ddp_task` takes them; see ContextParams."""

    storage: str | os.PathLike[str]
    seed: int
    options: Mapping[str, Any]
    checkpoint: CheckpointParams
    resume_from: str | None
    determinism: Determinism
    virtual_ranks: int | None
    ledger: bool
    trackers: Sequence[TrackerName]


@exported_by("prefect_torch_ddp")
class ContextParams(GangParams):
    """The parameters of a gang whose function takes a RankContext."""

    progress_timeout_s: Seconds | None = 60.0
    """An attempt ends as hung if no rank makes progress for so many seconds. Progress is a step, a
    collective, a report or `report_progress()`. Within a step, the limit is ten times as long while
    ranks use the CPU or the disk. Outside of steps, for example in a validation, it is ten times as
    long for idle ranks, and ranks that work have no limit. Empty: no limit."""
    storage: Reference = "~/prefect-torch-ddp"
    """Where data, checkpoints, metrics and results go: a directory, s3://bucket/prefix, or a block
    (s3-bucket/name)."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of all random generators."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Available to the ranks as ctx.options."""
    checkpoint: CheckpointParams = Field(default_factory=CheckpointParams)
    """When checkpoints are written, which are kept."""
    resume_from: str | None = None
    """The run from whose newest checkpoint this run starts: its id, or its URI in another storage,
    `s3://bucket/prefix/runs/ID`; append `/checkpoints/step-00000400` for a certain checkpoint.
    Or latest or best, which choose among the runs of this deployment, flow and workload (or task).
    latest: the newest run that ended unfinished and has a checkpoint, if no later run finished.
    best: the best completed run by `checkpoint.best_metric` (without one, the newest), of which
    only the weights of modules are loaded. If there is no such run, the training starts from the
    beginning. Or `flow-run:ID`, a flow run of Prefect that crashed: its newest checkpoint, or what
    it was to begin from if it has none."""
    determinism: Determinism = "default"
    """elastic: the same weights, to the last bit, for every number of ranks that divides
    virtual_ranks; requires ctx.micro_batches."""
    virtual_ranks: Count | None = None
    """Largest number of ranks that the training may ever have, for determinism elastic."""
    ledger: bool = False
    """Whether to record the samples that each step trains on. `read_ledger` checks the record, and
    the report, of a ddp_task its log, says whether each sample was used once."""
    trackers: Annotated[
        Sequence[TrackerName], AfterValidator(lambda given: tuple(dict.fromkeys(given)))
    ] = ()
    """Experiment trackers, of "mlflow", "tensorboard" and "wandb", that a process next to the flow
    keeps up to date with the run. Their settings are read from the environment of the flow, such as
    MLFLOW_TRACKING_URI, TENSORBOARD_LOGGING_DIR and WANDB_DIR."""

    @model_validator(mode="after")
    def _check_determinism(self) -> Self:
        check_virtual_ranks(self.determinism, self.virtual_ranks, self.world_size)
        return self


@exported_by("prefect_torch_ddp")
class ClusterParams(Params):
    """Which Dask cluster trains; by default a local one that lives as long as the run.

    Example:
        Train on a cluster that already runs:

            from prefect_torch_ddp import ClusterParams, TrainParams

            params = TrainParams(cluster=ClusterParams(address="tcp://10.0.0.1:8786"))
    """

    address: str | None = None
    """Address of a running Dask scheduler, e.g. tcp://10.0.0.1:8786. Excludes cluster_class."""
    scheduler_file: str | None = None
    """File that `dask scheduler --scheduler-file` writes, in place of the address. A run waits for
    it for workers_timeout_s."""
    cluster_class: str | None = None
    """Import path of a cluster class to start for the run, e.g. dask_jobqueue.SLURMCluster.
    Excludes address."""
    cluster_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the cluster class (or of the local cluster)."""
    adapt_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the cluster's adapt, e.g. {'minimum': 4, 'maximum': 4}: then Dask replaces lost
    workers."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_text(cls, given: Any) -> Any:
        if isinstance(given, str):
            msg = f'cluster is {given!r}; name a running one by cluster={{"address": "{given}"}}'
            raise ValueError(msg)  # noqa: TRY004 - a TypeError pydantic would pass on
        return given

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.address and self.scheduler_file:
            msg = "cluster.address and cluster.scheduler_file both name a cluster: give only one"
            raise ValueError(msg)
        if self.is_running and (self.cluster_class or self.cluster_kwargs or self.adapt_kwargs):
            name = "address" if self.address else "scheduler_file"
            others = "cluster_class and cluster_kwargs empty with it, and adapt_kwargs"
            msg = f"cluster.{name} names a running cluster; leave {others}"
            raise ValueError(msg)
        return self

    @property
    def is_running(self) -> bool:
        """Whether somebody else starts and stops the cluster."""
        return bool(self.address or self.scheduler_file)


def _module_name(value: object) -> object:
    if callable(value):
        msg = (
            f"workload is {getattr(value, '__name__', value)}; give the name of the module that "
            "has prepare, train and evaluate; in a notebook, write `%%writefile my_workload.py` "
            "above their cell"
        )
        raise ValueError(msg)  # noqa: TRY004 - a TypeError pydantic would pass on
    return value.__name__ if isinstance(value, ModuleType) else value


@exported_by("prefect_torch_ddp")
class TrainParams(ContextParams):
    """All parameters of `train_flow`, which Prefect calls train-ddp.

    Example:
        Four ranks that start from the last unfinished run:

            from prefect_torch_ddp import TrainParams

            params = TrainParams(
                workload="prefect_torch_ddp.examples.digits",
                world_size=4,
                storage="s3://bucket/prefix",
                options={"epochs": 20, "lr": 0.01},
                resume_from="latest",
            )
    """

    # What people touch comes first; the form has no groups but models within models.
    first_in_form: ClassVar[tuple[str, ...]] = (
        "workload",
        "world_size",
        "options",
        "data_options",
        "source",
        "storage",
        "resume_from",
        "seed",
        "checkpoint",
        "cluster",
    )

    workload: Annotated[str, BeforeValidator(_module_name)] = "prefect_torch_ddp.examples.digits"
    """Module (or module:object) with the functions prepare, train and evaluate. With a source of
    Parquet files it needs no prepare."""
    world_size: Count = 2  # a local cluster is made for it, so it can't be left open
    """How many ranks train together."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the workload's train and evaluate."""
    data_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the workload's prepare. They are part of its cache key; train and evaluate see
    them too."""
    source: Reference | None = None
    """Raw data, for ctx.source: a directory, s3://bucket/prefix, a block, or the https:// address
    of one file of at most 4 GiB, perhaps with #sha256=... at its end. prepare runs again when the
    data change."""
    cluster: ClusterParams = Field(default_factory=ClusterParams)
    """Which Dask cluster trains."""
    evaluate_on: Literal["last", "best"] = "last"
    """Which checkpoint is evaluated and published."""
    retries: CountOrZero = 2
    """How often Prefect retries a failed training; each retry resumes."""
    retry_delay_s: Annotated[float, Field(ge=0)] = 5.0
    """Seconds before a retry."""
    max_restarts: CountOrZero = 2  # a workload resumes; any other function would run twice
    """Largest number of times that a failed training is restarted immediately, on warm workers,
    before one of Prefect's retries is used."""

    @model_validator(mode="after")
    def _check_train(self) -> Self:
        if self.evaluate_on == "best" and self.checkpoint.best_metric is None:
            hint = "name the metric that decides, or use evaluate_on='last'"
            msg = f"evaluate_on is 'best', but checkpoint.best_metric is empty: {hint}"
            raise ValueError(msg)
        if self.evaluate_on == "best" and self.checkpoint.keep_best == 0:
            msg = "evaluate_on is 'best', but checkpoint.keep_best is 0: keep at least one"
            raise ValueError(msg)
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*)?", self.workload):
            hint = "write it as package.module or package.module:object"
            if "/" in self.workload:
                file = PurePath(self.workload.removesuffix(".py"))
                is_below = not {"/", "..", "~"} & set(file.parts)
                hint = (
                    f"change to its folder, {file.parent}, and give its module's name, {file.name}"
                )
                if is_below:
                    hint = f"give its module's name: {'.'.join(file.parts)}"
            msg = f"workload is {self.workload!r}; {hint}"
            raise ValueError(msg)
        return self


def check_virtual_ranks(
    determinism: str, virtual_ranks: int | None, world_size: int | None = None
) -> None:
    """Refuse a determinism and numbers of ranks that don't fit together.

    Raises:
        InvalidParamsError: says which, and what to give.
    """
    sizes = f"virtual_ranks is {virtual_ranks} and world_size {world_size}"
    most = "give the most ranks that the training may ever have"
    if determinism not in get_args(Determinism):
        msg = f"determinism is {determinism!r}; choose one of {', '.join(get_args(Determinism))}"
    elif determinism == "default" and virtual_ranks is not None:
        msg = f"virtual_ranks is {virtual_ranks}, which needs determinism='elastic'"
    elif determinism == "elastic" and not (virtual_ranks and virtual_ranks > 0):
        given = "empty" if virtual_ranks is None else virtual_ranks
        msg = f"determinism is 'elastic', but virtual_ranks is {given}: {most}"
    elif virtual_ranks is not None and world_size is not None and virtual_ranks % world_size:
        msg = f"{sizes}; give a world_size that divides virtual_ranks"
    else:
        return
    raise InvalidParamsError(msg)
