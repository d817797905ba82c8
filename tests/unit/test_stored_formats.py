"""What version 0.1 left in a storage is read for ever; files of later versions are read, or
refused by name, and are never deleted."""

import gzip
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp import (
    CheckpointParams,
    RankContext,
    read_goodput,
    read_ledger,
    read_metrics,
    read_result,
)
from prefect_torch_ddp.checkpoint.attempts import had_ended, read_failures
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.checkpoint.shard import GENERATORS, Shard
from prefect_torch_ddp.data.datasets.dataset_manifest import read_dataset_manifest
from prefect_torch_ddp.data.images.listing import read_index
from prefect_torch_ddp.errors import NewerFormatError
from prefect_torch_ddp.records.run_record import list_run_records
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.formats import FORMATS, STATISTICS, TENSORBOARD, WANDB
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tracking.attempt_log import RunAttemptLog
from prefect_torch_ddp.tracking.finished import finished_training
from prefect_torch_ddp.tracking.trackers.mlflow_models import read_card, tags_of
from tests.data.make_storage import Images, train
from tests.support.formats import MORE, NEWER, rewrite, rewrite_lines, snapshot
from tests.support.storage_0_1 import DATASET_ID, FOLDER, RUN_ID, copied

RUN = f"runs/{RUN_ID}"
LATEST = f"{RUN}/checkpoints/step-00000015/000002/manifest.json"
PART = "rank-00000/000002-000001.jsonl"
CARD = f"{RUN}/models/000002/model.json"
DATASET = f"datasets/{DATASET_ID}"
RECORD = "20261125T064108Z"
OPEN = {"metrics", "options", "data_options", "parameters", "arguments", "value", "versions"}
"""Fields that hold what a person or a workload named."""


@pytest.fixture(name="storage")
def _storage(tmp_path: Path) -> DirectoryStorage:
    return DirectoryStorage(copied(tmp_path / "storage"))


def stored_files() -> Iterator[Path]:
    """Yield the files of the storage that have a format."""
    for path in FOLDER.rglob("*"):
        is_plain = path.suffix in {".pt", ".npy", ".safetensors", ".txt"}
        if path.is_file() and not is_plain and "results" not in path.parts:
            yield path


def one_more_epoch(storage: DirectoryStorage) -> int | None:
    """Continue the run in the next attempt, keeping one checkpoint; return the resumed step."""
    policy = CheckpointParams(every_steps=2, every_s=None, keep_last=1)
    with RankContext.local(
        storage.root / DATASET / "files",
        {"epochs": 4},
        7,
        storage,
        run_id=RUN_ID,
        checkpoint=policy,
        ledger=True,
    ) as ctx:
        assert train(ctx) == {"steps": 20}
    return ctx._assembly.outcome()["resumed_from_step"]


def only_record(storage: Storage) -> dict[str, Any]:
    """Return the run's record as plain values."""
    (record,) = list_run_records(storage)
    return record.model_dump(mode="json")


def last_ended(storage: Storage) -> bool:
    """Tell whether the newest checkpoint is the end."""
    return had_ended(storage, RUN_ID, list_manifests(storage, RUN_ID)[-1].id)


@dataclass(frozen=True)
class Kind:
    """A kind of file."""

    key: str
    read: Callable[[DirectoryStorage], Any]
    is_lines: bool = False

    def change(self, storage: Storage, changes: dict[str, Any], *, inner: bool = False) -> None:
        """Change its fields, or those of its head; `inner`: of each line too."""
        if self.is_lines:
            rewrite_lines(storage, self.key, changes, changes if inner else None)
        else:
            rewrite(storage, self.key, changes)


