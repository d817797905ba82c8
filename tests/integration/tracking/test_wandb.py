"""A run's folder for `wandb sync` has each step once, whoever is killed while it is written."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from prefect_torch_ddp import list_runs, read_metrics
from prefect_torch_ddp.checkpoint.keys import manifest_key
from prefect_torch_ddp.errors import InvalidParamsError, NewerFormatError, TrackerError
from prefect_torch_ddp.records.run_record import RunRecord, read_run_record
from prefect_torch_ddp.results import Report
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tracking.trackers.follow import follow_run
from prefect_torch_ddp.tracking.trackers.history import Mark, Point
from prefect_torch_ddp.tracking.trackers.known import open_tracker, wandb_folder
from prefect_torch_ddp.tracking.trackers.sync import Synced, sync_run
from prefect_torch_ddp.tracking.trackers.wandb_tracker import STATE, WandbTracker
from tests.support.formats import MORE, NEWER, rewrite
from tests.support.records import Shelf
from tests.support.reported import BEGAN, RUN, checkpoint, history, put, resume, say, steps_of
from tests.support.waiting import HANG_S, wait_until
from tests.support.wandb_files import run_in

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]
SECRET = "0123456789abcdef" * 3


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a key, as people do; afterwards no process of wandb's is left."""
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    for name in ("WANDB_DIR", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    yield
    wait_until(lambda: not cores_of(os.getpid()))


def cores_of(pid: int) -> list[psutil.Process]:
    """Return wandb's processes that a process started."""
    return [each for each in psutil.Process(pid).children() if "wandb" in each.name()]


@pytest.fixture
def shelf() -> Shelf:
    """Make a run that trained ten steps, with a checkpoint at the sixth."""
    shelf = Shelf()
    say(shelf, parameters={"world_size": 2}, options={"lr": 0.1})
    put(shelf, 1, *steps_of(1, 1, 10))
    checkpoint(shelf, 6)
    return shelf


def folder_in(base: Path) -> Path:
    """Return the only folder that there is."""
    (found,) = (base / "wandb").iterdir()
    return found


def test_a_folder_has_the_whole_run(shelf: Shelf, tmp_path: Path) -> None:
    """Each sync may be another process; the folder is written anew when there is more, and not
    when there is nothing new. `wandb sync` finds it, and no secret is in it."""
    sync_run(shelf, RUN, WandbTracker(tmp_path))
    first = folder_in(tmp_path)
    found = run_in(first)
    assert found["series"] == {name: points[:5] for name, points in history(shelf).items()}
    assert (found["id"], found["project"], found["exit"]) == (RUN, "e", 0)
    assert found["config"]["world_size"] == 2
    assert found["config"]["options"] == {"lr": 0.1}
    assert found["summary"]["prefect_torch_ddp/state"] == "training"
    mark = first / f"run-{RUN}.wandb.synced"
    mark.touch()
    assert sync_run(shelf, RUN, WandbTracker(tmp_path)).num_sent == 0
    assert mark.exists(), "nothing was new"

    evaluation = Report(num_samples=8, accuracy=0.875, loss=0.25, classes=())
    ended = BEGAN + timedelta(hours=1)
    more = {"model_uris": {"model": "s3://bucket/models/model.safetensors"}, "ended": ended}
    say(shelf, "completed", evaluation=evaluation, num_steps=10, **more)
    tracker = WandbTracker(tmp_path)
    assert sync_run(shelf, RUN, tracker).num_sent == 20
    folder = folder_in(tmp_path)
    assert tracker.url == str(folder)
    found = run_in(folder)
    assert found["series"] == history(shelf)
    assert found["times"] == [float(step) for step in range(1, 11)]
    summary = found["summary"]
    assert (summary["evaluation/accuracy"], summary["evaluation/loss"]) == (0.875, 0.25)
    assert summary["prefect_torch_ddp/model.model"] == more["model_uris"]["model"]
    command = [sys.executable, "-m", "wandb", "sync", "--dry-run"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "Would sync 1 run(s)" in said.stdout + said.stderr
    assert f"run-{RUN}.wandb" in said.stdout + said.stderr
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in content for content in files)


def test_steps_that_are_taken_back_after_all_are_gone(shelf: Shelf, tmp_path: Path) -> None:
    """The newest checkpoint is damaged: a resume from the one before it makes its steps again.
    The folder that is there then has the history that counts, and its state the run's end."""
    checkpoint(shelf, 3)
    sync_run(shelf, RUN, WandbTracker(tmp_path))
    shelf.write(manifest_key(RUN, 6, 1), b"{}")
    resume(shelf, 2, 3, 1)
    put(shelf, 2, *steps_of(2, 4, 9))
    checkpoint(shelf, 9, 2)
    say(shelf, "failed", cause="exception")
    assert sync_run(shelf, RUN, WandbTracker(tmp_path)).is_again
    found = run_in(folder_in(tmp_path))
    assert found["series"] == {name: points[:8] for name, points in history(shelf).items()}
    assert found["exit"] == 1
    assert found["summary"]["prefect_torch_ddp/cause"] == "exception"


def test_odd_values_and_names(shelf: Shelf, tmp_path: Path) -> None:
    """Values that JSON doesn't have; a step that two attempts reported, whose last value is kept;
    and an experiment whose name a project can't have."""
    at = {"experiment": "nightly/fit:a", "workload": "w", "began": BEGAN, "storage": "s"}
    tracker = WandbTracker(tmp_path)
    tracker.open(RunRecord(run_id=RUN, **at), ["loss"])
    tracker.put_mark(Mark(3, "digest"))
    values = [float("nan"), float("inf"), float("-inf"), 2.0]
    steps = zip((1, 2, 3, 3), values, strict=True)
    tracker.send([Point("acc@1", step, value, 1000) for step, value in steps])
    tracker.describe(RunRecord(run_id=RUN, **at))
    found = run_in(folder_in(tmp_path))
    assert str(found["series"]["acc@1"]) == "[(1, nan), (2, inf), (3, 2.0)]"
    assert found["project"] == "nightly-fit-a"


def test_a_run_is_followed_until_it_has_ended(shelf: Shelf, tmp_path: Path) -> None:
    """Nothing is written before: a folder can't be added to."""
    tracker, done = WandbTracker(tmp_path), []

    def end(_: float) -> None:
        assert not (tmp_path / "wandb").exists()
        say(shelf, "completed")

    follow_run(shelf, RUN, tracker, wait=end, on_synced=done.append)
    assert done == [Synced(20, 10, is_completed=True, is_again=False)]
    assert run_in(folder_in(tmp_path))["series"] == history(shelf)


def test_a_folder_never_gets_shorter(shelf: Shelf, tmp_path: Path) -> None:
    """Once all steps were final, they stay, also if the run's state or checkpoint changes later."""
    say(shelf, "completed")
    sync_run(shelf, RUN, WandbTracker(tmp_path))
    say(shelf, "failed", cause="exception")
    done = sync_run(shelf, RUN, WandbTracker(tmp_path))
    assert (done.step, done.is_again) == (10, False)
    assert run_in(folder_in(tmp_path))["series"] == history(shelf)


def test_variables_for_other_runs_change_nothing(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep's, a resumed run's, another process's; the tags and the project's name count. wandb's
    own logs don't stay in the home directory."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in {
        "WANDB_SWEEP_ID": "sweep",
        "WANDB_FORK_FROM": "other?_step=300",
        "WANDB_SERVICE": "3-9-unix-/tmp/none/s",
        "WANDB_MODE": "disabled",
        "WANDB_CONSOLE": "nonsense",
        "WANDB_TAGS": "nightly",
    }.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    sync_run(shelf, RUN, WandbTracker(tmp_path))
    assert dict(os.environ) == before
    found = run_in(folder_in(tmp_path))
    assert (found["id"], found["tags"]) == (RUN, ["nightly"])
    assert len(found["series"]["loss"]) == 5
    assert not [*tmp_path.glob("home/**/*")]
    monkeypatch.setenv("WANDB_PROJECT", "cats/dogs")
    sync_run(shelf, RUN, WandbTracker(tmp_path))
    assert run_in(folder_in(tmp_path))["project"] == "cats-dogs"


def test_folders_of_others_stay(shelf: Shelf, tmp_path: Path) -> None:
    """A folder of the user's own, with the same id; one of a run whose id ends in this one's. A
    folder whose file is gone is written again."""
    sync_run(shelf, RUN, WandbTracker(tmp_path))
    ours = folder_in(tmp_path)
    own = ours.with_name(f"offline-run-20260101_000000-{RUN}")
    other = ours.with_name(f"offline-run-20260101_000000-the-{RUN}")
    own.mkdir()
    other.mkdir()
    (other / STATE).write_bytes((ours / STATE).read_bytes())
    (file,) = ours.glob("*.wandb")
    file.unlink()
    tracker = WandbTracker(tmp_path)
    assert sync_run(shelf, RUN, tracker).num_sent == 10
    assert own.exists()
    assert other.exists()
    assert len(run_in(Path(tracker.url))["series"]["loss"]) == 5


def test_a_metric_that_wandb_has_itself_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    """It would be lost in silence."""
    with pytest.raises(TrackerError, match="can't have a metric named '_step'"):
        WandbTracker(tmp_path).open(read_run_record(shelf, RUN), ["loss", "_step"])


SYNC = """
import sys
from pathlib import Path
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tracking.trackers.sync import sync_run
from prefect_torch_ddp.tracking.trackers.wandb_tracker import WandbTracker
tracker = WandbTracker(Path(sys.argv[2]))
print("ready", flush=True)
sync_run(DirectoryStorage(sys.argv[1]), sys.argv[3], tracker)
"""


@pytest.mark.long
def test_a_sync_may_be_killed_anywhere(tmp_path: Path) -> None:
    """After each kill, between the first and the last moment of a write, the folder is absent or
    whole, no process of wandb's is left, and the next sync writes it."""
    store, base = DirectoryStorage(tmp_path / "store"), tmp_path / "base"
    say(store)
    put(store, 1, *steps_of(1, 1, 1000))
    checkpoint(store, 501)
    sync_run(store, RUN, WandbTracker(base))
    whole = run_in(folder_in(base))["series"]
    say(store, "completed")
    command = [sys.executable, "-c", SYNC, str(store.root), str(base), RUN]
    chosen = random.Random(os.environ.get("PTD_SEED", "1"))
    limit_s, num_kills = 4.0, 0
    while num_kills < 6:
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        try:
            process.wait(chosen.uniform(0, limit_s))
        except subprocess.TimeoutExpired:
            cores = cores_of(process.pid)
            process.send_signal(signal.SIGKILL)
            process.wait()
            num_kills += 1
            wait_until(lambda cores=cores: not any(each.is_running() for each in cores))
        else:  # it was over before
            limit_s *= 0.7
            for folder in (base / "wandb").glob("offline-run-*"):
                (folder / STATE).write_bytes(
                    (folder / STATE).read_bytes().replace(b'"described": "', b'"described": "x')
                )
        process.stdout.close()
        for folder in (base / "wandb").glob("offline-run-*"):
            assert run_in(folder)["series"] in (whole, history(store))
    sync_run(store, RUN, WandbTracker(base))
    assert run_in(folder_in(base))["series"] == history(store)


def test_what_a_later_version_wrote_is_kept_or_refused(shelf: Shelf, tmp_path: Path) -> None:
    """A field more stays; a higher format, and what isn't ours, is refused by name and stays."""
    sync_run(shelf, RUN, WandbTracker(tmp_path))
    rewrite(DirectoryStorage(folder_in(tmp_path)), STATE, MORE)
    checkpoint(shelf, 8)
    sync_run(shelf, RUN, WandbTracker(tmp_path))
    state = DirectoryStorage(folder_in(tmp_path))
    assert MORE.items() <= json.loads(state.read(STATE)).items()
    rewrite(state, STATE, NEWER)
    newer = state.read(STATE)
    with pytest.raises(NewerFormatError, match="state of a Weights & Biases folder of format 7"):
        sync_run(shelf, RUN, WandbTracker(tmp_path))
    assert state.read(STATE) == newer
    (folder_in(tmp_path) / STATE).write_text("{}")
    with pytest.raises(TrackerError, match=f"delete {folder_in(tmp_path)}"):
        sync_run(shelf, RUN, WandbTracker(tmp_path))


def test_the_folder_is_known_before_work_starts(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By wandb's own variable, or by the storage if that is a folder. A file in its place is named,
    and so is a bucket without the variable."""
    assert wandb_folder(DirectoryStorage(tmp_path)) == tmp_path
    with pytest.raises(InvalidParamsError, match=r"tracker wandb needs a folder.*set WANDB_DIR"):
        open_tracker("wandb", Shelf())
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "logs"))
    assert wandb_folder(Shelf()) == tmp_path / "logs"
    (tmp_path / "wandb").touch()
    with pytest.raises(TrackerError, match=r"folder .*wandb of Weights & Biases can't be written"):
        sync_run(shelf, RUN, WandbTracker(tmp_path))


@pytest.mark.long
def test_a_flow_writes_its_runs(prefect_api: str, tmp_path: Path) -> None:
    """Two runs of a task, in each of which a rank is killed three times, at different steps."""
    store = tmp_path / "store"
    command = [sys.executable, "-m", "tests.workloads.fed_flows", "task", str(store), "wandb"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = list_runs(store)
    assert sorted(runs.state) == ["completed"] * 2
    folders = {str(run_in(each)["id"]): each for each in (store / "wandb").iterdir()}
    assert sorted(folders) == sorted(runs.run_id)
    for run_id in runs.run_id:
        rows = read_metrics(store, run_id, by="step")
        assert max(rows.attempt) == 4
        series = run_in(folders[run_id])["series"]
        assert sorted(series) == ["loss", "step_plus_rank"]
        for name, points in series.items():
            assert points == list(zip(rows.step, rows[name], strict=True))
