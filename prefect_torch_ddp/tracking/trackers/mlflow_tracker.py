"""MLflow as a tracker: one of its runs holds what a run of ours has on record."""

import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic_core import from_json, to_json

from prefect_torch_ddp.errors import TrackerError
from prefect_torch_ddp.records.hiding import without_credentials
from prefect_torch_ddp.records.run_record import RunRecord, flat
from prefect_torch_ddp.storage.formats import DAMAGE
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tracking.trackers.facts import evaluated, facts, given, series_names
from prefect_torch_ddp.tracking.trackers.history import Mark, Point
from prefect_torch_ddp.tracking.trackers.mlflow_models import (
    NAME_VARIABLE,
    RUN_TAG,
    RegisteredModels,
)
from prefect_torch_ddp.tracking.trackers.tracker import TrackerPosition

REPLACED_TAG = "prefect_torch_ddp.replaced_run_id"
MARK_TAG = "prefect_torch_ddp.mark"
CAUSE_TAG = "prefect_torch_ddp.cause"
STATUS = {
    "training": "RUNNING",
    "completed": "FINISHED",
    "failed": "FAILED",
    "cancelled": "KILLED",
}
MAX_PARAMS, MAX_NAME, MAX_PARAM = 100, 250, 6000
"""Of a request, and the characters of one's name and value."""
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")
"""In names of MLflow's metrics and parameters."""


class MlflowTracker:
    """Talks to the server, or opens the database, that `MLFLOW_TRACKING_URI` names."""

    name = "MLflow"
    is_written_anew = False

    def __init__(self, storage: Storage) -> None:
        """Load MLflow's client; `open_tracker` checks first that it is installed.

        Args:
            storage: of the runs, whose models are registered if `MLFLOW_REGISTERED_MODEL_NAME` is
                set.
        """
        import mlflow  # noqa: PLC0415 - optional and heavy

        self._mlflow: Any = mlflow
        self._names: dict[str, str] = {}
        """MLflow's names of the metrics, by ours."""
        self._run: Any = None
        name = os.environ.get(NAME_VARIABLE)
        with self._errors():  # a client opens the database, or refuses the address
            self._client: Any = mlflow.MlflowClient()
            self._models = RegisteredModels(mlflow, storage, name) if name else None

    @property
    def url(self) -> str:
        """Of MLflow's page of the run; empty if MLflow has no server."""
        uri = self._mlflow.get_tracking_uri().rstrip("/")
        if self._run is None or not uri.startswith("http"):
            return ""
        info = self._run.info
        return without_credentials(f"{uri}/#/experiments/{info.experiment_id}/runs/{info.run_id}")

    def open(self, record: RunRecord, metrics: Sequence[str]) -> TrackerPosition:
        """Find the run by its tag, or begin it; see `Tracker`."""
        self._names = series_names(self.name, metrics, _allowed_name)
        with self._errors():
            experiment_id = self._experiment_id(record)
            tagged = f"tags.`{RUN_TAG}` = '{record.run_id}'"
            found = self._client.search_runs([experiment_id], tagged)
            if len(found) > 1:
                ids = ", ".join(run.info.run_id for run in found)
                are = f"MLflow has {len(found)} runs of run {record.run_id}"
                msg = f"{are}: {ids}; delete all but one"
                raise TrackerError(msg)
            if not found:
                self._begin(record, experiment_id)
                return TrackerPosition(None, {})
            # A search may answer with less of a run than it has.
            self._run = self._client.get_run(found[0].info.run_id)
        last = {each.key: each.step for each in self._run.data.to_proto().metrics}
        steps = {ours: last[theirs] for ours, theirs in self._names.items() if theirs in last}
        return TrackerPosition(_mark(self._run.data.tags.get(MARK_TAG)), steps)

    def begin_again(self, record: RunRecord) -> None:
        """Set the run aside: MLflow can't delete points; see `Tracker`."""
        info = self._run.info
        with self._errors():
            self._client.set_tag(info.run_id, REPLACED_TAG, record.run_id)
            self._client.delete_tag(info.run_id, RUN_TAG)
            self._client.set_terminated(info.run_id, "KILLED")
            self._begin(record, info.experiment_id)

    def put_mark(self, mark: Mark) -> None:
        """Keep a mark as a tag of the run."""
        value = to_json({"step": mark.step, "digest": mark.digest}).decode()
        with self._errors():
            self._client.set_tag(self._run.info.run_id, MARK_TAG, value)

    def send(self, points: Sequence[Point]) -> None:
        """Add points; see `Tracker`."""
        entity = self._mlflow.entities.Metric
        metrics = [
            entity(self._names[each.metric], each.value, each.time_ms, each.step) for each in points
        ]
        with self._errors():
            self._client.log_batch(self._run.info.run_id, metrics=metrics)

    def describe(self, record: RunRecord) -> None:
        """Take over what the record says; see `Tracker`."""
        with self._errors():
            self._put_params(record)
            self._put_evaluation(record)
            self._put_tags(record)
            self._put_status(record)
            if self._models is not None:
                # Last: it fails if a model's files are gone, and all else has been sent then.
                self._models.register(record, self._run)

    def _experiment_id(self, record: RunRecord) -> str:
        # As mlflow.start_run has it: the environment's experiment, else one of our name.
        settings = self._mlflow.environment_variables
        if given := settings.MLFLOW_EXPERIMENT_ID.get():
            return str(given)
        name = settings.MLFLOW_EXPERIMENT_NAME.get() or record.experiment
        if (found := self._client.get_experiment_by_name(name)) is not None:
            return str(found.experiment_id)
        return str(self._client.create_experiment(name))

    def _begin(self, record: RunRecord, experiment_id: str) -> None:
        about = {"tags": {RUN_TAG: record.run_id}, "run_name": record.run_id}
        self._run = self._client.create_run(experiment_id, _ms(record.began), **about)

    def _put_params(self, record: RunRecord) -> None:
        """Add those that MLflow hasn't: it never changes one."""
        there, param = self._run.data.params, self._mlflow.entities.Param
        new = [param(name, value) for name, value in _params(record) if name not in there]
        for first in range(0, len(new), MAX_PARAMS):
            some = new[first : first + MAX_PARAMS]
            self._client.log_batch(self._run.info.run_id, params=some)

    def _put_evaluation(self, record: RunRecord) -> None:
        if record.ended is None:
            return
        entity, at = self._mlflow.entities.Metric, (_ms(record.ended), record.num_steps or 0)
        there = self._run.data.metrics
        metrics = [
            entity(name, value, *at)
            for name, value in evaluated(record, self._names, _allowed_name).items()
            if there.get(name) != value
        ]
        if metrics:
            self._client.log_batch(self._run.info.run_id, metrics=metrics)

    def _put_tags(self, record: RunRecord) -> None:
        there, tags = self._run.data.tags, _tags(record)
        for name, value in tags.items():
            if there.get(name) != value:
                self._client.set_tag(self._run.info.run_id, name, value)
        if CAUSE_TAG in there and CAUSE_TAG not in tags:  # what failed was tried again
            self._client.delete_tag(self._run.info.run_id, CAUSE_TAG)

    def _put_status(self, record: RunRecord) -> None:
        info, status, ended = self._run.info, STATUS[record.state], record.ended
        if status == info.status:
            return
        if status == "RUNNING" or ended is None:
            self._client.update_run(info.run_id, status=status)
        else:
            self._client.set_terminated(info.run_id, status, _ms(ended))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (self._mlflow.MlflowException, OSError) as error:
            where = without_credentials(self._mlflow.get_tracking_uri())
            reason = without_credentials(str(error).partition("\n")[0])
            msg = f"MLflow at {where} failed: {reason}"
            raise TrackerError(msg) from error


