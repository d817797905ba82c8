"""Attempts are claimed once each; resume records decide which checkpoints count."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint import attempts
from prefect_torch_ddp.checkpoint.attempts import (
    claim_attempt,
    newest_attempt,
    write_resume,
)
from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.keys import (
    CheckpointId,
    attempt_key,
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
from prefect_torch_ddp.checkpoint.rank_store import open_rank_store
from prefect_torch_ddp.checkpoint.restore import Restorer, find_resumable
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint
from prefect_torch_ddp.errors import (
    CheckpointError,
    DamagedObjectError,
    ObjectNotFoundError,
    StorageError,
)
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.assembly import ContextAssembly
from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.process.failure import retryability_of
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from tests.support.forwarding import ForwardingStorage
from tests.support.tracked import Tracked


@pytest.fixture(name="storage")
def _storage(tmp_path: Path) -> DirectoryStorage:
    return DirectoryStorage(tmp_path)


def put(storage: Storage, *owners: tuple[int, int]) -> None:
    """Write manifests of checkpoints without objects, by step and attempt."""
    for step, attempt in owners:
        manifest = Manifest("run", step, attempt, epoch=1, position={}, world_size=1)
        storage.write(manifest_key("run", step, attempt), manifest.as_bytes())


def live(storage: Storage) -> list[CheckpointId]:
    """Return those that count."""
    return [manifest.id for manifest in live_manifests(storage, "run")]


def resumable(storage: Storage) -> CheckpointId:
    """Return the checkpoint that a resume takes."""
    found = find_resumable(storage, "run")
    assert found is not None
    return found[0].id


def test_attempts_count_from_one_and_are_claimed_once(storage: DirectoryStorage) -> None:
    """Racing callers get different ones; `run2` is another run."""
    claim_attempt(storage, "run2")
    assert newest_attempt(storage, "run") == 0
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: claim_attempt(storage, "run"), range(8)))
    assert sorted(claimed) == list(range(1, 9))
    assert newest_attempt(storage, "run") == 8
    assert (storage.root / "runs/run/attempts/000008").exists()


LATE_ONE = [(3, (3, 1)), (2, (2, 1))]
LATE = [(2, (1, 1)), (3, (2, 1)), (4, (3, 1))]
ORDERS: dict[str, tuple[list[tuple[int, tuple[int, int]]], list[tuple[int, int]]]] = {
    "none": ([], [(2, 1), (3, 1), (3, 2), (4, 2), (4, 3)]),
    "one": ([(3, (3, 1))], [(2, 1), (3, 1), (4, 3)]),
    "of another run, at whatever step": ([(3, (3, 1)), (4, (9, 0))], []),
    "late": (LATE_ONE, [(2, 1), (3, 1), (4, 3)]),
    "late, and resumed from a newer one": ([*LATE_ONE, (5, (4, 3))], [(2, 1), (3, 1), (4, 3)]),
    "and fell back behind damage": ([*LATE_ONE, (5, (4, 3)), (6, (2, 1))], [(2, 1)]),
    # Of several late ones the newest attempt's stands, whichever is the last to be written.
    **{f"late, from {at} on": (LATE[at:] + LATE[:at], [(2, 1), (3, 1)]) for at in range(3)},
}


@pytest.mark.parametrize(("records", "expected"), ORDERS.values(), ids=ORDERS)
def test_a_resume_record_supersedes_what_older_attempts_made_beyond_it(
    storage: DirectoryStorage,
    records: list[tuple[int, tuple[int, int]]],
    expected: list[tuple[int, int]],
) -> None:
    """A resume record supersedes later checkpoints of older attempts, unless the record
    comes too late."""
    put(storage, (2, 1), (3, 1), (3, 2), (4, 2), (4, 3))
    for attempt, at in records:
        write_resume(storage, "run", attempt, CheckpointId(*at))
    assert live(storage) == expected


def test_a_late_resume_record_deletes_nothing(storage: DirectoryStorage) -> None:
    """Attempt 1 commits step 3 late; attempt 2 chose step 2 before, and records it after
    attempt 3 resumed from step 3."""
    last_attempt = [claim_attempt(storage, "run") for _ in range(3)][-1]
    put(storage, (2, 1), (3, 1))
    write_resume(storage, "run", 3, CheckpointId(3, 1))
    write_resume(storage, "run", 2, CheckpointId(2, 1))
    newest = list_manifests(storage, "run")[-1]
    # The training was complete: the clean-up once deleted step 3 as superseded.
    committer = Committer(storage, "run", last_attempt, CheckpointParams(keep_last=1))
    committer.clean_up(newest, is_last=True)
    assert live(storage) == [(3, 1)]


def test_a_damaged_resume_record_is_left_out(
    storage: DirectoryStorage, caplog: pytest.LogCaptureFixture
) -> None:
    """Another number there would supersede checkpoints, and the run would start over silently."""
    put(storage, (2, 1), (3, 1))
    write_resume(storage, "run", 2, CheckpointId(3, 1))
    storage.write(f"{attempts_prefix('run')}copy-of-000002.json", b"{}")  # a person's
    key = resume_key("run", 2)
    whole = storage.read(key)
    for damaged in (whole.replace(b'"step": 3', b'"step": 1'), b"[]", b""):
        storage.write(key, damaged)
        caplog.clear()
        assert live(storage) == [(2, 1), (3, 1)]
        assert f"{key} is damaged and left out" in caplog.text


def test_of_a_step_the_newest_attempts_checkpoint_counts(storage: DirectoryStorage) -> None:
    """Lists and resumes take the newest attempt's checkpoint, or the older one if it is damaged."""
    put(storage, (3, 1), (4, 1), (4, 2))
    write_resume(storage, "run", 2, CheckpointId(4, 1))
    listed = [(manifest.step, manifest.attempt) for manifest in list_manifests(storage, "run")]
    assert listed == [(3, 1), (4, 2)]
    assert find_manifest(storage, "run", 4).attempt == 2
    storage.write(manifest_key("run", 4, 2), b"damaged")
    assert resumable(storage) == (4, 1)
    with pytest.raises(CheckpointError, match=r"step-00000004/000002/manifest\.json is damaged"):
        find_manifest(storage, "run", 4)


