"""TensorBoard as a tracker: a folder of event files for each run, which get each step once."""

import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prefect_torch_ddp.errors import TrackerError
from prefect_torch_ddp.records.run_record import RunRecord, flat
from prefect_torch_ddp.storage.formats import DAMAGE, TENSORBOARD, build
from prefect_torch_ddp.tracking.trackers.event_file import EventFile, scalar, text
from prefect_torch_ddp.tracking.trackers.facts import evaluated, given
from prefect_torch_ddp.tracking.trackers.history import Mark, Point
from prefect_torch_ddp.tracking.trackers.tracker import TrackerPosition

STATE = "prefect_torch_ddp.json"
"""In a run's folder: the mark, and which part of the event file was written when."""
EVENTS, OURS = "events.out.tfevents.", ".prefect-torch-ddp"
"""How the names of event files begin, and how those of ours end."""


@dataclass
class _State:
    """What is kept of a run's folder, in its file STATE."""

    file: str
    """The event file's name."""
    num_bytes: int
    """Of the event file, as far as it is complete."""
    last_steps: dict[str, int] = field(default_factory=dict)
    """By metric."""
    mark: Mark | None = None
    unknown: dict[str, Any] = field(default_factory=dict)
    """Fields that a later version added; they are written back."""


class TensorboardTracker:
    """Writes below a folder, in which each run has a folder of its id.

    Once steps were taken back, the run has one that ends in `-2`, and so on, which replaces the
    one before.
    """

    name = "TensorBoard"
    is_written_anew = False

    def __init__(self, base: Path) -> None:
        """Make it; nothing is opened yet.

        Args:
            base: the folder for all runs.
        """
        self._base = self._folder = base
        self._opened: _State | None = None
        self._metrics: Sequence[str] = ()

    @property
    def url(self) -> str:
        """The folder of the run."""
        return "" if self._opened is None else str(self._folder)

    def open(self, record: RunRecord, metrics: Sequence[str]) -> TrackerPosition:
        """Find the run's newest folder, or make its first; see `Tracker`."""
        self._metrics = metrics
        with self._errors():
            first = 1, self._base / record.run_id
            self._folder = max(self._folders(record.run_id), default=first)[1]
            self._opened = state = _read_state(self._folder)
            if state is None:
                self._begin(record)
                return TrackerPosition(None, {})
            # What was written after the state, by a sync that was killed.
            for tag, step in self._file.scalars_after(state.num_bytes):
                state.last_steps[tag] = max(step, state.last_steps.get(tag, -1))
        return TrackerPosition(state.mark, dict(state.last_steps))

    def begin_again(self, record: RunRecord) -> None:
        """Begin another folder; `describe` deletes the one before it; see `Tracker`."""
        with self._errors():
            number = max(self._folders(record.run_id))[0] + 1
            self._folder = self._base / f"{record.run_id}-{number}"
            self._begin(record)

    def put_mark(self, mark: Mark) -> None:
        """Keep a mark in the run's folder."""
        with self._errors():
            self._state.mark = mark
            self._write_state()

    def send(self, points: Sequence[Point]) -> None:
        """Append points; of several points of a metric at a step, the last; see `Tracker`."""
        newest = {(each.metric, each.step): each for each in points}.values()
        self._append_scalars(
            (each.metric, each.value, each.step, each.time_ms / 1000) for each in newest
        )

    def describe(self, record: RunRecord) -> None:
        """Add the evaluation, once; delete the folders that this one replaces; see `Tracker`."""
        if record.ended is not None:
            at = record.num_steps or 0, record.ended.timestamp()
            values, there = evaluated(record, self._metrics), self._state.last_steps
            self._append_scalars(
                (name, value, *at) for name, value in values.items() if name not in there
            )
        with self._errors():
            self._write_state()
            for _, folder in self._folders(record.run_id):
                if folder != self._folder:
                    self._delete(folder)

    @property
    def _state(self) -> _State:
        assert self._opened is not None, "open() comes first"
        return self._opened

    @property
    def _file(self) -> EventFile:
        return EventFile(self._folder / self._state.file)

    def _begin(self, record: RunRecord) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.glob(f"{EVENTS}*{OURS}"):
            left.unlink()  # of a first sync that was killed
        began_s = record.began.timestamp()
        file = f"{EVENTS}{int(began_s)}.{socket.gethostname()}{OURS}"
        num_bytes = EventFile(self._folder / file).make(began_s)
        self._opened = _State(file, num_bytes)
        self._append([text("parameters", _parameters(record), began_s)])
        self._write_state()

    def _append_scalars(self, values: Iterable[tuple[str, float, int, float]]) -> None:
        """Append values of metrics: name, value, step and Unix time."""
        if found := list(values):
            self._append([scalar(*each) for each in found])
            self._state.last_steps |= {name: step for name, _, step, _ in found}

    def _append(self, events: Sequence[Any]) -> None:
        with self._errors():
            self._state.num_bytes = self._file.append(events)

    def _delete(self, folder: Path) -> None:
        """Delete what this tracker wrote in a folder, if it can be read; other files stay."""
        state = _read_state(folder)
        if state is not None:
            (folder / state.file).unlink(missing_ok=True)
            (folder / STATE).unlink()
            with suppress(OSError):
                folder.rmdir()

    def _write_state(self) -> None:
        # What the state says of the file has to outlive this machine if the state does.
        self._file.sync()
        path = self._folder / STATE
        new = path.with_suffix(".new")
        with new.open("wb") as file:
            values = asdict(self._state)
            file.write(TENSORBOARD.to_bytes(values.pop("unknown") | values))
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)

    def _folders(self, run_id: str) -> list[tuple[int, Path]]:
        """Return the folders that a run has, with their numbers, from 1."""
        pattern = re.compile(rf"{re.escape(run_id)}(?:-(\d+))?")
        there = self._base.iterdir() if self._base.is_dir() else ()
        matches = ((pattern.fullmatch(found.name), found) for found in there)
        return [(int(match[1] or 1), found) for match, found in matches if match]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            msg = f"TensorBoard's folder {self._folder} can't be written: {error}"
            raise TrackerError(msg) from error


def _read_state(folder: Path) -> _State | None:
    """Return what is kept of a folder; None: nothing.

    Raises:
        NewerFormatError: a later version wrote it.
        TrackerError: it is damaged.
    """
    path = folder / STATE
    try:
        found = TENSORBOARD.from_bytes(path.read_bytes(), str(path))
        known = {name: found.pop(name) for name in ("file", "num_bytes", "last_steps", "mark")}
        if known["mark"] is not None:
            known["mark"] = build(Mark, known["mark"])
        if Path(known["file"]).name != known["file"]:
            msg = f"its file {known['file']!r} is outside of its folder"
            raise ValueError(msg)
    except FileNotFoundError:
        return None
    except DAMAGE as error:
        msg = f"{path} isn't ours, or damaged: delete {folder}, to have it written again"
        raise TrackerError(msg) from error
    return _State(**known, unknown=found)


def _parameters(record: RunRecord) -> str:
    values = flat(given(record))
    lines = [f"| {name} | {str(value).replace('|', '/')} |" for name, value in values]
    return "\n".join(["| parameter | value |", "|---|---|", *lines])
