"""Of two attempts of one training, in separate processes, the older one always loses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_torch_ddp.checkpoint.attempts import claim_attempt, newest_attempt
from prefect_torch_ddp.checkpoint.keys import checkpoints_prefix, manifest_key
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.checkpoint.state.objects import read_object
from prefect_torch_ddp.errors import SupersededError
from prefect_torch_ddp.records.saved_files import read_result
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Train without anything that happens; return the outcome, with the weights' digest."""
    kind, digest = run_to_its_end(DirectoryStorage(tmp_path_factory.mktemp("undisturbed")), WHOLE)
    assert kind == "done"
    return kind, digest


def steps_of(storage: Storage) -> list[tuple[int, int]]:
    """Return step and attempt of the checkpoints that count; all of them are whole."""
    manifests = list_manifests(storage, "run")
    for manifest in manifests:
        for item in manifest.objects:
            read_object(storage, manifest, item)
    return [(manifest.step, manifest.attempt) for manifest in manifests]


def check_end(storage: Storage, newest: int) -> None:
    """The newest attempt's are the last checkpoints and the file; each step is on record once."""
    assert steps_of(storage) == [(NUM_STEPS - 1, newest), (NUM_STEPS, newest)]
    assert read_result(storage, "run", "newest.txt") == f"attempt {newest}".encode()
    steps = [record.step for record in read_records(storage, "run")]
    assert steps == list(range(1, NUM_STEPS + 1))


HELD_UP = {
    "in the midst of a save": ("write", "step-00000004/000001/model.pt"),
    "right before the commit": ("write_if_absent", "step-00000004/000001/manifest.json"),
    "between commit and retention": ("delete", "step-00000002/000001/manifest.json"),
    "in the midst of retention": ("delete", "step-00000002/000001/model.pt"),
}


@pytest.mark.extended
@pytest.mark.parametrize(("request_", "text"), HELD_UP.values(), ids=HELD_UP)
def test_an_attempt_that_was_held_up_changes_nothing(
    tmp_path: Path, undisturbed: tuple[str, str], request_: str, text: str
) -> None:
    """Attempt 1 is held up at a request while attempt 2 trains to the end; then it is refused."""
    storage = DirectoryStorage(tmp_path)
    with attempt(PausingStorage(tmp_path, request_, text), WHOLE) as old:
        old.wait_until_stopped()
        assert run_to_its_end(storage, WHOLE) == undisturbed
        assert steps_of(storage) == [(11, 2), (12, 2)]
        old.go_on()
        assert old.outcome() == ("superseded", SUPERSEDED)
    check_end(storage, 2)


@pytest.mark.parametrize(
    "new",
    [Course(NUM_STEPS, every_steps=100, die_at=6), Course(NUM_STEPS, every_steps=5, die_at=6)],
    ids=["the newer attempt saved nothing", "the newer attempt saved step 5"],
)
def test_a_commit_that_comes_too_late_is_void(
    tmp_path: Path, undisturbed: tuple[str, str], new: Course
) -> None:
    """Attempt 3 ignores a late commit of attempt 1, and no step is lost."""
    storage = DirectoryStorage(tmp_path)
    held_up = PausingStorage(tmp_path, *HELD_UP["right before the commit"])
    with attempt(held_up, WHOLE) as old:
        old.wait_until_stopped()
        assert run_to_its_end(storage, new) is None, "it died"
        before = steps_of(storage)
        old.go_on()
        assert old.outcome()[0] == "superseded"
    storage.read(manifest_key("run", 4, 1))  # it did commit
    assert steps_of(storage) == before
    assert run_to_its_end(storage, WHOLE) == undisturbed
    objects = [found.key for found in storage.list(checkpoints_prefix("run"))]
    owners = {key.split("/")[4] for key in objects if key.endswith(".pt")}
    assert owners == {"000003"}, "what the older ones had written is swept"
    check_end(storage, 3)


def test_a_file_that_comes_too_late_replaces_none(
    tmp_path: Path, undisturbed: tuple[str, str]
) -> None:
    """A late `ctx.save` writes below its own attempt, and readers get the newer attempt's file."""
    storage = DirectoryStorage(tmp_path)
    late = "results/000001/newest.txt"
    with attempt(PausingStorage(tmp_path, "write", late), WHOLE) as old:
        old.wait_until_stopped()
        assert run_to_its_end(storage, Course(NUM_STEPS, die_at=6)) is None, "it died"
        before = steps_of(storage)
        old.go_on()
        assert old.outcome() == ("superseded", SUPERSEDED)
    assert storage.read(f"runs/run/{late}") == b"attempt 1", "it did land"
    assert read_result(storage, "run", "newest.txt") == b"attempt 2"
    assert steps_of(storage) == before
    assert run_to_its_end(storage, WHOLE) == undisturbed
    check_end(storage, 3)


def test_an_older_attempts_results_are_not_published(tmp_path: Path) -> None:
    """The task publish shows nothing if a newer attempt has begun since the training ended."""
    from prefect_torch_ddp.tasks.publish import publish
    from prefect_torch_ddp.tasks.train_run import Run

    storage = DirectoryStorage(tmp_path)
    for _ in range(2):
        claim_attempt(storage, "run")
    training: Any = SimpleNamespace(run_id="run", attempt=1)
    nothing: Any = None
    with pytest.raises(SupersededError, match=SUPERSEDED):
        publish.fn(Run("run", nothing, storage, "", ""), nothing, training, nothing, nothing)


@pytest.mark.parametrize(
    ("where", "begin_at"),
    [
        *(("directory", step) for step in (5, 6, 1, 8)),
        ("s3", 2),
        pytest.param("s3", 7, marks=pytest.mark.extended),
    ],
)
def test_of_attempts_that_race_the_older_loses(
    tmp_path: Path,
    open_s3_server: S3Server,
    undisturbed: tuple[str, str],
    where: str,
    begin_at: int,
) -> None:
    """Three attempts race, and the newest one leaves the result of an undisturbed training."""
    storage = DirectoryStorage(tmp_path) if where == "directory" else open_s3_server.storage()
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
            assert newest.outcome() == undisturbed
    check_end(storage, 3)