def _allowed_name(name: str) -> str:
    allowed = _NOT_ALLOWED.sub("_", name)
    # MLflow keeps what has a name in a file of that path, which has to be within a folder.
    if posixpath.normpath(allowed) != allowed or allowed == "." or allowed.startswith(("..", "/")):
        return re.sub(r"[./]", "_", allowed) or "_"
    return allowed


def _params(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield names, each once, and values: MLflow refuses all if two have one name."""
    # In an order that each sync has: those that keep their names come first.
    pairs = sorted(flat(given(record)), key=lambda each: (_short(each[0]) != each[0], each[0]))
    taken, numbers = set[str](), dict[str, int]()
    for name, value in pairs:
        unique = short = _short(name)
        while unique in taken:
            numbers[short] = numbers.get(short, 1) + 1
            end = f".{numbers[short]}"
            unique = f"{short[: MAX_NAME - len(end)]}{end}"
        taken.add(unique)
        yield unique, str(value)[:MAX_PARAM]


def _short(name: str) -> str:
    return _allowed_name(name)[:MAX_NAME]


def _tags(record: RunRecord) -> dict[str, str]:
    tags = {
        f"prefect_torch_ddp.{_allowed_name(name)}": value for name, value in facts(record).items()
    }
    commit = {"mlflow.source.git.commit": record.commit} if record.commit else {}
    return {**tags, **commit}


def _mark(text: str | None) -> Mark | None:
    try:
        values = from_json(text or "null")
        return None if values is None else Mark(int(values["step"]), str(values["digest"]))
    except DAMAGE as error:
        msg = f"the tag {MARK_TAG} of MLflow's run isn't ours: {text!r}; delete that run"
        raise TrackerError(msg) from error


def _ms(moment: Any) -> int:
    return int(moment.timestamp() * 1000)
