"""Checkpoints and records of a run that a later version of the package wrote, or damaged ones:
what is resumed from, what is refused, and what is never deleted."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from prefect_torch_ddp.checkpoint.attempts import (
    claim_attempt,
    claim_times,
    had_ended,
    read_failures,
    write_failure,
)
from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.keys import (
    attempt_key,
    checkpoint_prefix,
    checkpoints_prefix,
    ended_key,
    manifest_key,
    object_key,
    resume_key,
)
from prefect_torch_ddp.checkpoint.manifest import (
    Manifest,
    ManifestObject,
    list_manifests,
    read_manifest,
)
from prefect_torch_ddp.checkpoint.restore import find_resumable
from prefect_torch_ddp.checkpoint.state.objects import content_digest
from prefect_torch_ddp.errors import NewerFormatError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.protocol.events import FailureRecord
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.report.stored import kept_checkpoints
from tests.support.formats import MORE, NEWER, rewrite, snapshot
from tests.unit.checkpoint.test_commit import count_to

KEEP_ONE = CheckpointParams(every_steps=1, every_s=None, keep_last=1)
FAILURE = "runs/local/failures/000001.json"


@pytest.fixture(name="storage")
def _storage(tmp_path: Path) -> DirectoryStorage:
    """Return a storage with a run of three steps, a checkpoint each, and one failure on record."""
    storage = DirectoryStorage(tmp_path)
    count_to(storage, 3)
    write_failure(storage, "local", FailureRecord(1, 1, "it broke", "broke", 3))
    return storage


def resumed_from(storage: Storage) -> int | None:
    """Train a fourth step, keeping one checkpoint; return the step that it resumed from."""
    ctx, value = count_to(storage, 4, KEEP_ONE)
    assert value == 4
    return ctx._assembly.outcome()["resumed_from_step"]


def test_unknown_fields_of_a_manifest_are_ignored(storage: DirectoryStorage) -> None:
    """In the manifest, in its objects and in its position. Two of three manifests with one more
    field once counted as damaged, and the next commits deleted them."""
    for step in (2, 3):
        key = manifest_key("local", step, 1)
        values = json.loads(storage.read(key))
        objects = [{**item, **MORE} for item in values["objects"]]
        position = {**values["position"], **MORE}
        rewrite(storage, key, {**MORE, "objects": objects, "position": position})
    kept = kept_checkpoints(storage, "local")
    last = json.loads(storage.read(manifest_key("local", 3, 1)))
    assert (len(kept), kept[-1].digest) == (3, last["sha256"])
    assert resumed_from(storage) == 3


@pytest.mark.parametrize(
    "key",
    [resume_key("local", 1), ended_key("local"), FAILURE, attempt_key("local", 1)],
    ids=["resume record", "end", "failure", "claim"],
)
def test_unknown_fields_of_a_record_are_ignored(storage: DirectoryStorage, key: str) -> None:
    """It says what it said before."""
    last = read_manifest(storage, "local", 3, 1).id

    def said() -> tuple[object, ...]:
        failures, claims = read_failures(storage, "local"), claim_times(storage, "local")
        return list_manifests(storage, "local"), failures, claims, had_ended(storage, "local", last)

    before = said()
    assert before[3]
    rewrite(storage, key, MORE)
    assert said() == before


def resume(storage: Storage) -> object:
    """Resume the run for another step."""
    return count_to(storage, 4, KEEP_ONE)


REFUSED: dict[str, tuple[str, Callable[[Storage], object]]] = {
    "the newest manifest": (manifest_key("local", 3, 1), resume),
    "an older manifest": (manifest_key("local", 1, 1), resume),
    "a resume record": (resume_key("local", 1), resume),
    "the end": (ended_key("local"), resume),
    "a failure": (FAILURE, lambda storage: read_failures(storage, "local")),
    "a claim": (attempt_key("local", 1), lambda storage: claim_times(storage, "local")),
}


@pytest.mark.parametrize(("key", "do"), REFUSED.values(), ids=REFUSED)
def test_a_newer_format_is_refused_by_name(
    storage: DirectoryStorage, key: str, do: Callable[[Storage], object]
) -> None:
    """The error has the file, its format and what to install; no older checkpoint is taken, and
    nothing is deleted or changed."""
    rewrite(storage, key, NEWER)
    before = snapshot(storage)
    says = (
        rf"{storage.uri}/{key} is a .* of format 7, which version 9\.1\.0 wrote; .* reads formats"
    )
    with pytest.raises(NewerFormatError, match=rf"{says} up to 1\. Install 9\.1\.0 or newer"):
        do(storage)
    assert before.items() <= snapshot(storage).items()


@pytest.mark.parametrize("odd", ["2", True, 1.5, -1, None], ids=json.dumps)
@pytest.mark.parametrize(("key", "do"), REFUSED.values(), ids=REFUSED)
def test_a_format_that_is_no_number_is_refused_by_name(
    storage: DirectoryStorage, key: str, do: Callable[[Storage], object], odd: object
) -> None:
    """It isn't taken for damage: no older checkpoint is taken, and nothing is overwritten."""
    rewrite(storage, key, {"format": odd})
    before = snapshot(storage)
    says = rf"{storage.uri}/{key} is a .* whose format is {json.dumps(odd)}, .* left as it is"
    with pytest.raises(NewerFormatError, match=says):
        do(storage)
    assert before.items() <= snapshot(storage).items()


