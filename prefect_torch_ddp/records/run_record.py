"""The run record: what ran, of which code and data, on what, and what came of it; kept as JSON.

Records have their own prefix, by experiment and time, so that one listing finds those of
all runs and the previous one is found without reading them all.
"""

import logging
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, Self

from pydantic import AwareDatetime, PrivateAttr
from pydantic_core import from_json, to_json

from prefect_torch_ddp.errors import InvalidParamsError, NewerFormatError, StorageError
from prefect_torch_ddp.records.non_finite import as_given, as_stored
from prefect_torch_ddp.records.reading import contents
from prefect_torch_ddp.results import CheckpointRef, DatasetReport, Goodput, Report, Result
from prefect_torch_ddp.storage.formats import (
    DAMAGE,
    RUN_RECORD,
    Unknown,
    build_model,
    location,
    restore_unknown,
)
from prefect_torch_ddp.storage.protocol import Storage, StoredObject

RunState = Literal["training", "completed", "failed", "cancelled"]
PREFIX = "run-records/"
OF_ANY_KIND = ("parameters", "options", "data_options", "arguments", "value")
"""The fields of a record with values that their own code chose."""
_NON_FINITE, _AS_TEXTS = "non_finite", "texts"
"""The stored field that says that those values are as `as_stored` made them."""
FLOW_RUN = "flow-run:"
"""In `resume_from`, before the id of a flow run that crashed, and whose training is to be continued
or begun again; `deployments/resume_crashed.py` writes it."""
UNUSABLE = "can't be evaluated or resumed by its record"

logger = logging.getLogger(__name__)


class AttemptRecord(Result):
    """One attempt to train: its ranks, and how it ended."""

    attempt: int
    world_size: int
    began: AwareDatetime
    """When its workers were reserved."""
    ended: AwareDatetime | None = None
    """None while it trains, and if the process that ran it was killed."""
    step: int | None = None
    """The optimizer step it failed in, or was at last; None before the first."""
    cause: str = ""
    """How it failed, in a line; empty if it finished."""
    hosts: tuple[str, ...] = ()
    """Of each rank, in rank order."""
    devices: tuple[str, ...] = ()
    """Of each rank, e.g. `cpu`; known at the end of the last attempt of a task run."""