def test_a_superseded_checkpoint_is_not_found_by_its_step(storage: DirectoryStorage) -> None:
    """The error says why, also if the superseded checkpoint is damaged."""
    put(storage, (3, 1))
    write_resume(storage, "run", 2, CheckpointId(2, 1))
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


def test_a_rank_that_does_not_see_its_claim_does_not_start_from_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host started before the storage's folder was mounted. Another attempt may succeed."""
    monkeypatch.setattr(attempts, "LOOK_S", 0.0)
    storage = DirectoryStorage(tmp_path / "mounted")
    config = RankConfig("run", claim_attempt(storage, "run"), "train", storage)
    storage.root.rename(tmp_path / "elsewhere")
    says = r"host \S+ doesn't find \S+/mounted/runs/run/attempts/000001, which was written before"
    with RankContext(ContextAssembly(config, RankInfo())) as ctx:
        with pytest.raises(StorageError, match=says) as caught:
            ctx.track(counter=Tracked())
        assert not (storage.root / resume_key("run", 1)).exists()
    assert retryability_of(caught.value) == "transient"


@pytest.mark.parametrize("fault", [ObjectNotFoundError, DamagedObjectError])
def test_a_claim_that_is_shown_late_or_damaged_is_a_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: type[StorageError]
) -> None:
    """A network's folder shows it late, or it is mounted a moment after its host's worker began."""
    monkeypatch.setattr(attempts, "LOOK_S", 1.0)
    faults = [fault("at the first look")]

    class Late(ForwardingStorage):
        def read(self, key: str) -> bytes:
            if key == attempt_key("run", 1) and faults:
                raise faults.pop()
            return super().read(key)

    storage = Late(tmp_path)
    attempt = claim_attempt(storage, "run")
    chosen = Restorer.choose(ResumePoint(storage, "run"), attempt, None, open_rank_store(1))
    assert (chosen.manifest, faults) == (None, [])
    assert storage.read(resume_key("run", attempt))
