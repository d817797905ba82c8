"""Datasets in a storage are complete or absent, and verified when they are copied."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp.data.datasets import dataset_store
from prefect_torch_ddp.data.datasets.dataset_store import (
    find_dataset,
    local_dataset,
    publish_dataset,
    published_dataset,
)
from prefect_torch_ddp.errors import BadKeyError, StorageError
from prefect_torch_ddp.results import DatasetReport
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from tests.integration.data.image_files import write_folder
from tests.support.forwarding import ForwardingStorage

FILES = {
    "train/cat/1.png": b"one",
    "train/dog/2.png": b"second",
    "labels.txt": b"",
    "ünï/코드 b.txt": b"x" * 70_000,
}


class FarStorage(ForwardingStorage):
    """Notes what is read, and is as far away as a bucket."""

    @property
    def uri(self) -> str:
        return "far://bucket/prefix"

    def read(self, key: str) -> bytes:
        with (self.inner.root.parent / "reads").open("a") as ledger:
            ledger.write(f"{key}\n")
        time.sleep(0.02)  # as far away as a bucket
        return super().read(key)


def storage_of(kind: str, folder: Path) -> Storage:
    """Make a storage of either kind."""
    (folder / "storage").mkdir(exist_ok=True)
    return (DirectoryStorage if kind == "directory" else FarStorage)(folder / "storage")


def publish(storage: Storage, files: dict[str, bytes], dataset_id: str = "d") -> DatasetReport:
    """Publish files, as prepare writes them."""
    return publish_dataset(storage, dataset_id, lambda folder: write_folder(folder, files))


def content_of(folder: Path) -> dict[str, bytes]:
    """Read all files below a folder."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def key_of(storage: Storage, name: str) -> str:
    """Return the key of a file of the dataset."""
    (key,) = (item.key for item in storage.list("datasets/d/") if item.key.endswith(name))
    return key


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prefect-torch-ddp"


