"""Results of a run: small typed values that any process can read and print as JSON.

The module is long by its docstrings, of which each has an example.
"""

from collections.abc import Mapping, Sequence
from html import escape
from shlex import quote
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from prefect_torch_ddp.lazy import exported_by

MAX_WORST_SAMPLES = 8
MAX_IMAGE_CHARACTERS = 2800
"""A file of 2,048 bytes, as a data URI."""


@exported_by("prefect_torch_ddp")
class Result(BaseModel):
    """The base of all results: frozen, and an unknown name is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


LabelledRows = Sequence[tuple[str, str]]
"""A result as people see it: a label and its value in each row. Empty values are left out."""


def in_lines(rows: LabelledRows) -> str:
    """Return rows as lines, with the values below one another."""
    return "\n".join(f"{word:<12}{value}" for word, value in rows if value)


def in_table(rows: LabelledRows) -> str:
    """Return rows as an HTML table, with links."""
    shown = [(word, _html(value)) for word, value in rows if value]
    cells = "".join(f"<tr><th>{escape(word)}</th><td>{value}</td></tr>" for word, value in shown)
    return f"<table>{cells}</table>"


def values_in_words(values: Mapping[str, float | None]) -> str:
    """Return named numbers in a line; those that are None are left out."""
    named = (f"{name} {value:.4g}" for name, value in values.items() if value is not None)
    return ", ".join(named)


def count(number: int, word: str) -> str:
    """Return a number of things: `1 rank`, `2 ranks`."""
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def _html(value: str) -> str:
    safe = escape(value)
    is_link = value.startswith(("http://", "https://")) and " " not in value
    return f'<a href="{safe}">{safe}</a>' if is_link else safe


@exported_by("prefect_torch_ddp")
class DatasetReport(Result):
    """What prepare wrote; of a workload without prepare, the Parquet files of its source.

    Example:
        The size of the prepared data, from the report of `train_flow`:

            data = report.dataset
            print(f"{data.num_files} files, {data.num_bytes / 1e6:.1f} MB in {data.uri}")
    """

    dataset_id: str
    """Digest of the workload's prepare, its options and the version of the raw data: the same id,
    the same data. Without prepare, of the source's files."""
    uri: str
    num_files: int
    num_bytes: int
    digest: str
    """sha256 over the names and contents of all files; without prepare, over the source's URI and
    its files' names, sizes and ETags (in a directory, times of their last change)."""


@exported_by("prefect_torch_ddp")
class ClassScore(Result):
    """How well one class was distinguished from the others.

    Example:
        The class that is recognised worst:

            worst = min(report.evaluation.classes, key=lambda score: score.f1)
            print(worst.name, worst.precision, worst.recall, worst.support)
    """

    name: str
    precision: float
    recall: float
    f1: float
    support: int
    """Samples of this class in the evaluated split."""


@exported_by("prefect_torch_ddp")
class WorstSample(Result):
    """A sample with one of the highest losses.

    Example:
        The images on which the model is worst:

            for sample in report.evaluation.worst_samples:
                print(sample.loss, f"{sample.true} was taken for {sample.predicted}")
    """

    loss: float | None
    """None if it was nan or infinite; such samples come first."""
    true: str
    predicted: str
    image: str = Field(
        max_length=MAX_IMAGE_CHARACTERS,
        pattern=r"^data:image/(png|jpeg);base64,[A-Za-z0-9+/]+={0,2}$",
    )
    """A thumbnail, as a data URI: small, since results are stored and sent whole."""