def test_a_damaged_record_of_the_end_is_warned_of(
    storage: DirectoryStorage, caplog: pytest.LogCaptureFixture
) -> None:
    """The training continues as if it hadn't ended, and writes the record again at its end."""
    key = ended_key("local")
    storage.write(key, storage.read(key)[:-9])
    assert resumed_from(storage) == 3
    assert f"{key} is damaged and left out" in caplog.text
    assert had_ended(storage, "local", list_manifests(storage, "local")[-1].id)


def committed(storage: Storage, attempt: int, step: int, *also: str) -> None:
    """Commit a checkpoint of one object, and perhaps of objects that others wrote."""
    keys = [object_key("run", step, attempt, "model"), *also]
    storage.write(keys[0], b"content")
    items = tuple(ManifestObject(f"model{i}", key, 7, "00") for i, key in enumerate(keys))
    manifest = Manifest("run", step, attempt, 1, {}, 1, {}, items)
    storage.write(manifest_key("run", step, attempt), manifest.as_bytes())


def test_an_object_that_this_torch_cannot_read_is_no_damage(storage: DirectoryStorage) -> None:
    """Else a rollback of torch would resume from an older checkpoint, and delete the newest."""
    item = read_manifest(storage, "local", 3, 1).objects[0]
    data = b"a format of a later torch"
    storage.write(item.key, data)
    objects = [{**item.as_stored(), "num_bytes": len(data), "digest": content_digest(data)}]
    rewrite(storage, manifest_key("local", 3, 1), {"objects": objects})
    before = snapshot(storage)
    with pytest.raises(NewerFormatError, match=f"{item.key} is what was written, and torch"):
        resume(storage)
    assert before.items() <= snapshot(storage).items()


def lay_out(storage: Storage, key: str) -> None:
    """Give a manifest's objects a layout of a later version."""
    objects = json.loads(storage.read(key))["objects"]
    rewrite(storage, key, {"objects": [{**each, "layout": "by_row"} for each in objects]})


SPOILS: dict[str, Callable[[Storage, str], None]] = {
    "of a newer format": lambda storage, key: rewrite(storage, key, NEWER),
    "of a format that is no number": lambda storage, key: rewrite(storage, key, {"format": "2"}),
    "damaged": lambda storage, key: storage.write(key, storage.read(key).replace(b"1", b"4", 1)),
    "in a later layout": lay_out,
    "another one's": lambda storage, key: rewrite(storage, key, {"run_id": "other"}),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_nothing_is_deleted_that_a_manifest_names_which_is_not_understood(
    storage: DirectoryStorage,
    spoil: Callable[[Storage, str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Retention keeps everything next to such a manifest, and deletes the other superfluous
    ones."""
    claim_attempt(storage, "run")
    for step in (1, 2, 3, 4):
        committed(storage, 1, step)
    shared = object_key("run", 1, 1, "model")
    committed(storage, 1, 5, shared)
    storage.write(f"{checkpoint_prefix('run', 5, 1)}index", b"of a later version")
    spoil(storage, manifest_key("run", 5, 1))
    left = set(snapshot(storage, checkpoint_prefix("run", 5, 1)))
    committer = Committer(storage, "run", claim_attempt(storage, "run"), KEEP_ONE)
    for step in (6, 7):
        committed(storage, 2, step)
        committer.clean_up(read_manifest(storage, "run", step, 2))
    expected = left | {shared} | set(snapshot(storage, checkpoint_prefix("run", 7, 2)))
    assert set(snapshot(storage, checkpoints_prefix("run"))) == expected
    assert f"{manifest_key('run', 5, 1)} is left as it is" in caplog.text


def test_a_superseded_manifest_of_a_newer_format_is_not_swept(storage: DirectoryStorage) -> None:
    """Only a version that understands it may say that nobody needs it; reading passes it over,
    as any superseded one."""
    key = manifest_key("local", 3, 1)
    rewrite(storage, key, NEWER)
    storage.write(resume_key("local", 2), storage.read(resume_key("local", 1)))
    rewrite(storage, resume_key("local", 2), {"step": 2, "of_attempt": 1})
    before = snapshot(storage, checkpoint_prefix("local", 3, 1))
    claim_attempt(storage, "local")
    assert find_resumable(storage, "local") is not None
    assert resumed_from(storage) == 2
    assert snapshot(storage, checkpoint_prefix("local", 3, 1)) == before
