"""Owns what a run gives back: small typed values that any process can read and print as JSON."""

from pydantic import BaseModel, ConfigDict


class Result(BaseModel):
    """The base of all results: frozen, and an unknown name is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DatasetReport(Result):
    """What prepare wrote."""

    dataset_id: str
    """Digest of the workload's prepare, its options and its source version: the same id, the same data."""
    uri: str
    num_files: int
    num_bytes: int
    digest: str
    """sha256 over the names and contents of all files."""


class ClassScore(Result):
    """How well one class was told from the others."""

    name: str
    precision: float
    recall: float
    f1: float
    support: int
    """Samples of this class in the evaluated split."""


class Report(Result):
    """What evaluate found, exact over the whole split and equal on every rank."""

    num_samples: int
    accuracy: float | None = None
    """Share of right answers, 0 to 1."""
    loss: float | None = None
    """Mean over all samples."""
    classes: tuple[ClassScore, ...] = ()
    confusion_matrix: tuple[tuple[int, ...], ...] = ()
    """Row: true class, column: predicted class; square, in the order of `classes`."""
    metrics: dict[str, float] = {}
    """Anything else the workload measured."""


class EpochRow(Result):
    """One epoch of training: every metric averaged over all samples of all ranks."""

    epoch: int
    """Counts from 1."""
    num_steps: int
    num_samples: int
    metrics: dict[str, float]


class CheckpointRef(Result):
    """A committed checkpoint."""

    step: int
    attempt: int
    uri: str
    """The manifest's place."""
    metrics: dict[str, float] = {}


class FailedAttempt(Result):
    """An attempt to train that failed, and was followed by another."""

    attempt: int
    world_size: int
    """Its number of ranks; 0 where it ended before it had its workers."""
    step: int | None
    """The optimizer step it failed in, where that is known."""
    summary: str


class TrainingReport(Result):
    """What the train task gives back."""

    run_id: str
    attempt: int
    """The attempt that finished; 1 when nothing failed."""
    world_size: int
    """Of that attempt: fewer than asked for when workers were missing and `min_world_size` allowed it."""
    num_steps: int
    num_epochs: int
    duration_s: float
    value: dict[str, float | int | str | bool | None]
    """The plain values of the dict that rank 0's train function returned."""
    last_checkpoint: CheckpointRef | None
    best_checkpoint: CheckpointRef | None = None
    model_uri: str | None = None
    """The exported weights; None where no model was tracked."""
    resumed_from_step: int | None = None
    failures: tuple[FailedAttempt, ...] = ()
    """What went wrong before, oldest first."""


class TrainReport(Result):
    """What train_flow returns."""

    run_id: str
    flow_run_url: str | None
    dataset: DatasetReport
    training: TrainingReport
    epochs: tuple[EpochRow, ...]
    evaluation: Report
    checkpoint: CheckpointRef
    """The one that was evaluated."""
    model_uri: str | None
    """The evaluated checkpoint's weights for plain PyTorch on any machine, without `module.`: model.safetensors, or model.pt
    where safetensors can't hold the state; model.json is beside it. None where no model was tracked."""