@exported_by("prefect_torch_ddp")
class Report(Result):
    """What evaluate found, exact over the whole split and equal on every rank.

    Example:
        What `evaluate` returns, if you measure by yourself:

            from prefect_torch_ddp import Report

            scores = Report(num_samples=360, accuracy=0.98, metrics={"top5": 0.999})
            print(scores.score)  # accuracy 0.98, top5 0.999 on 360 samples
    """

    num_samples: int
    accuracy: float | None = None
    """Share of correct predictions, 0 to 1."""
    loss: float | None = None
    """Mean over all samples; from a `LanguageMeter`, over all tokens."""
    classes: tuple[ClassScore, ...] = ()
    confusion_matrix: tuple[tuple[int, ...], ...] = ()
    """Row: true class, column: predicted class; square, in the order of `classes`."""
    metrics: dict[str, float] = {}
    """Anything else the workload measured."""
    worst_samples: Annotated[tuple[WorstSample, ...], Field(max_length=MAX_WORST_SAMPLES)] = ()
    """The samples with the highest losses, the worst first."""
    texts: dict[str, str] = {}
    """Texts by title for the run's page, such as what a model generated. The page shows eight texts
    at most, and the first 4,000 characters of each."""

    @property
    def scores(self) -> dict[str, float]:
        """The accuracy, the loss and all metrics by name.

        If there is a loss, a metric that is also named `loss` is `metric.loss`.
        """
        fixed = {"accuracy": self.accuracy, "loss": self.loss}
        found = {name: value for name, value in fixed.items() if value is not None}
        names = {name: f"metric.{name}" if name in found else name for name in self.metrics}
        return found | {names[name]: value for name, value in self.metrics.items()}

    @property
    def score(self) -> str:
        """The numbers in a line: `accuracy 0.9833, loss 0.05214 on 360 samples`."""
        values = values_in_words(self.scores)
        samples = count(self.num_samples, "sample")
        return f"{values} on {samples}" if values else samples

    def __str__(self) -> str:
        return in_lines(self._rows())

    def _repr_html_(self) -> str:
        return in_table(self._rows())

    def _rows(self) -> LabelledRows:
        worst = min(self.classes, key=lambda each: each.f1, default=None)
        lowest = "" if worst is None else f"{worst.name}: F1 {worst.f1:.4g} of {worst.support:,}"
        return [("score", self.score), ("worst class", lowest)]


@exported_by("prefect_torch_ddp")
class EpochRow(Result):
    """One epoch of training: the mean of every metric over its steps and all ranks.

    Values are weighted by their number of samples; those of validation metrics (`val_loss`) all
    have the same weight.

    Example:
        The loss of each epoch:

            for row in report.epochs:
                print(row.epoch, row.metrics["loss"])
    """

    epoch: int
    """Counts from 1."""
    num_steps: int
    """The steps in which a rank reported something: 100 of 1,000 if it reports every tenth."""
    num_samples: int
    """The samples of those steps, on all ranks."""
    metrics: dict[str, float]


@exported_by("prefect_torch_ddp")
class CheckpointRef(Result):
    """A committed checkpoint.

    Example:
        The checkpoint that was evaluated:

            print(report.checkpoint.step, report.checkpoint.metrics, report.checkpoint.uri)
    """

    step: int
    attempt: int
    uri: str
    """The URI of its manifest."""
    metrics: dict[str, float] = {}


@exported_by("prefect_torch_ddp")
class FailedAttempt(Result):
    """A failed attempt that was followed by another one.

    Example:
        Why a training was restarted:

            for failure in report.training.failures:
                print(f"attempt {failure.attempt} failed in step {failure.step}: {failure.summary}")
    """

    attempt: int
    world_size: int
    """Its number of ranks; 0 if it ended before it had its workers."""
    step: int | None
    """The optimizer step in which it failed; None if unknown."""
    summary: str


@exported_by("prefect_torch_ddp")
class TrainingSummary(Result):
    """What the train task returns.

    Example:
        The number of steps, and the value that `train` returned:

            training = report.training
            print(training.num_steps, training.value)
    """

    run_id: str
    attempt: int
    """The attempt that finished; 1 when nothing failed, moved or grew."""
    world_size: int
    """Number of ranks of that attempt. It is smaller than requested if workers were missing and
    `min_world_size` allowed it, and larger if the gang grew by `max_world_size`."""
    num_steps: int
    """Optimizer steps of the training, over all attempts."""
    num_epochs: int
    """Completed epochs, over all attempts."""
    duration_s: float
    """Seconds that the finishing attempt took; `read_goodput` has the time of all attempts."""
    value: dict[str, float | int | str | bool | None]
    """The plain values of the dict that rank 0's train function returned."""
    last_checkpoint: CheckpointRef | None
    best_checkpoint: CheckpointRef | None = None
    model_uris: dict[str, str] = {}
    """URIs of the exported weights of each tracked module, by its name; see
    `TrainReport.model_uri`."""
    resumed_from_step: int | None = None
    """Step of the checkpoint from which the finishing attempt resumed. None: it didn't resume."""
    failures: tuple[FailedAttempt, ...] = ()
    """The attempts that failed before, oldest first. A gang that moved or grew isn't listed."""

    @property
    def model_uri(self) -> str | None:
        """See `TrainReport.model_uri`."""
        only = next(iter(self.model_uris.values())) if len(self.model_uris) == 1 else None
        return self.model_uris.get("model", only)


