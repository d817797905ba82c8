"""TensorBoard's files have each step once, whoever is killed while they are written."""

import json
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from prefect_torch_ddp.checkpoint.keys import manifest_key
from prefect_torch_ddp.errors import InvalidParamsError, NewerFormatError, TrackerError
from prefect_torch_ddp.records.run_record import read_run_record
from prefect_torch_ddp.results import Report
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tracking.trackers import sync
from prefect_torch_ddp.tracking.trackers.event_file import EventFile, scalar
from prefect_torch_ddp.tracking.trackers.follow import follow_run
from prefect_torch_ddp.tracking.trackers.known import open_tracker, tensorboard_folder
from prefect_torch_ddp.tracking.trackers.sync import sync_run
from prefect_torch_ddp.tracking.trackers.tensorboard_tracker import STATE, TensorboardTracker
from tests.support.formats import MORE, NEWER, rewrite
from tests.support.records import Shelf, record
from tests.support.reported import BEGAN, RUN, checkpoint, history, put, resume, say, steps_of


class KilledError(Exception):
    """The process that synced was killed."""


def series_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard itself reads."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    found.Reload()
    return {
        name: [(each.step, each.value) for each in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


def in_float32(series: dict[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard's format keeps of it."""
    return {
        name: [(step, float(np.float32(value))) for step, value in points]
        for name, points in series.items()
    }


@pytest.fixture
def shelf() -> Shelf:
    """Make a run that trained ten steps, with a checkpoint at the sixth."""
    shelf = Shelf()
    say(shelf, parameters={"world_size": 2}, options={"lr": "0.1|0.2"})
    put(shelf, 1, *steps_of(1, 1, 10))
    checkpoint(shelf, 6)
    return shelf


def test_the_files_grow_with_the_run(shelf: Shelf, tmp_path: Path) -> None:
    """Each sync may be another process; at the end the series are those of `read_metrics`, and
    the evaluation is there once."""
    sync_run(shelf, RUN, TensorboardTracker(tmp_path))
    first = series_in(tmp_path / RUN)
    assert [step for step, _ in first["loss"]] == [1, 2, 3, 4, 5]
    evaluation = Report(num_samples=8, accuracy=0.875, loss=0.25, classes=())
    ended = BEGAN + timedelta(hours=1)
    say(shelf, "completed", evaluation=evaluation, ended=ended, num_steps=10)
    tracker = TensorboardTracker(tmp_path)
    assert sync_run(shelf, RUN, tracker).num_sent == 10
    assert sync_run(shelf, RUN, TensorboardTracker(tmp_path)).num_sent == 0
    assert tracker.url == str(tmp_path / RUN)
    series = series_in(tmp_path / RUN)
    assert series.pop("evaluation/accuracy") == [(10, 0.875)]
    assert series.pop("evaluation/loss") == [(10, 0.25)]
    assert series == in_float32(history(shelf))
    found = EventAccumulator(str(tmp_path / RUN)).Reload()
    (parameters,) = found.Tensors("parameters")
    assert b"| options.lr | 0.1/0.2 |" in parameters.tensor_proto.string_val[0]
    assert len(list((tmp_path / RUN).iterdir())) == 2


def test_a_metric_named_like_a_score_of_the_evaluation_shares_no_series(
    shelf: Shelf, tmp_path: Path
) -> None:
    """The evaluation's gets another name, whenever it is synced, and is there once."""
    name = "evaluation/accuracy"
    metrics = {name: 0.5, f"evaluation/{name}": 0.25}
    put(shelf, 1, *(record(step, 0, 1, num_samples=8, **metrics) for step in (1, 7)))
    sync_run(shelf, RUN, TensorboardTracker(tmp_path))
    evaluation = Report(num_samples=8, accuracy=0.875, loss=0.25, classes=())
    ended = BEGAN + timedelta(hours=1)
    say(shelf, "completed", evaluation=evaluation, ended=ended, num_steps=10)
    for _ in range(2):
        sync_run(shelf, RUN, TensorboardTracker(tmp_path))
    series = series_in(tmp_path / RUN)
    assert series[name] == [(1, 0.5), (7, 0.5)]
    assert series[f"evaluation/{name}"] == [(1, 0.25), (7, 0.25)]
    assert series[f"evaluation/evaluation/{name}"] == [(10, 0.875)]
    assert series["evaluation/loss"] == [(10, 0.25)]


def test_of_two_attempts_at_a_step_the_last_is_kept(shelf: Shelf, tmp_path: Path) -> None:
    """Code may report between a checkpoint and the next step, and again after a resume."""
    resume(shelf, 2, 6, 1)
    put(shelf, 2, record(6, 0, 2, num_samples=0, loss=9.0), *steps_of(2, 7, 12))
    say(shelf, "completed")
    sync_run(shelf, RUN, TensorboardTracker(tmp_path))
    loss = series_in(tmp_path / RUN)["loss"]
    assert [step for step, _ in loss] == list(range(1, 13))
    assert loss[5] == (6, 9.0)


@pytest.mark.parametrize("num_points", [1, 3, 1000])
def test_a_sync_may_be_killed_in_the_midst_of_a_record(
    shelf: Shelf, tmp_path: Path, num_points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time after some bytes of an append, before the state is written."""
    monkeypatch.setattr(sync, "MAX_POINTS", num_points)
    resume(shelf, 2, 6, 1)
    put(shelf, 2, *steps_of(2, 7, 12))
    say(shelf, "completed")
    append, lasts = EventFile.append, iter([0, 1, 7, 13, 40, 55, 97, 130, 200])

    def killed(self: EventFile, events: object) -> int:
        before = self.path.stat().st_size
        after = append(self, events)
        if (left := next(lasts, None)) is None:
            return after
        with self.path.open("r+b") as file:
            file.truncate(min(before + left, after))
        raise KilledError

    monkeypatch.setattr(EventFile, "append", killed)
    num_kills = 0
    while True:
        try:
            sync_run(shelf, RUN, TensorboardTracker(tmp_path))
        except KilledError:
            num_kills += 1
        else:
            break
    assert num_kills == 9
    assert series_in(tmp_path / RUN) == in_float32(history(shelf))


@pytest.mark.parametrize("num_calls", range(8))
def test_steps_that_are_taken_back_after_all_are_in_another_folder(
    shelf: Shelf, tmp_path: Path, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces the first one when it is whole, also if that sync is killed."""
    checkpoint(shelf, 3)
    sync_run(shelf, RUN, TensorboardTracker(tmp_path))
    shelf.write(manifest_key(RUN, 6, 1), b"{}")
    resume(shelf, 2, 3, 1)
    put(shelf, 2, *steps_of(2, 4, 9))
    checkpoint(shelf, 9, 2)
    left = num_calls
    writes = TensorboardTracker._write_state, EventFile.append

    def counted(write):
        def wrapped(*args, **more):
            nonlocal left
            left -= 1
            if left < 0:
                raise KilledError
            return write(*args, **more)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(TensorboardTracker, "_write_state", counted(writes[0]))
        patch.setattr(EventFile, "append", counted(writes[1]))
        try:
            sync_run(shelf, RUN, TensorboardTracker(tmp_path))
        except KilledError:
            assert (tmp_path / RUN).is_dir()
    sync_run(shelf, RUN, TensorboardTracker(tmp_path))
    assert [each.name for each in tmp_path.iterdir()] == [f"{RUN}-2"]
    wanted = in_float32(history(shelf))
    series = series_in(tmp_path / f"{RUN}-2")
    assert series == {name: points[:8] for name, points in wanted.items()}


def test_what_isnt_ours_is_named(shelf: Shelf, tmp_path: Path) -> None:
    """A damaged state; a folder that can't be written."""
    sync_run(shelf, RUN, TensorboardTracker(tmp_path))
    (tmp_path / RUN / STATE).write_text("{}")
    with pytest.raises(TrackerError, match=f"delete {tmp_path / RUN}"):
        sync_run(shelf, RUN, TensorboardTracker(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(TrackerError, match=r"TensorBoard's folder .* can't be written"):
        sync_run(shelf, RUN, TensorboardTracker(tmp_path / "file"))


def test_the_folder_is_known_before_work_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the variable, or by the storage if that is a folder."""
    name = "TENSORBOARD_LOGGING_DIR"
    monkeypatch.delenv(name, raising=False)
    assert tensorboard_folder(DirectoryStorage(tmp_path)) == tmp_path / "tensorboard"
    with pytest.raises(InvalidParamsError, match="set TENSORBOARD_LOGGING_DIR"):
        open_tracker("tensorboard", Shelf())
    monkeypatch.setenv(name, str(tmp_path / "logs"))
    assert tensorboard_folder(Shelf()) == tmp_path / "logs"


def test_tensorboard_reads_every_record(tmp_path: Path) -> None:
    """Whatever the lengths, and values that aren't finite; and so does the next sync."""
    file = EventFile(tmp_path / "events.out.tfevents.1")
    file.make(1.0)
    values = [0.0, 1e30, float("inf"), float("-inf"), 0.1]
    file.append([scalar("ab" * (i + 1), value, 10**i, 2.0) for i, value in enumerate(values)])
    found = series_in(tmp_path)
    assert found == in_float32({"ab" * (i + 1): [(10**i, v)] for i, v in enumerate(values)})
    steps = [("ab" * (i + 1), 10**i) for i in range(5)]
    assert [each for each in file.scalars_after(0) if each[0].startswith("ab")] == steps


@pytest.mark.parametrize("num_events", [1, 9, 300])
def test_the_bytes_are_those_of_tensorboards_own_writer(tmp_path: Path, num_events: int) -> None:
    """However many events have one length."""
    events = [
        scalar(f"loss_{number % 3}" * (1 + (number % 100 == 7)), number / 7, 50 * number, 2.0)
        for number in range(num_events)
    ]
    file = EventFile(tmp_path / "ours")
    begins = file.make(1.0)
    assert file.append(events) == file.path.stat().st_size
    with (tmp_path / "theirs").open("wb") as theirs:
        writer = RecordWriter(theirs)
        for event in events:
            writer.write(event.SerializeToString())
    assert file.path.read_bytes()[begins:] == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("offset", [0, 9, 15, -1])
def test_a_record_that_is_damaged_is_cut_off(tmp_path: Path, offset: int) -> None:
    """In its length, the length's checksum, its event, or the event's checksum."""
    file = EventFile(tmp_path / "events.out.tfevents.1")
    file.make(1.0)
    whole = file.append([scalar("loss", 0.5, 1, 2.0)])
    end = file.append([scalar("loss", 0.25, 2, 2.0)])
    data = bytearray(file.path.read_bytes())
    data[whole + offset if offset >= 0 else end + offset] ^= 1
    file.path.write_bytes(data)
    assert list(file.scalars_after(0)) == [("loss", 1)]
    assert file.path.stat().st_size == whole


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_run_is_followed_over_its_retries_and_no_longer(
    shelf: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture, state: str
) -> None:
    """A failure that is tried again is no end; one for good is, and a warning says so."""
    tracker = TensorboardTracker(tmp_path)
    say(shelf, state="failed", is_tried_again=True)
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            say(shelf, state=state, is_tried_again=False)

    synced: list[sync.Synced] = []
    follow_run(shelf, RUN, tracker, wait=wait, on_synced=synced.append)
    assert len(waited) == 3
    assert len(synced) == 2, "nothing was new at the second and third look"
    assert "has ended without completing" in caplog.text


def test_what_a_later_version_wrote_is_kept_or_refused(shelf: Shelf, tmp_path: Path) -> None:
    """A field more stays; a higher format is refused by name, also of a folder that would be
    deleted, and nothing is tried again; a file that isn't this tracker's stays."""
    sync_run(shelf, RUN, TensorboardTracker(tmp_path))
    state = DirectoryStorage(tmp_path / RUN)
    rewrite(state, STATE, MORE)
    checkpoint(shelf, 8)
    sync_run(shelf, RUN, TensorboardTracker(tmp_path))
    assert MORE.items() <= json.loads(state.read(STATE)).items()
    mine = tmp_path / RUN / "profile"
    mine.touch()
    resume(shelf, 2, 6, 1)
    put(shelf, 2, *steps_of(2, 7, 10))
    checkpoint(shelf, 9, 2)
    rewrite(state, STATE, NEWER)
    newer = state.read(STATE)
    says = rf"{RUN}/{STATE} is a state of a TensorBoard folder of format 7"
    with pytest.raises(NewerFormatError, match=says):
        sync_run(shelf, RUN, TensorboardTracker(tmp_path))
    with pytest.raises(NewerFormatError, match=says):
        follow_run(shelf, RUN, TensorboardTracker(tmp_path), wait=pytest.fail, on_synced=print)
    tracker = TensorboardTracker(tmp_path)
    record = read_run_record(shelf, RUN)
    (tmp_path / f"{RUN}-2").mkdir()
    tracker.open(record, [])
    with pytest.raises(NewerFormatError, match=says):
        tracker.describe(record)
    assert state.read(STATE) == newer
    rewrite(state, STATE, {"format": 1})
    tracker.describe(record)
    assert mine.exists()
    assert not [*(tmp_path / RUN).glob("*.json"), *(tmp_path / RUN).glob("events*")]
