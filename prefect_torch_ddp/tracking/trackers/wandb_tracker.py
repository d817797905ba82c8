"""Weights & Biases as a tracker: one folder for each run, which `wandb sync` uploads.

wandb's offline mode can't add to a folder, and its server replaces what it has of a run by the
folder that is uploaded last. So a folder has the whole history, and is written again from the
start when there is more.
"""

import hashlib
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect_torch_ddp.errors import TrackerError
from prefect_torch_ddp.records.run_record import RunRecord
from prefect_torch_ddp.storage.formats import DAMAGE, WANDB, build
from prefect_torch_ddp.tracking.trackers.facts import evaluated, facts, given
from prefect_torch_ddp.tracking.trackers.history import Mark, Point
from prefect_torch_ddp.tracking.trackers.tracker import TrackerPosition

STATE = "prefect_torch_ddp.json"
"""In a run's folder: what was written there. `wandb sync` doesn't upload it."""
SETTINGS = {
    "console": "off",
    "disable_git": True,
    "host": "",
    "save_code": False,
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
"""Nothing of this process, which trains nothing."""
TAKEN_OVER = {f"WANDB_{name}" for name in ("ENTITY", "JOB_TYPE", "NOTES", "RUN_GROUP", "TAGS")}
"""Variables that say where a run belongs. Others may be meant for the user's own run: its id, its
process, the step from which it continues."""
OWN_NAMES = {"", "_runtime", "_step", "_timestamp"}
"""What wandb has in each row itself."""
MAX_NAME = 128
"""Characters of a project's name."""
_NOT_ALLOWED = re.compile(r"[/\\#?%:]")
"""In the name of a project."""


class WandbTracker:
    """Writes offline runs into `wandb` in a folder, where `wandb sync` looks for them."""

    name = "Weights & Biases"
    is_written_anew = True

    def __init__(self, base: Path) -> None:
        """Load wandb; `open_tracker` checks first that it is installed.

        Args:
            base: the folder for all runs.
        """
        import wandb  # noqa: PLC0415 - optional and heavy

        self._wandb: Any = wandb
        self._all = base / "wandb"
        self._run_id = ""
        self._rows: dict[int, dict[str, float]] = {}
        self._mark: Mark | None = None
        """Of what the folder doesn't have yet; None: it has all."""
        self._unknown: dict[str, Any] = {}
        """Fields that a later version added to the folder's state; they are written back."""

    @property
    def url(self) -> str:
        """The folder of the run."""
        return str(next(iter(self._folders()), ""))

    def open(self, record: RunRecord, metrics: Sequence[str]) -> TrackerPosition:
        """Find the run's folder; see `Tracker`."""
        self._run_id, self._rows, self._mark = record.run_id, defaultdict(dict), None
        self._unknown = {}
        if taken := OWN_NAMES.intersection(metrics):
            msg = f"{self.name} can't have a metric named {min(taken)!r}; report it by another name"
            raise TrackerError(msg)
        with self._errors():
            there = [(folder, *_read_state(folder)) for folder in self._folders()]
        for folder, mark, described, unknown in there:
            self._unknown = unknown
            if any(folder.glob("*.wandb")):
                has_record = described == _described(record)
                return TrackerPosition(mark, dict.fromkeys(metrics, mark.step), has_record)
        return TrackerPosition(None, {})

    def begin_again(self, record: RunRecord) -> None:
        """Do nothing: `describe` replaces the folder; see `Tracker`."""

    def put_mark(self, mark: Mark) -> None:
        """Keep a mark, for the folder that `describe` writes."""
        self._mark = mark

    def send(self, points: Sequence[Point]) -> None:
        """Keep points, for the folder that `describe` writes; of several at a step, the last."""
        for each in points:
            row = self._rows[each.step]
            row[each.metric] = each.value
            row["_timestamp"] = each.time_ms / 1000

    def describe(self, record: RunRecord) -> None:
        """Write the run's folder, if there is something new, and delete those before it."""
        if self._mark is None:
            return
        unfinished = self._all / f".{record.run_id}.unfinished"
        state = self._unknown | {"mark": vars(self._mark), "described": _described(record)}
        shutil.rmtree(unfinished, ignore_errors=True)  # of a sync that was killed
        try:
            with self._errors():
                unfinished.mkdir(parents=True)
                new = self._write(record, unfinished)
                (new / STATE).write_bytes(WANDB.to_bytes(state))
                # A kill between these leaves no folder, and the next sync writes one.
                for number, folder in enumerate(self._folders()):
                    folder.rename(unfinished / f"replaced-{number}")
                new.rename(self._all / new.name)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        self._rows, self._mark = defaultdict(dict), None

    def _write(self, record: RunRecord, base: Path) -> Path:
        """Write all that is known of the run below a folder; return the run's folder there."""
        project = _project(record)
        with _environment(cache=base):
            try:
                run = self._wandb.init(
                    project=project,
                    id=record.run_id,
                    name=record.run_id,
                    config=given(record),
                    dir=base,
                    mode="offline",
                    reinit="create_new",
                    settings=self._wandb.Settings(**SETTINGS),
                )
                for step in sorted(self._rows):
                    run.log(self._rows[step], step=step)
                told = {f"prefect_torch_ddp/{name}": value for name, value in facts(record).items()}
                metrics = {name for row in self._rows.values() for name in row}
                run.summary.update(evaluated(record, metrics) | told)
                run.finish(exit_code=int(record.state in {"failed", "cancelled"}))
            except Exception as error:  # it raises many kinds
                msg = f"wandb can't write run {record.run_id}: {error}"
                raise TrackerError(msg) from error
            finally:
                self._wandb.teardown()  # its process, which would wait for the next run
        if run.id != record.run_id:
            msg = f"wandb's settings give run {record.run_id} the id {run.id}; remove what sets it"
            raise TrackerError(msg)
        return Path(run.settings.sync_dir)

    def _folders(self) -> Iterator[Path]:
        """Yield the folders of the run that were written here."""
        pattern = re.compile(rf"offline-run-\d{{8}}_\d{{6}}-{re.escape(self._run_id)}")
        for found in self._all.glob("offline-run-*"):
            if self._run_id and pattern.fullmatch(found.name) and (found / STATE).exists():
                yield found

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            msg = f"the folder {self._all} of Weights & Biases can't be written: {error}"
            raise TrackerError(msg) from error


@contextmanager
def _environment(cache: Path) -> Iterator[None]:
    """Hide what the environment says of other runs; logs of wandb's own go to `cache`."""
    theirs = {name: value for name, value in os.environ.items() if name.startswith("WANDB_")}
    for name in theirs.keys() - TAKEN_OVER:
        del os.environ[name]
    os.environ["WANDB_CACHE_DIR"] = str(cache / "cache")
    try:
        yield
    finally:
        del os.environ["WANDB_CACHE_DIR"]
        os.environ.update(theirs)


def _project(record: RunRecord) -> str:
    name = os.environ.get("WANDB_PROJECT") or record.experiment
    return _NOT_ALLOWED.sub("-", name)[:MAX_NAME]


def _described(record: RunRecord) -> str:
    """Return a digest of all that a folder has of a run besides its metrics."""
    told = [_project(record), given(record), evaluated(record), facts(record)]
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def _read_state(folder: Path) -> tuple[Mark, str, dict[str, Any]]:
    """Return what was written in a folder: a mark, the digest of the rest, and unknown fields.

    Raises:
        NewerFormatError: a later version wrote it.
        TrackerError: it is damaged.
    """
    path = folder / STATE
    try:
        found = WANDB.from_bytes(path.read_bytes(), str(path))
        return build(Mark, found.pop("mark")), str(found.pop("described")), found
    except DAMAGE as error:
        msg = f"{path} isn't ours, or damaged: delete {folder}, to have it written again"
        raise TrackerError(msg) from error