KINDS = {
    "manifest": Kind(LATEST, lambda storage: list_manifests(storage, RUN_ID)),
    "resume record": Kind(
        f"{RUN}/attempts/000002.json", lambda storage: list_manifests(storage, RUN_ID)
    ),
    "end": Kind(f"{RUN}/ended", last_ended),
    "claim": Kind(f"{RUN}/attempts/000001", lambda storage: read_goodput(storage, RUN_ID)),
    "failure": Kind(f"{RUN}/failures/000001.json", lambda storage: read_failures(storage, RUN_ID)),
    "finished training": Kind(
        f"{RUN}/training.json",
        lambda storage: finished_training(storage, RUN_ID),
    ),
    "model card": Kind(CARD, lambda storage: [*tags_of(read_card(storage, CARD))]),
    "metrics": Kind(
        f"{RUN}/metrics/{PART}",
        lambda storage: read_metrics(storage, RUN_ID).to_dict(),
        is_lines=True,
    ),
    "timing": Kind(
        f"{RUN}/timing/rank-00000/000002-000003.jsonl",
        lambda storage: read_goodput(storage, RUN_ID),
        is_lines=True,
    ),
    "ledger": Kind(
        f"{RUN}/ledger/{PART}", lambda storage: read_ledger(storage, RUN_ID), is_lines=True
    ),
    "run record": Kind(
        f"run-records/train-ddp-tests-data-make-storage/{RECORD}-{RUN_ID}.json", only_record
    ),
    "dataset": Kind(
        f"{DATASET}/manifest.json", lambda storage: read_dataset_manifest(storage, DATASET_ID)
    ),
    "index": Kind(
        f"{DATASET}/files/objects.jsonl.gz",
        lambda storage: list(read_index(storage.root / DATASET / "files", Images().uri)),
        is_lines=True,
    ),
}


def test_what_0_1_wrote_is_read(storage: DirectoryStorage) -> None:
    """Checkpoints, metrics, ledger, goodput, files, and the record of the run."""
    manifests = list_manifests(storage, RUN_ID)
    assert [found.step for found in manifests] == [12, 15]
    whole, each = (
        {Shard("model"), Shard("optimizer")},
        (Shard.of_rank(GENERATORS, i) for i in (0, 1)),
    )
    assert {item.shard for item in manifests[-1].objects} == {*whole, *each}
    metrics = read_metrics(storage, RUN_ID)
    assert metrics.step.tolist() == [step for step in range(1, 16) for _ in range(2)]
    assert metrics.loss.notna().all()
    assert read_ledger(storage, RUN_ID).is_clean
    goodput = read_goodput(storage, RUN_ID)
    assert (goodput.num_attempts, goodput.redone_s > 0) == (2, True)
    assert json.loads(read_result(storage, RUN_ID, "notes.json")) == {"steps": 15}
    dataset = read_dataset_manifest(storage, DATASET_ID)
    assert dataset is not None
    assert {file.num_rows for file in dataset.files} == {None}
    (record,) = list_run_records(storage)
    assert (record.state, record.num_steps, len(record.attempts)) == ("completed", 15, 2)
    assert record.evaluation is not None
    assert record.evaluation.num_samples == 21


def test_the_run_of_0_1_is_continued(storage: DirectoryStorage) -> None:
    """Another attempt resumes from its last checkpoint, and retention deletes it as its own."""
    assert one_more_epoch(storage) == 15
    assert [found.id for found in list_manifests(storage, RUN_ID)] == [(20, 3)]
    assert read_ledger(storage, RUN_ID).is_clean


@pytest.mark.parametrize("kind", KINDS)
def test_fields_that_a_later_version_added_change_nothing(
    storage: DirectoryStorage, kind: str
) -> None:
    """Whatever reads the file gives what it gave before."""
    before = KINDS[kind].read(storage)
    KINDS[kind].change(storage, MORE, inner=True)
    assert str(KINDS[kind].read(storage)) == str(before)


