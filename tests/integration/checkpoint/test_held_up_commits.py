"""An attempt is held up at each request in turn while a newer one commits the same steps."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from prefect_torch_ddp.checkpoint.attempts import (
    claim_attempt,
    write_resume,
)
from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.keys import (
    FROM_NOTHING,
    checkpoints_prefix,
    manifest_key,
    object_key,
)
from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject, list_manifests
from prefect_torch_ddp.checkpoint.rank_store import open_rank_store
from prefect_torch_ddp.checkpoint.restore import Restorer, find_resumable
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint
from prefect_torch_ddp.checkpoint.state.objects import content_digest, read_states
from prefect_torch_ddp.checkpoint.state.serial import to_bytes
from prefect_torch_ddp.errors import CheckpointError, SupersededError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from tests.support.forwarding import WatchedStorage

pytestmark = pytest.mark.extended


LAST_OF_OLDER = 5
LAST = 6
KEEP_TWO = CheckpointParams(every_s=None, keep_last=2)
KEEP_ALL = CheckpointParams(every_s=None, keep_last=99)


class HeldUpStorage(WatchedStorage):
    """A storage whose client is held up right before the nth request, while something else
    happens."""

    def __init__(self, inner: Storage, nth: int, meanwhile: Callable[[], None]) -> None:
        super().__init__(inner, self._come)
        self._num_to_come = nth
        self._meanwhile = meanwhile
        self.held_up_at = ""

    def _come(self, request: str) -> None:
        self._num_to_come -= 1
        if self._num_to_come == 0 and not self.held_up_at:
            self.held_up_at = request
            self._meanwhile()


def resume(storage: Storage, attempt: int, until: int, retention: CheckpointParams) -> int:
    """Resume as an attempt and commit a checkpoint of each step; return the first one."""
    found = find_resumable(storage, "run")
    begun = FROM_NOTHING if found is None else found[0].id
    write_resume(storage, "run", attempt, begun)
    committer = Committer(storage, "run", attempt, retention)
    first = max(begun.step, 0) + 1
    for step in range(first, until + 1):
        data = to_bytes({"step": torch.tensor(step), "attempt": torch.tensor(attempt)})
        key = object_key("run", step, attempt, "model")
        storage.write(key, data)
        item = ManifestObject("model", key, len(data), content_digest(data))
        committer.commit(Manifest("run", step, attempt, 1, {}, 1, {}, (item,)))
    return first


def damage_newest(storage: Storage) -> None:
    """Damage the newest checkpoint: who resumes takes the one before it, and makes its step
    again."""
    storage.write(list_manifests(storage, "run")[-1].objects[0].key, b"damaged")


def delete_all(storage: Storage) -> None:
    """Do as a person who wants the run to start over."""
    for found in list(storage.list(checkpoints_prefix("run"))):
        storage.delete(found.key)


def check_held_up(storage: Storage, nth: int, before: Callable[[Storage], None]) -> str:
    """Hold attempt 2 up at its nth request; attempt 3's checkpoints stay, and the next resume
    finds them. Return the request."""
    resume(storage, claim_attempt(storage, "run"), 3, KEEP_ALL)
    damage_newest(storage)  # so attempt 2 makes step 3 again, where attempt 1 left a manifest
    first = 0

    def take_over() -> None:
        nonlocal first
        attempt = claim_attempt(storage, "run")
        before(storage)
        first = resume(storage, attempt, LAST, KEEP_ALL)

    attempt = claim_attempt(storage, "run")
    held_up = HeldUpStorage(storage, nth, take_over)
    # Where all was deleted while it resumed, it finds checkpoints with holes.
    with suppress(CheckpointError if before is delete_all else SupersededError):
        resume(held_up, attempt, LAST_OF_OLDER, KEEP_TWO)
    if held_up.held_up_at:
        manifests = list_manifests(storage, "run")
        newer = [manifest.step for manifest in manifests if manifest.attempt == 3]
        assert newer == list(range(first, LAST + 1)), held_up.held_up_at
        for manifest in manifests:
            if manifest.attempt == 3 or before is not damage_newest:
                read_states(storage, manifest, manifest.objects)
        found = find_resumable(storage, "run")
        assert found is not None, held_up.held_up_at
        state = found[1]["model"]
        assert (int(state["step"]), int(state["attempt"])) == (LAST, 3)
        resume(storage, claim_attempt(storage, "run"), LAST + 1, KEEP_TWO)
        kept = [(LAST, 3), (LAST + 1, 4)]
        there = {found.key for found in storage.list(checkpoints_prefix("run"))}
        expected = {object_key("run", *owner, "model") for owner in kept} | {
            manifest_key("run", *owner) for owner in kept
        }
        assert there == expected, held_up.held_up_at
    return held_up.held_up_at


MEANWHILE = {"resumes": lambda _: None, "falls back": damage_newest, "begins anew": delete_all}


@pytest.mark.parametrize("how", MEANWHILE)
def test_at_each_request(tmp_path: Path, how: str) -> None:
    """The newer attempt's checkpoints stay untouched and complete, and readers find them."""
    held_up_at, nth = [], 1
    while request := check_held_up(DirectoryStorage(tmp_path / str(nth)), nth, MEANWHILE[how]):
        held_up_at.append(request)
        nth += 1
    folder = checkpoints_prefix("run")
    for request in (
        f"write_if_absent {folder}step-00000003/000002/manifest.json",
        f"delete {folder}step-00000003/000001/manifest.json",
        f"delete {folder}step-00000003/000002/manifest.json",
        f"delete {folder}step-00000003/000002/model.pt",
    ):
        assert request in held_up_at


@pytest.mark.parametrize(
    "retention",
    [CheckpointParams(every_s=None, keep_last=1), KEEP_ALL],
    ids=["keeps the last", "keeps all"],
)
def test_an_attempt_that_is_held_up_while_it_resumes_ends(
    tmp_path: Path, retention: CheckpointParams
) -> None:
    """The attempt ends before its first step, and the newer attempt's checkpoints stay."""
    held_up_at, nth = [], 1
    while True:
        storage = DirectoryStorage(tmp_path / str(nth))
        resume(storage, claim_attempt(storage, "run"), 3, KEEP_TWO)
        attempt = claim_attempt(storage, "run")

        def take_over(storage: Storage = storage) -> None:
            resume(storage, claim_attempt(storage, "run"), LAST, retention)

        held_up = HeldUpStorage(storage, nth, take_over)
        rank_store = open_rank_store(1)
        with suppress(SupersededError):
            Restorer.choose(ResumePoint(held_up, "run"), attempt, None, rank_store)
        if not held_up.held_up_at:
            break
        assert rank_store.get("resume") is None, held_up.held_up_at
        found = find_resumable(storage, "run")
        assert found is not None, held_up.held_up_at
        assert (found[0].step, found[0].attempt) == (LAST, 3), held_up.held_up_at
        held_up_at.append(held_up.held_up_at)
        nth += 1
    assert "write runs/run/attempts/000002.json" in held_up_at
    assert f"read {object_key('run', 3, 1, 'model')}" in held_up_at
