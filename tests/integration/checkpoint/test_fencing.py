"""Two attempts of one training at a time, in processes of their own: the older one loses every
time, however late it is."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_torch_ddp.checkpoint.attempts import claim_attempt, newest_attempt
from prefect_torch_ddp.checkpoint.keys import checkpoints_prefix, manifest_key
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.checkpoint.objects import read_object
from prefect_torch_ddp.checkpoint.run_files import read_result
from prefect_torch_ddp.errors import SupersededError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from tests.support.racing import attempt, run_to_its_end
from tests.support.records import read_records
from tests.support.s3_server import S3Server
from tests.support.waiting import wait_until
from tests.workloads.stored import Course, PausingStorage

NUM_STEPS = 12
WHOLE = Course(NUM_STEPS)
SUPERSEDED = "attempt 1 of run run has been superseded by attempt 2: it ends here"


def undisturbed(folder: Path) -> str:
    """Return the weights' digest of a training that nothing happens to."""
    kind, digest = run_to_its_end(DirectoryStorage(folder), WHOLE)
    assert kind == "done"
    return str(digest)


def steps_of(storage: Storage) -> list[tuple[int, int]]:
    """Return step and attempt of the checkpoints that count; all of them are whole."""
    manifests = list_manifests(storage, "run")
    for manifest in manifests:
        for item in manifest.objects:
            read_object(storage, manifest, item)
    return [(manifest.step, manifest.attempt) for manifest in manifests]


def check_history(storage: Storage, num_steps: int = NUM_STEPS) -> None:
    """Each step is in the run's history once."""
    assert [record.step for record in read_records(storage, "run")] == list(range(1, num_steps + 1))


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ("write", "step-00000004/000001/model.pt"),
        ("write_if_absent", "step-00000004/000001/manifest.json"),
        ("delete", "step-00000002/000001/manifest.json"),
        ("delete", "step-00000002/000001/model.pt"),
    ],
    ids=[
        "in the midst of a save",
        "right before the commit",
        "between commit and retention",
        "in the midst of retention",
    ],
)
def test_an_attempt_that_was_held_up_changes_nothing(
    tmp_path: Path, request_: str, text: str
) -> None:
    """Attempt 1 stands still at a request; attempt 2 trains to the end; attempt 1 goes on, and
    is refused everything."""
    storage = DirectoryStorage(tmp_path / "store")
    with attempt(PausingStorage(tmp_path / "store", request_, text), WHOLE) as old:
        old.wait_until_stopped()
        kind, digest = run_to_its_end(storage, WHOLE)
        assert kind == "done"
        assert steps_of(storage) == [(11, 2), (12, 2)]
        old.go_on()
        assert old.outcome() == ("superseded", SUPERSEDED)
    assert digest == undisturbed(tmp_path / "undisturbed")
    assert steps_of(storage) == [(11, 2), (12, 2)]
    assert read_result(storage, "run", "newest.txt") == b"attempt 2"
    check_history(storage)


@pytest.mark.parametrize(
    "new",
    [Course(NUM_STEPS, every_steps=100, die_at=6), Course(NUM_STEPS, every_steps=5, die_at=6)],
)
def test_a_commit_that_comes_too_late_is_void(tmp_path: Path, new: Course) -> None:
    """It lands where attempt 2, which began behind it, has no checkpoint; attempt 3 doesn't
    resume from it, no step is lost."""
    storage = DirectoryStorage(tmp_path / "store")
    held_up = PausingStorage(
        tmp_path / "store", "write_if_absent", "step-00000004/000001/manifest.json"
    )
    with attempt(held_up, WHOLE) as old:
        old.wait_until_stopped()
        assert run_to_its_end(storage, new) is None, "it died"
        before = steps_of(storage)
        old.go_on()
        assert old.outcome()[0] == "superseded"
    storage.read(manifest_key("run", 4, 1))  # it did commit
    assert steps_of(storage) == before
    kind, digest = run_to_its_end(storage, WHOLE)
    assert (kind, digest) == ("done", undisturbed(tmp_path / "undisturbed"))
    assert steps_of(storage) == [(11, 3), (12, 3)]
    owners = {
        found.key.split("/")[4]
        for found in storage.list(checkpoints_prefix("run"))
        if found.key.endswith(".pt")
    }
    assert owners == {"000003"}, "what the older ones had written is swept"
    check_history(storage)


def test_a_file_that_comes_too_late_replaces_none(tmp_path: Path) -> None:
    """Held up within ctx.save, right before the write: it lands under its own attempt, and the
    newer one's is what is read."""
    storage = DirectoryStorage(tmp_path / "store")
    with attempt(
        PausingStorage(tmp_path / "store", "write", "results/000001/newest.txt"), WHOLE
    ) as old:
        old.wait_until_stopped()
        assert run_to_its_end(storage, Course(NUM_STEPS, die_at=6)) is None, "it died"
        before = steps_of(storage)
        old.go_on()
        assert old.outcome() == ("superseded", SUPERSEDED)
    assert storage.read("runs/run/results/000001/newest.txt") == b"attempt 1", "it did land"
    assert read_result(storage, "run", "newest.txt") == b"attempt 2"
    assert steps_of(storage) == before
    assert run_to_its_end(storage, WHOLE) == ("done", undisturbed(tmp_path / "undisturbed"))
    assert read_result(storage, "run", "newest.txt") == b"attempt 3"
    check_history(storage)


def race(storage: Storage, begin_at: int, expected: str) -> None:
    """Have attempt 2 begin once attempt 1 has made so many steps, and attempt 3 at once after
    it; all as fast as they can."""
    course = Course(NUM_STEPS, wait_at=10)
    with attempt(storage, course, begins=False) as new, attempt(storage, course) as old:
        wait_until(
            lambda: any(manifest.step >= begin_at for manifest in list_manifests(storage, "run"))
        )
        new.begin()
        assert old.outcome()[0] == "superseded"
        with attempt(storage, WHOLE, begins=False) as newest:
            wait_until(lambda: newest_attempt(storage, "run") == 2)
            newest.begin()
            assert new.outcome()[0] == "superseded"
            assert newest.outcome() == ("done", expected)
    assert steps_of(storage) == [(11, 3), (12, 3)]
    assert read_result(storage, "run", "newest.txt") == b"attempt 3"
    check_history(storage)


def test_an_older_attempts_results_are_not_published(tmp_path: Path) -> None:
    """The task publish ends before it shows anything, when a newer attempt has begun since the
    training ended."""
    from prefect_torch_ddp.tasks.stages import publish

    storage = DirectoryStorage(tmp_path)
    for _ in range(2):
        claim_attempt(storage, "run")
    training: Any = SimpleNamespace(run_id="run", attempt=1)
    nothing: Any = None
    with pytest.raises(SupersededError, match=SUPERSEDED):
        publish.fn(nothing, storage, "", nothing, training, nothing, nothing)


def test_of_attempts_that_race_the_older_loses(tmp_path: Path) -> None:
    """At steps drawn at random: what the newest leaves is that of an undisturbed training."""
    expected = undisturbed(tmp_path / "undisturbed")
    draw = random.Random(5)
    for number in range(4):
        race(DirectoryStorage(tmp_path / str(number)), draw.randrange(1, 9), expected)


def test_of_attempts_that_race_on_s3_the_older_loses(
    open_s3_server: S3Server,
    tmp_path: Path,
) -> None:
    """The same on a real S3 server."""
    expected = undisturbed(tmp_path / "undisturbed")
    for begin_at in (2, 7):
        race(open_s3_server.storage(), begin_at, expected)
