"""Which checkpoints retention keeps, and what is read of manifests."""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp.checkpoint.commit import superfluous
from prefect_torch_ddp.checkpoint.keys import manifest_key
from prefect_torch_ddp.checkpoint.manifest import (
    Manifest,
    ManifestObject,
    best,
    checkpoint_ref,
    find_manifest,
    list_manifests,
    live_manifests,
    read_manifest,
)
from prefect_torch_ddp.checkpoint.shard import GENERATORS, Layout
from prefect_torch_ddp.errors import CheckpointError, NewerFormatError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.formats import DAMAGE, RESUME
from tests.support.formats import rewrite


def manifest(step: int, **metrics: float) -> Manifest:
    """Describe a checkpoint of one object."""
    item = ManifestObject("model", f"runs/run/checkpoints/step-{step:08d}/000001/model.pt", 3, "00")
    return Manifest("run", step, 1, 1, {"batch": 2}, 2, metrics, (item,))


def deleted(manifests: list[Manifest], **retention: object) -> list[int]:
    """Return the steps that go."""
    return [old.step for old in superfluous(manifests, CheckpointParams(**retention))]  # type: ignore[arg-type]


def test_the_newest_and_the_best_stay() -> None:
    """The newest in any order; the best by a metric, of equals the older, nearer to the
    measurement; those without a finite value are never the best."""
    accuracies = {10: 0.5, 20: 0.9, 30: 0.9, 40: math.nan, 50: math.inf, 60: 0.1}
    manifests = [manifest(step, accuracy=value) for step, value in accuracies.items()]
    assert deleted(manifests[::-1], keep_last=2) == [10, 20, 30, 40]
    assert deleted(manifests, keep_last=1, keep_best=1, best_metric="accuracy") == [10, 30, 40, 50]
    assert deleted(manifests, keep_last=1, keep_best=2, best_metric="accuracy") == [10, 40, 50]
    by_loss = {"best_metric": "accuracy", "best_mode": "min"}
    all_but_last = [10, 20, 30, 40, 50]
    assert deleted(manifests, keep_last=1, keep_best=1, **by_loss) == all_but_last
    assert deleted(manifests, keep_last=1, keep_best=0, best_metric="accuracy") == all_but_last
    assert deleted(manifests, keep_last=1, keep_best=3, best_metric="loss") == all_but_last
    manifests[1:3] = [replace(each, reports={"accuracy": (20, 20)}) for each in manifests[1:3]]
    assert deleted(manifests, keep_last=1, keep_best=2, best_metric="accuracy") == [30, 40, 50]


def shards_of_all_kinds() -> tuple[ManifestObject, ...]:
    """Return a whole object, a rank's state of another one, and a rank's random generators."""
    return (
        ManifestObject("model", "k/model.pt", 3, "00", is_module=True),
        ManifestObject("steps-0", "k/0.pt", 3, "01", rank=1, layout=Layout.BY_RANK),
        ManifestObject(GENERATORS, "k/1.pt", 3, "02", rank=1, layout=Layout.BY_RANK),
    )


def test_shards_are_found_by_object_and_rank() -> None:
    """Of a rank that has none there is none, and a whole object is no rank's."""
    model, place, generators = shards_of_all_kinds()
    stored = replace(manifest(1), objects=(model, place, generators))
    assert stored.find("model") == model
    assert stored.find("steps-0", 1) == place
    assert stored.find(GENERATORS, 1) == generators
    for lacking in (("model", 1), ("steps-0", None), ("steps-0", 0), ("steps-0.rank-00001", None)):
        assert stored.find(*lacking) is None


@pytest.mark.parametrize(
    "lacks",
    [{"object", "layout"}, {"object", "layout", "rank", "path"}],
    ids=["no layout", "only the name"],
)
def test_shards_of_an_earlier_version_are_told_by_their_names(lacks: set[str]) -> None:
    """It stored only a unique name, which is still stored: it finds what this version wrote."""
    stored = [item.as_stored() for item in shards_of_all_kinds()]
    assert [each["name"] for each in stored] == ["model", "steps-0.rank-00001", "rank-00001"]
    old = [{name: value for name, value in each.items() if name not in lacks} for each in stored]
    assert tuple(map(ManifestObject.from_stored, old)) == shards_of_all_kinds()