class RunRecord(Result):
    """What is kept of a run of `train_flow` or a `ddp_task`; holds no secrets."""

    run_id: str
    experiment: str
    """What its runs have in common: the flow, its deployment if it has one, and the workload, e.g.
    `train-ddp/nightly/flows.land_use`; of a `ddp_task` its module and name, e.g.
    `cats/nightly/flows.cats/fit`, with the run_key if it has one (`fit:fold-1`)."""
    workload: str
    """Module, perhaps with an object; of a `ddp_task` its function."""
    state: RunState = "training"
    """A run whose process was killed stays at `training`."""
    cause: str = ""
    """Why it failed or was cancelled, in a line."""
    is_tried_again: bool = False
    """Whether Prefect retries the task that failed, so that this isn't the run's end."""
    began: AwareDatetime
    ended: AwareDatetime | None = None
    """When the training ended, over all attempts."""
    flow_run_id: str | None = None
    task_run_id: str | None = None
    storage: str
    """The storage's URI."""
    parameters: Mapping[str, Any] = {}
    """All but the options; what is no plain value, or is long, is named by its type and a digest,
    without a digest if it can't be pickled."""
    options: Mapping[str, Any] = {}
    data_options: Mapping[str, Any] = {}
    arguments: Mapping[str, Any] = {}
    """Of the call, if a `ddp_task` was called with some."""
    seed: int = 0
    weights_from: str | None = None
    """The run whose weights this one began with, by `resume_from="best"`."""
    began_from: str | None = None
    """What `resume_from` chose to begin from, as it names a run, if it was `latest` or a flow run
    that crashed; None if there was nothing."""
    commit: str | None = None
    """Of the repository that the workload's source is in; None if it is in none."""
    is_dirty: bool = False
    """Whether files of that repository differed from the commit."""
    versions: Mapping[str, str] = {}
    """By distribution: Python, this package, what it stands on, and what the workload imports."""
    dataset: DatasetReport | None = None
    split: Mapping[str, int] = {}
    """Files in each folder at the top of the dataset, such as train, val and test."""
    attempts: tuple[AttemptRecord, ...] = ()
    num_steps: int | None = None
    num_epochs: int | None = None
    metrics: Mapping[str, float] = {}
    """The last values, each the mean over the ranks at its last step."""
    best_metric: str | None = None
    """By which checkpoints are the best."""
    best_mode: Literal["max", "min"] = "max"
    """Which of its values are."""
    best_value: float | None = None
    """Of `best_metric`, in the checkpoint that is best by it."""
    checkpoint: CheckpointRef | None = None
    """The one that was evaluated, or else the newest."""
    model_uris: Mapping[str, str] = {}
    value: Any = None
    """What rank 0's function returned, if it is plain."""
    evaluation: Report | None = None
    """Without the confusion matrix and the worst samples: whole experiments are listed."""
    goodput: Goodput | None = None
    _unknown: Unknown = PrivateAttr(default=())

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Read a stored record; raises as `Format.from_bytes`."""
        values = RUN_RECORD.check(from_json(data), where)
        if values.pop(_NON_FINITE, None) == _AS_TEXTS:  # earlier versions marked no texts
            values |= {name: as_given(values[name]) for name in OF_ANY_KIND if name in values}
        record, unknown = build_model(cls, values)
        record.keep(unknown)
        return record

    def to_bytes(self) -> bytes:
        """Return it as it is stored, with what a later version of this package wrote there."""
        # Through JSON's own values: pydantic would make null of a float in a nested model that JSON
        # lacks.
        fields = restore_unknown(self.json_fields(), self._unknown)
        stamped = RUN_RECORD.stamp({_NON_FINITE: _AS_TEXTS, **fields})
        return to_json(stamped, indent=1, inf_nan_mode="strings")

    def json_fields(self) -> dict[str, Any]:
        """Return its fields as JSON has them, but floats in typed ones that JSON lacks."""
        # Pydantic would make null of such a float where a value is of any kind.
        changes = {name: as_stored(getattr(self, name)) for name in OF_ANY_KIND}
        return self.model_copy(update=changes).model_dump(mode="json")

    @property
    def continues_from(self) -> str | None:
        """What `resume_from` is to be to continue this run; None: it begins from the start.

        Until its first checkpoint that is what it began from itself. `latest` and `best` would
        choose among the runs of whoever repeats them, and of the best run only the weights are
        loaded.
        """
        if self.checkpoint is not None:
            return self.run_id
        given = self.parameters.get("resume_from")
        is_named = isinstance(given, str) and not is_choice(given)
        return given if is_named else self.began_from

    @property
    def unknown(self) -> Unknown:
        """What a later version of this package wrote into the record that was read."""
        return self._unknown

    def keep(self, unknown: Unknown) -> None:
        """Write that back with this record."""
        self._unknown = unknown

    @property
    def is_of_flow(self) -> bool:
        """Whether it is a run of `train_flow`, not of a `ddp_task`."""
        return "workload" in self.parameters

    @property
    def has_trained(self) -> bool:
        """Whether its training ended well, whatever came after it."""
        last = self.attempts[-1] if self.attempts else None
        return last is not None and last.ended is not None and not last.cause

    @property
    def is_finished(self) -> bool:
        """Whether nothing of it is left to do.

        A run of `train_flow`, which has a dataset, is evaluated after its training. If its flow is
        killed meanwhile, its record stays at `completed`, without an evaluation.
        """
        return self.state == "completed" and (self.evaluation is not None or self.dataset is None)

    @property
    def is_over(self) -> bool:
        """Whether its training has ended, and its task isn't retried.

        A retry of the whole flow may still continue it. A run whose process was killed isn't over.
        """
        return self.state != "training" and not self.is_tried_again

    @property
    def key(self) -> str:
        """Where it is in the storage."""
        return f"{_folder(self.experiment)}{_text_of(self.began)}-{self.run_id}.json"

    @property
    def duration_s(self) -> float | None:
        """Seconds from its begin to its end, with everything that lies between its attempts."""
        return None if self.ended is None else (self.ended - self.began).total_seconds()

    def found_in(self, storage: Storage) -> Self:
        """Return the record with its models' URIs where they are now: its storage may have moved.

        Args:
            storage: in which the record was found.
        """
        keys = {name: uri.rpartition("/runs/")[2] for name, uri in self.model_uris.items()}
        uris = {name: location(storage, f"runs/{key}") for name, key in keys.items()}
        return self.model_copy(update={"model_uris": uris})


def is_choice(resume_from: str) -> bool:
    """Whether `resume_from` chooses among earlier runs, and names none itself."""
    return resume_from in {"latest", "best"} or resume_from.startswith(FLOW_RUN)


def write_run_record(storage: Storage, record: RunRecord) -> None:
    """Write a record, in the place of the one of the same run; raises StorageError."""
    storage.write(record.key, record.to_bytes())


def read_run_record(storage: Storage, run_id: str, experiment: str | None = None) -> RunRecord:
    """Return a run's record.

    Args:
        storage: where the run is.
        run_id: whose record.
        experiment: if it is known, so that no others are listed.

    Raises:
        InvalidParamsError: there is none, or it is damaged.
        NewerFormatError: it is of a newer format.
        StorageError: the storage can't be read.
    """
    found = _stored(storage, experiment)
    if mine := [each for each in found if _run_id_of(each.key) == run_id]:
        for record in read_run_records(storage, mine):
            return record
        msg = f"the record of run {run_id} is damaged: {mine[0].key} in {storage.uri}"
    else:
        where = f"{storage.uri} among its {len(found)} records below {PREFIX}"
        msg = f"there is no record of run {run_id!r} in {where}; list_runs shows those there are"
    raise InvalidParamsError(msg)


def recorded_dataset(record: RunRecord) -> DatasetReport:
    """Return the dataset of a run of train_flow, which an evaluation and a resume need.

    Raises:
        InvalidParamsError: it isn't a run of train_flow, or ended before its data was prepared.
    """
    if record.dataset is not None:
        return record.dataset
    why = "it ended before its data was prepared; train it from the start"
    if not record.is_of_flow:
        again = f"call its task again, with resume_from={record.run_id!r}"
        why = f"it isn't a run of train_flow; to resume it, {again}"
    msg = f"run {record.run_id} {UNUSABLE}: {why}"
    raise InvalidParamsError(msg)


def find_run_record(storage: Storage, run_id: str, experiment: str) -> RunRecord | None:
    """Return a run's record; None if there is none that can be read."""
    try:
        return read_run_record(storage, run_id, experiment)
    except InvalidParamsError:
        return None