def test_a_run_to_whose_files_a_later_version_added_is_continued(storage: DirectoryStorage) -> None:
    """To all of them, each line of records included."""
    for path in stored_files():
        is_lines = ".jsonl" in path.name
        Kind(str(path.relative_to(FOLDER)), str, is_lines).change(storage, MORE, inner=True)
    assert one_more_epoch(storage) == 15
    assert read_ledger(storage, RUN_ID).is_clean


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_a_higher_format_is_refused_and_stays(
    storage: DirectoryStorage, kind: str
) -> None:
    """The error names it, its format and the version to install; a training that doesn't need
    the file leaves it as it is, and one that does is refused before it writes a checkpoint."""
    key = KINDS[kind].key
    KINDS[kind].change(storage, NEWER)
    newer, before = storage.read(key), snapshot(storage)
    says = rf"{key} is a [\w ']+ of format 7, which version 9\.1\.0 wrote;.* Install 9\.1\.0"
    with pytest.raises(NewerFormatError, match=says):
        KINDS[kind].read(storage)
    assert snapshot(storage) == before
    is_needed = kind in ("manifest", "resume record", "end")
    if is_needed:
        with pytest.raises(NewerFormatError, match=says):
            one_more_epoch(storage)
        assert before.items() <= snapshot(storage).items()
    else:
        assert one_more_epoch(storage) == 15
        assert storage.read(key) == newer


@pytest.mark.parametrize("kind", ["manifest", "resume record", "end"])
def test_a_higher_format_may_name_its_digest_otherwise(
    storage: DirectoryStorage, kind: str
) -> None:
    """It is refused by name all the same, and not taken for damaged."""
    key = KINDS[kind].key
    values = {**json.loads(storage.read(key)), **NEWER}
    values["blake3"] = values.pop("sha256")
    storage.write(key, json.dumps(values).encode())
    before = snapshot(storage)
    for use in (KINDS[kind].read, one_more_epoch):
        with pytest.raises(NewerFormatError, match=rf"{key} is a .* of format 7"):
            use(storage)
        assert before.items() <= snapshot(storage).items()


def test_every_format_is_tried(tmp_path: Path) -> None:
    """Here, or by the tests of what writes it: this storage has no file of those three kinds."""
    elsewhere = {each.kind for each in (STATISTICS, TENSORBOARD, WANDB)}
    tried = set()
    for name, kind in KINDS.items():
        storage = DirectoryStorage(copied(tmp_path / name))
        kind.change(storage, NEWER)
        with pytest.raises(NewerFormatError) as refused:
            kind.read(storage)
        tried |= set(re.findall(rf"{kind.key} is a ([\w &']+) of format 7", str(refused.value)))
    assert tried | elsewhere == {each.kind for each in FORMATS}
    assert not tried & elsewhere


def test_a_newer_failure_ends_a_training_before_it_begins(storage: DirectoryStorage) -> None:
    """Not when all steps are made, where failures are counted; no attempt is claimed."""
    KINDS["failure"].change(storage, NEWER)
    before = snapshot(storage)
    with pytest.raises(NewerFormatError, match=r"failures/000001\.json is a .* of format 7"):
        RunAttemptLog(storage, RUN_ID, knows_steps=True).begin()
    assert snapshot(storage) == before


def _fields_of(values: Any) -> Iterator[str]:
    if isinstance(values, list):
        for each in values:
            yield from _fields_of(each)
    elif isinstance(values, dict):
        for name, value in values.items():
            yield name
            if name not in OPEN | {"measured", "seconds", "reports", "model_uris", "split"}:
                yield from _fields_of(value)


def test_each_stored_field_has_its_place_on_the_page() -> None:
    """And each file begins with its format and the version that wrote it."""
    page = (Path(__file__).parents[2] / "docs/formats.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"`(\w+)`", page))
    for path in stored_files():
        data = path.read_bytes()
        is_lines = ".jsonl" in path.name
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        first, *rest = map(json.loads, text.splitlines() if is_lines else [text])
        assert list(first)[:2] == ["format", "version"], path
        assert (first["format"], first["version"]) == (1, "0.1.0"), path
        assert set(_fields_of([first, *rest])) <= explained, path