@exported_by("prefect_torch_ddp")
class EpochLedger(Result):
    """What the ledger holds of one epoch.

    Example:
        The samples that an epoch lacks or repeats:

            from prefect_torch_ddp import read_ledger

            for epoch in read_ledger("runs", run_id).epochs:
                if not epoch.is_clean:
                    print(epoch.epoch, epoch.missing, epoch.repeated)
    """

    epoch: int
    """Counts from 1."""
    num_samples: int
    """Number of different samples that were trained on."""
    num_draws: int = 0
    """Number of draws, by weights or by your own order, that were trained on. A sample may be drawn
    several times, or not at all. 0 if samples aren't drawn, but due once each."""
    num_draws_due: int = 0
    """Number of draws in a whole epoch."""
    num_total: int
    """Number of samples in the dataset; 0 if the record of it is lost."""
    is_finished: bool
    """Whether the epoch was completed. Otherwise it is in progress or was left early."""
    begins_at: int = 0
    """Number of the epoch's samples that were done by the run from which this one started. They
    are in that run's ledger."""
    num_left_out: int = 0
    """Number of samples in the tail that `drop_last` left out."""
    num_missing: int = 0
    """Number of samples, or draws, that were due and weren't trained on."""
    missing: tuple[int, ...] = ()
    """Some of the missing samples' ids; empty if these aren't known."""
    num_repeated: int = 0
    """Number of samples, or draws, that were trained on more than once."""
    repeated: tuple[int, ...] = ()
    """Some of their ids."""
    repeated_in: tuple[int, ...] = ()
    """For each of these ids, the step that used it again."""
    num_unknown: int = 0
    """Number of ids that the dataset doesn't have."""
    unknown: tuple[int, ...] = ()
    """Some of them."""

    @property
    def is_clean(self) -> bool:
        """Whether every sample, or draw, that was due was trained on exactly once."""
        return self.num_total > 0 and not (
            self.num_missing or self.num_repeated or self.num_unknown
        )

    def __str__(self) -> str:
        """Return it as a line: `epoch 3: 1,437 samples, each once`."""
        num, what = (self.num_draws, "draws") if self.num_draws else (self.num_samples, "samples")
        due = self.num_draws_due if self.num_draws else self.num_total
        parts = [f"{num:,} {what}" + ("" if self.is_finished else f" of {due:,}")]
        parts[0] += ", each once" if self.is_clean else ""
        parts += [f"of {self.num_samples:,} different samples"] if self.num_draws else []
        parts += [] if self.num_total else ["the record of its dataset is lost"]
        again = ", ".join(
            f"{item} in step {step}"
            for item, step in zip(self.repeated, self.repeated_in, strict=True)
        )
        for num, word, which in (
            (self.num_missing, "missing", ", ".join(map(str, self.missing))),
            (self.num_repeated, "repeated", again),
            (self.num_unknown, "that the dataset doesn't have", ", ".join(map(str, self.unknown))),
        ):
            some = f" ({which}{', ...' if num > which.count(',') + 1 else ''})" if which else ""
            parts += [f"{num:,} {word}{some}"] if num else []
        parts += [f"{self.num_left_out:,} left out by drop_last"] if self.num_left_out else []
        parts += [f"{self.begins_at:,} done by the run it started from"] if self.begins_at else []
        parts += [] if self.is_finished else ["not finished"]
        return f"epoch {self.epoch}: {'; '.join(parts)}"


@exported_by("prefect_torch_ddp")
class LedgerReport(Result):
    """The result of checking a run's ledger: which samples it trained on.

    Example:
        Was each sample used once in each epoch?

            from prefect_torch_ddp import read_ledger

            ledger = read_ledger("runs", run_id)
            print(ledger.is_clean)
            print(ledger)  # epoch 1: 1,294 samples, each once
    """

    run_id: str
    epochs: tuple[EpochLedger, ...]
    attempts: dict[int, int] = {}
    """The number of ranks of each attempt whose steps count."""

    @property
    def is_clean(self) -> bool:
        """Whether there is a ledger, and it has every due sample exactly once in each epoch."""
        return bool(self.epochs) and all(epoch.is_clean for epoch in self.epochs)

    def __str__(self) -> str:
        """Return a line for each epoch."""
        if not self.epochs:
            return f"run {self.run_id} has no ledger: ctx.steps keeps one with ledger=True"
        return "\n".join(map(str, self.epochs))