def list_run_records(storage: Storage, experiment: str | None = None) -> list[RunRecord]:
    """Return the records of all runs, of one experiment if it is given, newest first.

    Damaged ones are left out, with a warning.

    Raises:
        NewerFormatError: one is of a newer format.
        StorageError: the storage can't be read.
    """
    records = read_run_records(storage, _stored(storage, experiment))
    kept = [each for each in records if experiment in (None, each.experiment)]
    return sorted(kept, key=lambda record: record.began, reverse=True)


def newest_runs(storage: Storage, experiment: str, most: int) -> list[RunRecord]:
    """Return an experiment's newest runs, newest first.

    Raises:
        NewerFormatError: one is of a newer format.
        StorageError: the storage can't be read.
    """
    stored = sorted(_stored(storage, experiment), key=lambda each: each.key, reverse=True)
    found = read_run_records(storage, stored[:most])
    return [each for each in found if each.experiment == experiment]


def run_records_since(
    storage: Storage, experiment: str, moment: datetime, known: Container[str]
) -> Iterator[RunRecord]:
    """Yield the records of an experiment's runs that began at a moment or later.

    Args:
        storage: where they are.
        experiment: of the runs.
        moment: aware of its time zone; to the second.
        known: keys of records that are left out.

    Raises:
        NewerFormatError: one is of a newer format.
        StorageError: the storage can't be read.
    """
    first = f"{_folder(experiment)}{_text_of(moment)}"
    stored = [each for each in _stored(storage, experiment) if each.key >= first]
    found = read_run_records(storage, [each for each in stored if each.key not in known])
    yield from (each for each in found if each.experiment == experiment)


