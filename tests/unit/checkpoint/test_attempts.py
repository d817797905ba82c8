"""Attempts are claimed once each, and their resume records decide which checkpoints count."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prefect_torch_ddp.checkpoint.attempts import (
    claim_attempt,
    newest_attempt,
    record_resume,
)
from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.keys import (
    attempts_prefix,
    manifest_key,
    resume_key,
)
from prefect_torch_ddp.checkpoint.manifest import (
    Manifest,
    find_manifest,
    list_manifests,
    live_manifests,
)
from prefect_torch_ddp.checkpoint.restore import find_resumable
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage


@pytest.fixture(name="storage")
def _storage(tmp_path: Path) -> DirectoryStorage:
    return DirectoryStorage(tmp_path)


def put(storage: Storage, *owners: tuple[int, int]) -> None:
    """Write manifests of checkpoints without objects, by step and attempt."""
    for step, attempt in owners:
        manifest = Manifest("run", step, attempt, epoch=1, position={}, world_size=1)
        storage.write(manifest_key("run", step, attempt), manifest.as_bytes())


def live(storage: Storage) -> list[tuple[int, int]]:
    """Return step and attempt of those that count."""
    return [(manifest.step, manifest.attempt) for manifest in live_manifests(storage, "run")]


def resumable(storage: Storage) -> tuple[int, int]:
    """Return step and attempt of the checkpoint that a resume takes."""
    found = find_resumable(storage, "run")
    assert found is not None
    return found[0].step, found[0].attempt


def test_attempts_count_from_one_and_are_claimed_once(storage: DirectoryStorage) -> None:
    """Racing callers get different ones; `run2` is another run."""
    claim_attempt(storage, "run2")
    assert newest_attempt(storage, "run") == 0
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: claim_attempt(storage, "run"), range(8)))
    assert sorted(claimed) == list(range(1, 9))
    assert newest_attempt(storage, "run") == 8
    assert (storage.root / "runs/run/attempts/000008").exists()


def test_a_resume_record_supersedes_what_older_attempts_made_beyond_it(
    storage: DirectoryStorage,
) -> None:
    """By step; and of the step itself what an attempt committed after the one it resumed from."""
    put(storage, (2, 1), (3, 1), (3, 2), (4, 2), (4, 3))
    assert live(storage) == [(2, 1), (3, 1), (3, 2), (4, 2), (4, 3)]
    record_resume(storage, "run", 3, step=3, of_attempt=1)
    assert live(storage) == [(2, 1), (3, 1), (4, 3)]
    record_resume(storage, "run", 4, 9, of_attempt=0)  # of another run, at whatever step
    assert live(storage) == []


def test_a_late_resume_record_supersedes_nothing_that_a_newer_attempt_resumed_from(
    storage: DirectoryStorage,
) -> None:
    """Attempt 1 commits step 3 late; attempt 2 chose step 2 before, and records it after
    attempt 3 resumed from step 3."""
    attempts = [claim_attempt(storage, "run") for _ in range(3)]
    put(storage, (2, 1), (3, 1))
    record_resume(storage, "run", 3, step=3, of_attempt=1)
    record_resume(storage, "run", 2, step=2, of_attempt=1)
    assert live(storage) == [(2, 1), (3, 1)]
    newest = list_manifests(storage, "run")[-1]
    # The training was complete: the clean-up once deleted step 3 as superseded.
    Committer(storage, "run", attempts[-1], CheckpointParams(keep_last=1)).clean_up(newest)
    assert live(storage) == [(3, 1)]
    put(storage, (4, 3))
    record_resume(storage, "run", 5, step=4, of_attempt=3)
    assert live(storage) == [(3, 1), (4, 3)]
    record_resume(storage, "run", 6, step=2, of_attempt=1)  # step 4 was damaged, and step 3
    assert live(storage) == []


@pytest.mark.parametrize("at", [0, 1, 2])
def test_of_several_late_records_the_newest_attempts_stands(
    storage: DirectoryStorage, at: int
) -> None:
    """Whichever of three attempts is the last to write its own."""
    put(storage, (2, 1), (3, 1))
    records = [(2, (1, 1)), (3, (2, 1)), (4, (3, 1))]
    for attempt, (step, of_attempt) in records[at:] + records[:at]:
        record_resume(storage, "run", attempt, step, of_attempt)
    assert live(storage) == [(2, 1), (3, 1)]


def test_no_flipped_bit_of_a_resume_record_goes_unnoticed(
    storage: DirectoryStorage, caplog: pytest.LogCaptureFixture
) -> None:
    """Another number there would supersede checkpoints, and the run would start over silently."""
    put(storage, (2, 1), (3, 1))
    record_resume(storage, "run", 2, step=3, of_attempt=1)
    storage.write(f"{attempts_prefix('run')}copy-of-000002.json", b"{}")  # a person's
    key = resume_key("run", 2)
    whole = storage.read(key)
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        storage.write(key, bytes(flipped))
        caplog.clear()
        assert live(storage) == [(2, 1), (3, 1)]
        assert f"{key} is damaged and left out" in caplog.text


def test_of_a_step_the_newest_attempts_checkpoint_counts(storage: DirectoryStorage) -> None:
    """In lists, for a person who names the step, and for a resume, which takes the older one
    where the newer is damaged."""
    put(storage, (3, 1), (4, 1), (4, 2))
    record_resume(storage, "run", 2, step=4, of_attempt=1)
    listed = [(manifest.step, manifest.attempt) for manifest in list_manifests(storage, "run")]
    assert listed == [(3, 1), (4, 2)]
    assert find_manifest(storage, "run", 4).attempt == 2
    storage.write(manifest_key("run", 4, 2), b"damaged")
    assert resumable(storage) == (4, 1)
    with pytest.raises(CheckpointError, match=r"step-00000004/000002/manifest\.json is damaged"):
        find_manifest(storage, "run", 4)


def test_a_superseded_checkpoint_is_not_found_by_its_step(storage: DirectoryStorage) -> None:
    """The error says why; where it is damaged, that is no fault of the run's."""
    put(storage, (3, 1))
    record_resume(storage, "run", 2, step=2, of_attempt=1)
    says = r"no checkpoint of step 3 in .* that counts: attempt 1 made one"
    with pytest.raises(CheckpointError, match=says):
        find_manifest(storage, "run", 3)
    storage.write(manifest_key("run", 3, 1), b"damaged")
    assert find_resumable(storage, "run") is None


def test_a_manifest_that_was_copied_to_another_attempt_is_damage(
    storage: DirectoryStorage,
) -> None:
    """It names its own place."""
    put(storage, (3, 1))
    storage.write(manifest_key("run", 3, 2), storage.read(manifest_key("run", 3, 1)))
    assert live(storage) == [(3, 1)]