@pytest.fixture(params=["directory", "far"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Either kind."""
    return storage_of(request.param, tmp_path)


@pytest.fixture
def far(tmp_path: Path) -> Storage:
    """A storage of which datasets are copied."""
    return storage_of("far", tmp_path)


def test_round_trip(storage: Storage, tmp_path: Path) -> None:
    """What prepare wrote is what a rank reads, byte for byte, copied or in place; nothing else
    is left."""
    assert find_dataset(storage, "d") is None
    report = publish(storage, FILES)
    assert find_dataset(storage, "d") == report
    assert (report.dataset_id, report.num_files, report.num_bytes) == ("d", 4, 70_009)
    files = report.uri.removeprefix(f"{storage.uri}/")
    assert files.startswith("datasets/d/files")
    assert content_of(local_dataset(storage, "d")) == FILES
    if isinstance(storage, DirectoryStorage):
        in_place = published_dataset(storage, "d")
        assert {item.key: in_place.read(item.key) for item in in_place.list()} == FILES
    assert publish(storage, {"other": b"1"}) == report, "what is published stays"
    expected = {"datasets/d/manifest.json"} | {f"{files}/{key}" for key in FILES}
    assert {stored.key for stored in storage.list()} == expected
    folders = [path.name for path in tmp_path.rglob("*") if path.is_dir()]
    assert not [name for name in folders if name.startswith("d-") or name == "dataset"]


def test_few_large_files_are_in_memory_at_a_time(
    far: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as a bound in bytes allows, and one in any case."""
    at_a_time = []
    real = dataset_store.in_parallel

    def in_parallel(*call: Any) -> Any:
        at_a_time.extend(call[2:])
        return real(*call)

    monkeypatch.setattr(dataset_store, "in_parallel", in_parallel)
    monkeypatch.setattr(dataset_store, "IN_MEMORY_BYTES", 150_000)
    for name, largest in (("small", 1), ("large", 50_000), ("huge", 200_000)):
        publish(far, {"a": b"x" * largest, "b": b""}, name)
        assert (local_dataset(far, name) / "a").stat().st_size == largest
    assert at_a_time == [16, 16, 3, 3, 1, 1]


def test_without_its_manifest_it_is_no_dataset(storage: Storage) -> None:
    """Files of a publisher that died, or whose manifest somebody deleted, are replaced by the
    next one's."""
    publish(storage, FILES)
    storage.delete("datasets/d/manifest.json")
    assert find_dataset(storage, "d") is None
    for find in (local_dataset, published_dataset):
        with pytest.raises(StorageError, match=r"there is no dataset d in .*: prepare has not run"):
            find(storage, "d")
    publish(storage, {"train/cat/1.png": b"new"})
    assert content_of(local_dataset(storage, "d")) == {"train/cat/1.png": b"new"}
    assert len(list(storage.list())) == 2, "what the first one left is gone"


class KilledError(BaseException):
    """In place of a kill: nothing is cleaned up after it."""


@pytest.mark.parametrize("is_alone", [True, False])
def test_what_a_killed_prepare_left_is_removed(
    storage: Storage,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_alone: bool,
) -> None:
    """When the next one of the same dataset begins, or ends; what a live one writes stays, as
    does another dataset whose name begins the same."""
    root = tmp_path / "storage/.tmp/datasets" if "far" not in storage.uri else cache / "preparing"
    for dataset_id in ("d", "d-more"):
        with monkeypatch.context() as patched:
            patched.setattr("shutil.rmtree", lambda *_, **__: None)
            with pytest.raises(KilledError):
                publish_dataset(storage, dataset_id, _die)
    assert len([path for path in root.iterdir() if path.is_dir()]) == 2

    def write(folder: Path) -> None:
        own = folder.parent.parent
        assert set(root.glob("d-[0-9a-f]*")) == {own}
        if not is_alone:
            publish(storage, FILES)
        assert own.is_dir(), "that of a live prepare"
        (folder / "1").write_bytes(b"1")

    publish_dataset(storage, "d", write)
    assert [path.name[:-33] for path in root.iterdir() if path.is_dir()] == ["d-more"]


def _die(folder: Path) -> None:
    (folder / "half").write_bytes(b"1")
    raise KilledError


def test_what_was_half_uploaded_is_removed(far: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher that is killed at its last file leaves the others; the next one's commit
    deletes them."""
    whole = FarStorage.write

    def write(self: FarStorage, key: str, data: bytes) -> None:
        if key.endswith("2.png"):
            raise KilledError
        whole(self, key, data)

    with monkeypatch.context() as patched:
        patched.setattr(FarStorage, "write", write)
        with pytest.raises(KilledError):
            publish(far, FILES)
    assert 0 < len(list(far.list())) < 4
    uploads = ["datasets/d/files-0/parts", "datasets/d2/files-0/parts"]

    class Unfinished(FarStorage):
        def drop_unfinished(self, prefix: str, is_over: Callable[[str], bool]) -> None:
            over = [key for key in uploads if key.startswith(prefix) and is_over(key)]
            assert [uploads.remove(key) for key in over]
            assert not is_over(key_of(self, "2.png")), "its own"

    publish(Unfinished(far.inner), FILES)
    assert len(list(far.list())) == 5
    assert uploads == ["datasets/d2/files-0/parts"]


def test_a_slower_publisher_leaves_the_first_ones_dataset(
    far: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first publication stays, whatever the slower `prepare` wrote."""
    whole = FarStorage.write_if_absent

    def write_if_absent(self: FarStorage, key: str, data: bytes) -> bool:
        monkeypatch.setattr(FarStorage, "write_if_absent", whole)
        publish(self, FILES)
        return whole(self, key, data)

    monkeypatch.setattr(FarStorage, "write_if_absent", write_if_absent)
    assert publish(far, {"other": b"1"}).num_files == 4
    assert content_of(local_dataset(far, "d")) == FILES
    assert len(list(far.list())) == 5


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (
            lambda folder: (folder / "train").mkdir(),
            r"dataset d is empty: prepare wrote no file under ctx\.data",
        ),
        (lambda folder: (folder / "train").symlink_to(folder), "train in dataset d is a link"),
        (lambda folder: (folder / "a\\b.png").touch(), "can't be the key of an object"),
        (lambda folder: (folder / "caf\udce9.png").touch(), "can't be the key of an object"),
    ],
)
def test_what_cannot_be_stored_everywhere_is_refused(
    storage: Storage, write: Callable[[Path], object], words: str
) -> None:
    """Links are refused before anything is written, since their targets may change later."""
    with pytest.raises((StorageError, BadKeyError), match=words):
        publish_dataset(storage, "d", write)
    assert list(storage.list()) == []


def test_an_id_that_is_no_name_is_refused(far: Storage) -> None:
    """It becomes part of a key."""
    for dataset_id in ("", "..", "a/b", ".staging", "/a"):
        for use in (find_dataset, lambda storage, name: publish(storage, FILES, name)):
            with pytest.raises(BadKeyError, match="can't be a dataset's id"):
                use(far, dataset_id)


def test_a_damaged_file_is_named(storage: Storage, cache: Path) -> None:
    """Or a vanished one, and not as a FileNotFoundError hours later. A download of the right size
    and the wrong bytes never reaches the cache."""
    publish(storage, FILES)
    words = r"files.*/{} .*delete .*/datasets/d/manifest\.json"
    if "far" in storage.uri:
        key = key_of(storage, "1.png")
        storage.write(key, b"0ne")
        damaged = words.format(r"train/cat/1\.png is damaged: its sha256")
        with pytest.raises(StorageError, match=damaged):
            local_dataset(storage, "d")
        storage.write(key, b"one")
    storage.delete(key_of(storage, "2.png"))
    with pytest.raises(StorageError, match=words.format(r"train/dog/2\.png is")):
        local_dataset(storage, "d")
    assert not list(cache.glob("**/*.png"))


@pytest.mark.parametrize(
    "left", ["nothing", "another size", "a folder", "a loop", "a file above it"]
)
def test_a_file_that_is_no_more_what_it_was(tmp_path: Path, left: str) -> None:
    """A changed file of a dataset that is read in place is named."""
    storage = storage_of("directory", tmp_path)
    publish(storage, FILES)
    path = local_dataset(storage, "d") / "train/dog/2.png"
    path.unlink()
    if left == "another size":
        path.write_bytes(b"other")
    elif left == "a folder":
        path.mkdir()
    elif left == "a loop":
        path.symlink_to(path)
    elif left == "a file above it":
        path.parent.rmdir()
        path.parent.touch()
    with pytest.raises(StorageError, match=r"train/dog/2\.png is missing or has another size"):
        local_dataset(storage, "d")


def test_a_manifest_that_was_changed_is_refused(storage: Storage) -> None:
    """Its entries must give its digest, and can't lead outside: whoever may write to the storage
    must not write to the ranks' hosts."""
    publish(storage, FILES)
    text = storage.read("datasets/d/manifest.json")
    whole, words = json.loads(text), r"manifest\.json can't be read"
    changes = [(text.replace(b"labels.txt", b"l4bels.txt"), r"manifest\.json is damaged")]
    for key in ("../../../evil", "/etc/evil", "a/../../evil"):
        changes.append((_dumped(whole, files=[{**whole["files"][0], "key": key}]), words))
        changes.append((_dumped(whole, folder=key), words))
    for changed, says in changes:
        storage.write("datasets/d/manifest.json", changed)
        for read in (find_dataset, local_dataset):
            with pytest.raises(StorageError, match=says):
                read(storage, "d")


def _dumped(whole: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps(whole | changes).encode()


def test_a_cached_copy_with_a_lost_or_cut_file_is_replaced(far: Storage) -> None:
    """A cleaner of old cache files doesn't break the next run."""
    publish(far, FILES)
    local = local_dataset(far, "d")
    (local / "train/cat/1.png").unlink()
    assert content_of(local_dataset(far, "d")) == FILES
    (local / "train/dog/2.png").write_bytes(b"s")
    assert local_dataset(far, "d") == local
    assert content_of(local) == FILES


def test_a_cache_that_cannot_be_written_is_named(
    far: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way out is in the message."""
    publish(far, FILES)
    (tmp_path / "file").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for reach in (lambda: local_dataset(far, "d"), lambda: publish(far, FILES, "e")):
        with pytest.raises(StorageError, match=r"can't .* in .*/file.*: .*XDG_CACHE_HOME"):
            reach()


def test_a_copy_of_another_user_is_refused(far: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files may have the right sizes and any content."""
    publish(far, FILES)
    folder = local_dataset(far, "d")
    if os.geteuid() == 0:  # whose copies everybody trusts
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(StorageError, match=rf"{folder} belongs to another user.*XDG_CACHE_HOME"):
        local_dataset(far, "d")
