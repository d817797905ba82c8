"""Shows which checkpoints of a run count where several attempts made some, also of the same
step."""

from pathlib import Path

import pytest

from prefect_torch_ddp.checkpoint.attempts import FROM_NOTHING, claim_attempt, record_resume
from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.keys import (
    attempts_prefix,
    checkpoints_prefix,
    manifest_key,
    resume_key,
)
from prefect_torch_ddp.checkpoint.manifest import (
    Manifest,
    all_manifests,
    find_manifest,
    list_manifests,
    live_manifests,
)
from prefect_torch_ddp.checkpoint.restore import find_resumable
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage


def put(storage: Storage, *owners: tuple[int, int]) -> None:
    """Write manifests of checkpoints without objects, by step and attempt."""
    for step, attempt in owners:
        manifest = Manifest("run", step, attempt, epoch=1, position={}, world_size=1)
        storage.write(manifest_key("run", step, attempt), manifest.as_bytes())


def counting(storage: Storage) -> list[tuple[int, int]]:
    """Return step and attempt of those that count."""
    return [(manifest.step, manifest.attempt) for manifest in live_manifests(storage, "run")]


def test_what_lies_behind_a_newer_attempts_beginning_is_void(tmp_path: Path) -> None:
    """By step; and of the step itself what a younger attempt than the one it began with
    committed meanwhile."""
    storage = DirectoryStorage(tmp_path)
    put(storage, (2, 1), (3, 1), (3, 2), (4, 2), (4, 3))
    assert counting(storage) == [(2, 1), (3, 1), (3, 2), (4, 2), (4, 3)]
    record_resume(storage, "run", 3, step=3, of_attempt=1)
    assert counting(storage) == [(2, 1), (3, 1), (4, 3)]
    record_resume(storage, "run", 4, FROM_NOTHING, of_attempt=0)
    assert counting(storage) == []
    assert len(all_manifests(storage, "run")) == 5


def test_a_run_that_began_with_another_runs_checkpoint_voids_all_of_its_own_from_there(
    tmp_path: Path,
) -> None:
    """The step is counted on; an older attempt that commits that same step late made it
    itself."""
    storage = DirectoryStorage(tmp_path)
    put(
        storage, (6, 1), (7, 1)
    )  # late as well: the other run was at step 5 then, and at step 7 afterwards
    record_resume(storage, "run", 2, step=7, of_attempt=0)
    assert counting(storage) == []


def test_a_beginning_that_comes_too_late_voids_nothing_that_a_newer_attempt_went_on_from(
    tmp_path: Path,
) -> None:
    """Attempt 1 commits step 3 late, attempt 2 chose step 2 before and says so after attempt 3
    resumed from step 3."""
    storage = DirectoryStorage(tmp_path)
    attempts = [claim_attempt(storage, "run") for _ in range(3)]
    put(storage, (2, 1), (3, 1))
    record_resume(storage, "run", 3, step=3, of_attempt=1)
    record_resume(storage, "run", 2, step=2, of_attempt=1)
    assert counting(storage) == [(2, 1), (3, 1)]
    found = find_resumable(storage, "run")
    assert found is not None
    # All was done: this cleaned step 3 away as void, and step 2 for its sake.
    Committer(storage, "run", attempts[-1], CheckpointParams(keep_last=1)).clean_up(found[0])
    assert counting(storage) == [(3, 1)]
    put(storage, (4, 3))
    record_resume(storage, "run", 5, step=4, of_attempt=3)
    assert counting(storage) == [(3, 1), (4, 3)]
    record_resume(storage, "run", 6, step=2, of_attempt=1)  # step 4 was damaged, and step 3
    assert counting(storage) == []


@pytest.mark.parametrize("at", [0, 1, 2])
def test_of_several_late_beginnings_none_voids(tmp_path: Path, at: int) -> None:
    """Whichever of three attempts is the last to say where it began: the newest one's choice
    stands."""
    storage = DirectoryStorage(tmp_path)
    put(storage, (2, 1), (3, 1))
    begun = [(2, (1, 1)), (3, (2, 1)), (4, (3, 1))]
    for attempt, (step, of_attempt) in begun[at:] + begun[:at]:
        record_resume(storage, "run", attempt, step, of_attempt)
    assert counting(storage) == [(2, 1), (3, 1)]


def test_no_flipped_bit_of_a_beginning_goes_unnoticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another number there would void checkpoints, and the run would begin anew without a
    word."""
    storage = DirectoryStorage(tmp_path)
    put(storage, (2, 1), (3, 1))
    record_resume(storage, "run", 2, step=3, of_attempt=1)
    key = resume_key("run", 2)
    whole = storage.read(key)
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        storage.write(key, bytes(flipped))
        caplog.clear()
        assert counting(storage) == [(2, 1), (3, 1)]
        assert f"{key} is damaged and left out" in caplog.text


def test_what_else_lies_beside_beginnings_is_nobodys(tmp_path: Path) -> None:
    """Such as a copy that a person made."""
    storage = DirectoryStorage(tmp_path)
    put(storage, (2, 1))
    storage.write(f"{attempts_prefix('run')}copy-of-000002.json", b"{}")
    assert counting(storage) == [(2, 1)]


def test_of_a_step_the_newest_attempts_checkpoint_counts(tmp_path: Path) -> None:
    """In lists, for a person who names the step, and for a resume, which takes the older one
    where the newer is damaged."""
    storage = DirectoryStorage(tmp_path)
    put(storage, (3, 1), (4, 1), (4, 2))
    record_resume(storage, "run", 2, step=4, of_attempt=1)
    assert [(manifest.step, manifest.attempt) for manifest in list_manifests(storage, "run")] == [
        (3, 1),
        (4, 2),
    ]
    assert find_manifest(storage, "run", 4).attempt == 2
    storage.write(manifest_key("run", 4, 2), b"damaged")
    found = find_resumable(storage, "run")
    assert found is not None
    assert (found[0].step, found[0].attempt) == (4, 1)
    with pytest.raises(CheckpointError, match=r"step-00000004/000002/manifest\.json is damaged"):
        find_manifest(storage, "run", 4)


def test_a_void_checkpoint_is_not_found_by_its_step(tmp_path: Path) -> None:
    """The error says why, and a damaged one is no fault of the run's."""
    storage = DirectoryStorage(tmp_path)
    put(storage, (3, 1))
    record_resume(storage, "run", 2, step=2, of_attempt=1)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of step 3 in .* that counts: attempt 1 made one"
    ):
        find_manifest(storage, "run", 3)
    storage.write(manifest_key("run", 3, 1), b"damaged")
    assert find_resumable(storage, "run") is None


def test_a_manifest_at_a_strange_place_is_no_reason_to_begin_anew(tmp_path: Path) -> None:
    """Somebody moved it, or it is another version's: a person has to say."""
    storage = DirectoryStorage(tmp_path)
    storage.write(f"{checkpoints_prefix('run')}step-00000003/manifest.json", b"{}")
    with pytest.raises(
        CheckpointError,
        match=r"step-00000003/manifest\.json is not where an attempt's manifest belongs",
    ):
        find_resumable(storage, "run")


def test_a_manifest_of_another_attempt_is_damage(tmp_path: Path) -> None:
    """Who copies files between attempts makes no checkpoint."""
    storage = DirectoryStorage(tmp_path)
    put(storage, (3, 1))
    storage.write(manifest_key("run", 3, 2), storage.read(manifest_key("run", 3, 1)))
    assert counting(storage) == [(3, 1)]