def run_records_below(storage: Storage, name: str, moment: datetime) -> Iterator[RunRecord]:
    """Yield the records of runs since a moment, of experiments whose names begin with a name.

    Records of experiments with similar names may be among them.

    Raises:
        NewerFormatError: one is of a newer format.
        StorageError: the storage can't be read.
    """
    first = _text_of(moment)
    found = [each for each in storage.list(_folder(name).removesuffix("/")) if _is_json(each)]
    yield from read_run_records(storage, [e for e in found if e.key.rpartition("/")[2] >= first])


def run_ids(storage: Storage) -> list[str]:
    """Return the ids of all runs that have a record, newest first; raises StorageError."""
    names = [each.key.rpartition("/")[2] for each in _stored(storage, None)]
    return [_run_id_of(name) for name in sorted(names, reverse=True)]


def previous_run(storage: Storage, record: RunRecord) -> RunRecord | None:
    """Return the run to compare a run with: its experiment's newest completed one before it.

    Of a run that began with the weights of another one it is that one.

    Raises:
        StorageError: the storage can't be read.
    """
    of_all = _stored(storage, record.experiment)
    stored = [each for each in of_all if _run_id_of(each.key) != record.run_id]
    origin = [each for each in stored if _run_id_of(each.key) == record.weights_from]
    if (found := next(read_run_records(storage, origin), None)) is not None:
        return found
    for each in sorted(stored, key=lambda each: each.key, reverse=True):
        for old in read_run_records(storage, [each]):
            is_of_it = (old.experiment, old.state) == (record.experiment, "completed")
            if is_of_it and old.began < record.began:
                return old
    return None


def read_run_records(storage: Storage, stored: Sequence[StoredObject]) -> Iterator[RunRecord]:
    """Yield what can be read of some records, in their order, and warn of what can't.

    Raises:
        NewerFormatError: one is of a newer format: the run that is looked for may be that one.
    """
    for each, data in zip(stored, contents(storage, stored), strict=True):
        try:
            if isinstance(data, StorageError):
                data = storage.read(each.key)  # noqa: PLW2901 - it may have been rewritten since
            yield RunRecord.from_bytes(data, location(storage, each.key))
        except NewerFormatError:
            raise
        except (StorageError, *DAMAGE) as error:
            reason = str(error).partition("\n")[0]
            logger.warning("the run record %s can't be read and is left out: %s", each.key, reason)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values by their dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _stored(storage: Storage, experiment: str | None) -> list[StoredObject]:
    prefix = PREFIX if experiment is None else _folder(experiment)
    return [each for each in storage.list(prefix) if _is_json(each)]


def _is_json(stored: StoredObject) -> bool:
    return stored.key.endswith(".json")


def _folder(experiment: str) -> str:
    # Two experiments may share a folder: the record itself has the whole name.
    return f"{PREFIX}{re.sub(r'[^a-z0-9]+', '-', experiment.lower()).strip('-')[:100] or 'run'}/"


def _text_of(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")


def _run_id_of(key: str) -> str:
    return key.rpartition("/")[2].partition("-")[2].removesuffix(".json")