@exported_by("prefect_torch_ddp")
class Goodput(Result):
    """Where a training's wall time went, in seconds, over all its attempts.

    The parts are measured on the rank that the others wait for. They add up to `wall_s`.

    Example:
        What share of the time went into steps, and what failures cost:

            from prefect_torch_ddp import read_goodput

            goodput = read_goodput("runs", run_id)
            print(f"{goodput.share:.0%} of {goodput.wall_s:.0f} s, {goodput.redone_s:.0f} s redone")
    """

    run_id: str
    num_attempts: int
    wall_s: float
    """From the start of the first attempt to the end of the last one; while it trains, to the last
    record."""
    steps_s: float = 0.0
    """Useful optimizer steps: forward, backward, waiting for peers, the update."""
    redone_s: float = 0.0
    """Lost work: from the checkpoint from which a later attempt resumed to the failure."""
    starting_s: float = 0.0
    """Processes, imports, the rendezvous, the code before `ctx.steps`, and compiling. If an
    attempt failed before a rank wrote anything, all of its time, including the wait for workers."""
    restoring_s: float = 0.0
    checkpoints_s: float = 0.0
    """Time for which checkpoints paused the training."""
    validation_s: float = 0.0
    """An estimate: by how much the body of an epoch's last step takes longer than another step."""
    queueing_s: float = 0.0
    """Waiting for workers, and the time between a failure and the next attempt."""
    data_s: float = 0.0
    """Waiting for the next batch."""
    other_s: float = 0.0
    """Code after the last `ctx.steps`; all code of a rank that never begins one, such as your own
    loop."""
    core_hours: float = 0.0
    """Hours times the processors that the ranks could use, from their launch to their last record.
    A processor that several ranks of a host may use counts once. In a batch job these processors
    are usually the job's own. 0 if they aren't known."""
    gpu_hours: float = 0.0
    """Hours times the GPUs of the ranks, in the same way."""

    @property
    def share(self) -> float:
        """Share of the wall time spent in useful steps, 0 to 1."""
        return self.steps_s / self.wall_s if self.wall_s > 0 else 0.0


@exported_by("prefect_torch_ddp")
class TrainReport(Result):
    """What train_flow returns.

    Example:
        The scores, and the weights for plain PyTorch:

            print(report.evaluation.accuracy, report.model_uri)
    """

    run_id: str
    flow_run_url: str | None
    dataset: DatasetReport
    training: TrainingSummary
    epochs: tuple[EpochRow, ...]
    evaluation: Report
    checkpoint: CheckpointRef
    """The checkpoint that was evaluated."""
    ledger: LedgerReport | None = None
    """Which samples were trained on, with `ledger=True`."""
    report_uri: str | None = None
    """URI of the report, an HTML file; None if it couldn't be written."""

    @property
    def model_uri(self) -> str | None:
        """URI of the evaluated checkpoint's weights for plain PyTorch, without `module.` in names.

        The file has the weights of the module that was tracked as `model`, or else of the only
        tracked module. It is model.safetensors, or model.pt if safetensors can't hold the state;
        model.json is in the same folder. None if there is no such module. `training.model_uris`
        has the URIs of all modules.
        """
        return self.training.model_uri

    def __str__(self) -> str:
        return in_lines(self._rows())

    def _repr_html_(self) -> str:
        return in_table(self._rows())

    def _rows(self) -> LabelledRows:
        done = self.training
        steps = f"{count(done.num_steps, 'step')} in {count(done.num_epochs, 'epoch')}"
        last = done.failures[-1] if done.failures else None
        failed = f"{count(len(done.failures), 'attempt')}, last: " if last else ""
        attempt = f" in attempt {done.attempt}" if done.attempt > 1 else ""
        again = f'TrainParams(..., resume_from="{self.run_id}")'
        storage = quote(self.checkpoint.uri.rpartition("/runs/")[0])
        command = f"prefect-torch-ddp resume {self.run_id} -o NAME=VALUE --storage {storage}"
        return [
            ("score", self.evaluation.score),
            ("trained", f"{steps} on {count(done.world_size, 'rank')}"),
            ("took", f"{done.duration_s:,.1f} s{attempt}"),
            ("failed", failed + (last.summary.partition("\n")[0] if last else "")),
            ("samples", "" if self.ledger is None else _in_a_line(self.ledger)),
            ("run", self.run_id),
            ("model", self.model_uri or ""),
            ("checkpoint", f"step {self.checkpoint.step}"),
            ("report", self.report_uri or ""),
            ("in Prefect", self.flow_run_url or ""),
            ("continue", f"{again} or: {command}"),
        ]


def _in_a_line(ledger: LedgerReport) -> str:
    if ledger.is_clean:
        return "each trained on once in each epoch"
    odd = [str(each) for each in ledger.epochs if not each.is_clean]
    return odd[0] if odd else str(ledger)