def test_a_file_is_no_shard_whatever_its_name() -> None:
    """User code names it."""
    path = "folder/a.rank-00001"
    file = ManifestObject(path, "k", 3, "00", rank=0, path=path)
    stored = file.as_stored()
    assert stored["name"] == path
    assert ManifestObject.from_stored(stored) == file
    del stored["object"], stored["layout"]
    assert ManifestObject.from_stored(stored) == file


def test_a_layout_of_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    """As a newer format is: the checkpoint isn't damaged, and no older one is taken instead."""
    storage = DirectoryStorage(tmp_path)
    for step in (1, 2):
        storage.write(manifest_key("run", step, 1), manifest(step).as_bytes())
    key = manifest_key("run", 2, 1)
    objects = [{**item.as_stored(), "layout": "by_row"} for item in manifest(2).objects]
    rewrite(storage, key, {"objects": objects})
    said = f"{key} has 'model' in the layout 'by_row', which .* Install the version that wrote it"
    with pytest.raises(NewerFormatError, match=said):
        list_manifests(storage, "run")
    kept = live_manifests(storage, "run", allow_newer=True)
    assert [each.step for each in kept] == [1]


def test_manifests_read_back(tmp_path: Path) -> None:
    """Manifests are valid JSON, nan included, and are read back as they were written."""
    storage = DirectoryStorage(tmp_path)
    written = [manifest(100, accuracy=0.75, loss=math.nan), manifest(9, accuracy=0.8)]
    for item in written:
        storage.write(manifest_key("run", item.step, 1), item.as_bytes())
    json.loads(written[0].as_bytes(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    again = read_manifest(storage, "run", 100, 1)
    assert math.isnan(again.metrics["loss"])
    assert again.objects == written[0].objects
    assert (again.position, again.world_size) == ({"batch": 2}, 2)
    refs = [checkpoint_ref(storage, found) for found in list_manifests(storage, "run")]
    assert [(ref.step, ref.attempt, ref.metrics) for ref in refs] == [
        (9, 1, {"accuracy": 0.8}),
        (100, 1, {"accuracy": 0.75}),
    ]
    assert refs[1].uri == f"{tmp_path}/runs/run/checkpoints/step-00000100/000001/manifest.json"
    assert best(storage, "run", "accuracy") == written[1]
    assert best(storage, "run", "unknown") is None
    assert list_manifests(storage, "other") == []


@pytest.mark.parametrize(
    ("data", "read"),
    [
        (manifest(1, accuracy=0.5).as_bytes(), Manifest.from_bytes),
        (RESUME.to_bytes({"step": 3, "of_attempt": 1}), lambda data: RESUME.from_bytes(data, "it")),
    ],
    ids=["manifest", "resume record"],
)
def test_no_flipped_bit_of_a_manifest_goes_unnoticed(
    data: bytes, read: Callable[[bytes], object]
) -> None:
    """A flipped bit of a manifest or resume record damages it, changes its format or changes
    nothing."""
    whole, same = read(data), 0
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with suppress(*DAMAGE, NewerFormatError):
            assert read(bytes(flipped)) == whole, bit
            same += 1
    assert same < len(data), "white space, at most"


def test_a_damaged_manifest_is_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not the end of everything that reads the run."""
    storage = DirectoryStorage(tmp_path)
    storage.write(manifest_key("run", 1, 1), manifest(1).as_bytes())
    for damaged in (b'{"step": 2', b"[]", b""):
        storage.write(manifest_key("run", 2, 1), damaged)
        caplog.clear()
        assert [found.step for found in list_manifests(storage, "run")] == [1]
        assert "step-00000002/000001/manifest.json is damaged" in caplog.text
    with pytest.raises(CheckpointError, match="run run has no checkpoint of step 3 of attempt 1"):
        read_manifest(storage, "run", 3, 1)
    with pytest.raises(CheckpointError, match="run run has no checkpoint of step 3 in"):
        find_manifest(storage, "run", 3)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"best_metric": "validation_loss"}, "min"),
        ({"best_metric": "val_accuracy"}, "max"),
        ({"best_metric": "something"}, "max"),
        ({"best_metric": "validation_loss", "best_mode": "max"}, "max"),
        ({"best_metric": "something", "best_mode": "min"}, "min"),
        ({}, "max"),
    ],
)
def test_a_metrics_name_says_which_of_its_values_is_the_best(
    given: dict[str, Any], expected: str
) -> None:
    """Unless it is said: the best checkpoint by a loss isn't the one with the largest."""
    assert CheckpointParams(**given).best_is == expected
