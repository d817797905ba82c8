"""Datasets in a storage: whole or absent, moved and not copied where they lie, verified where
they are copied."""

import json
import threading
import time
from pathlib import Path

import pytest

from prefect_torch_ddp.data.dataset_store import (
    dataset_in_place,
    find_dataset,
    local_dataset,
    prepare_folder,
    publish_dataset,
)
from prefect_torch_ddp.errors import BadKeyError, StorageError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
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
        """See Storage.uri."""
        return "far://bucket/prefix"

    def read(self, key: str) -> bytes:
        """See Storage.read."""
        with (self.inner.root.parent / "reads").open("a") as ledger:
            ledger.write(f"{key}\n")
        time.sleep(0.02)  # as far away as a bucket
        return super().read(key)


def storage_of(kind: str, folder: Path) -> Storage:
    """Make a storage of either kind."""
    (folder / "storage").mkdir(exist_ok=True)
    return (
        DirectoryStorage(folder / "storage")
        if kind == "directory"
        else FarStorage(folder / "storage")
    )


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    """Write files below a folder; return it."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def content_of(folder: Path) -> dict[str, bytes]:
    """Read all files below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(params=["directory", "far"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Either kind."""
    return storage_of(request.param, tmp_path)


def test_round_trip(storage: Storage, tmp_path: Path) -> None:
    """What prepare wrote is what a rank reads, byte for byte; nothing else is left."""
    assert find_dataset(storage, "d1") is None
    with prepare_folder(storage, "d1") as folder:
        fill(folder, FILES)
        report = publish_dataset(storage, "d1", folder)
    assert not folder.exists()
    assert find_dataset(storage, "d1") == report
    assert (report.dataset_id, report.num_files, report.num_bytes) == ("d1", 4, 70_009)
    assert report.uri == f"{storage.uri}/datasets/d1/files"
    local = local_dataset(storage, "d1", tmp_path / "cache")
    assert content_of(local) == FILES
    expected = {"datasets/d1/manifest.json"} | {f"datasets/d1/files/{key}" for key in FILES}
    assert {stored.key for stored in storage.list()} == expected


def test_the_digest_is_that_of_names_and_contents(tmp_path: Path) -> None:
    """The same on both kinds; another name or another byte gives another."""
    folders = [
        FILES,
        FILES,
        {**FILES, "labels.txt": b"!"},
        {"other.txt": b"", **{k: v for k, v in FILES.items() if v}},
    ]
    digests = []
    for i, files in enumerate(folders):
        folder = fill(tmp_path / f"folder {i}", files)
        (tmp_path / str(i)).mkdir()
        digests.append(
            publish_dataset(
                storage_of(["directory", "far"][i % 2], tmp_path / str(i)), "d", folder
            ).digest
        )
        assert content_of(folder) == files, "a folder of the caller's own stays as it is"
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_a_directory_moves_the_files_and_reads_them_in_place(tmp_path: Path) -> None:
    """No copy on the way in or out: the file is the same inode."""
    storage = DirectoryStorage(tmp_path)
    with prepare_folder(storage, "d") as folder:
        fill(folder, FILES)
        inode = (folder / "labels.txt").stat().st_ino
        publish_dataset(storage, "d", folder)
    local = local_dataset(storage, "d")
    assert local == tmp_path / "datasets" / "d" / "files"
    assert (local / "labels.txt").stat().st_ino == inode


def test_what_is_published_stays(storage: Storage, tmp_path: Path) -> None:
    """The same id, the same data: a second publisher gets the first one's report."""
    first = publish_dataset(storage, "d", fill(tmp_path / "a", FILES))
    assert publish_dataset(storage, "d", fill(tmp_path / "b", {"other": b"1"})) == first
    assert content_of(local_dataset(storage, "d", tmp_path / "cache")) == FILES


def test_without_its_manifest_it_is_no_dataset(storage: Storage, tmp_path: Path) -> None:
    """Files of a publisher that died, or whose manifest somebody deleted, are replaced by the
    next one's."""
    publish_dataset(storage, "d", fill(tmp_path / "a", FILES))
    storage.delete("datasets/d/manifest.json")
    assert find_dataset(storage, "d") is None
    with pytest.raises(StorageError, match=r"there is no dataset d in .*: prepare has not run"):
        local_dataset(storage, "d", tmp_path / "cache")
    publish_dataset(storage, "d", fill(tmp_path / "b", {"train/cat/1.png": b"new"}))
    assert content_of(local_dataset(storage, "d", tmp_path / "cache")) == {
        "train/cat/1.png": b"new"
    }


def test_an_empty_dataset_is_refused(storage: Storage) -> None:
    """A prepare that wrote nothing is told so, there and then."""
    with prepare_folder(storage, "d") as folder:
        (folder / "train").mkdir()
        with pytest.raises(
            StorageError, match=r"dataset d is empty: prepare wrote no file under ctx\.data"
        ):
            publish_dataset(storage, "d", folder)
    assert find_dataset(storage, "d") is None


def test_links_are_refused(storage: Storage, tmp_path: Path) -> None:
    """What a link points to may change behind the digest; a link to a folder would be left out
    silently."""
    (tmp_path / "elsewhere").mkdir()
    with prepare_folder(storage, "d") as folder:
        (folder / "train").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StorageError, match="train in dataset d is a link"):
            publish_dataset(storage, "d", folder)


@pytest.mark.parametrize("dataset_id", ["", "..", "a/b", ".staging", "/a"])
def test_an_id_that_is_no_name_is_refused(storage: Storage, dataset_id: str) -> None:
    """It becomes part of a key."""
    with pytest.raises(BadKeyError, match="can't be a dataset's id"):
        find_dataset(storage, dataset_id)


@pytest.mark.parametrize("name", ["a\\b.png", "caf\udce9.png"])
def test_a_file_name_that_is_no_key_is_refused(storage: Storage, tmp_path: Path, name: str) -> None:
    """The same on every storage, and before anything is written."""
    with pytest.raises(BadKeyError, match="can't be the key of an object"):
        publish_dataset(storage, "d", fill(tmp_path / "a", {name: b"1"}))
    assert list(storage.list()) == []


def test_a_vanished_file_is_named(storage: Storage, tmp_path: Path) -> None:
    """Not a FileNotFoundError hours later."""
    publish_dataset(storage, "d", fill(tmp_path / "a", FILES))
    storage.delete("datasets/d/files/train/dog/2.png")
    with pytest.raises(
        StorageError,
        match=r"datasets/d/files/train/dog/2\.png is .*delete .*/datasets/d/manifest\.json",
    ):
        local_dataset(storage, "d", tmp_path / "cache")
    assert not list(tmp_path.glob("cache/**/*.png"))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    """A download of the right size and the wrong bytes never reaches the cache."""
    storage = storage_of("far", tmp_path)
    publish_dataset(storage, "d", fill(tmp_path / "a", FILES))
    storage.write("datasets/d/files/train/cat/1.png", b"0ne")
    with pytest.raises(StorageError, match=r"train/cat/1\.png is damaged: its sha256"):
        local_dataset(storage, "d", tmp_path / "cache")
    assert not list(tmp_path.glob("cache/**/*.png"))


@pytest.mark.parametrize("key", ["../../../evil", "/etc/evil", "a/../../evil"])
def test_a_manifest_cannot_write_outside_the_cache(tmp_path: Path, key: str) -> None:
    """Whoever may write to the storage must not write to the ranks' hosts."""
    storage = storage_of("far", tmp_path)
    publish_dataset(storage, "d", fill(tmp_path / "a", FILES))
    manifest = json.loads(storage.read("datasets/d/manifest.json"))
    manifest["files"][0]["key"] = key
    storage.write("datasets/d/manifest.json", json.dumps(manifest).encode())
    with pytest.raises(StorageError, match=r"manifest\.json can't be read"):
        local_dataset(storage, "d", tmp_path / "cache")


def test_a_manifest_that_was_changed_is_refused(storage: Storage, tmp_path: Path) -> None:
    """Its entries must give its digest."""
    publish_dataset(storage, "d", fill(tmp_path / "a", FILES))
    text = storage.read("datasets/d/manifest.json").replace(b"labels.txt", b"l4bels.txt")
    storage.write("datasets/d/manifest.json", text)
    with pytest.raises(StorageError, match=r"manifest\.json is damaged"):
        find_dataset(storage, "d")


def test_a_cached_copy_with_a_lost_or_cut_file_is_replaced(tmp_path: Path) -> None:
    """A cleaner of old cache files doesn't break the next run."""
    storage = storage_of("far", tmp_path)
    publish_dataset(storage, "d", fill(tmp_path / "a", FILES))
    local = local_dataset(storage, "d", tmp_path / "cache")
    (local / "train/cat/1.png").unlink()
    assert content_of(local_dataset(storage, "d", tmp_path / "cache")) == FILES
    (local / "train/dog/2.png").write_bytes(b"s")
    assert local_dataset(storage, "d", tmp_path / "cache") == local
    assert content_of(local) == FILES


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The way out is in the message."""
    storage = storage_of("far", tmp_path)
    publish_dataset(storage, "d", fill(tmp_path / "a", FILES))
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StorageError, match=r"can't keep dataset d in .*/cache: .*XDG_CACHE_HOME"):
        local_dataset(storage, "d", tmp_path / "cache")


def test_a_dataset_in_place_is_a_storage_of_its_files(tmp_path: Path) -> None:
    """Its keys are the files' names, nothing is copied, and what was never published is an
    error that says so."""
    storage = DirectoryStorage(tmp_path / "storage")
    with prepare_folder(storage, "d1") as folder:
        for name, data in FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        publish_dataset(storage, "d1", folder)
    found = dataset_in_place(storage, "d1")
    assert {item.key: found.read(item.key) for item in found.list()} == FILES
    with pytest.raises(StorageError, match="there is no dataset d2"):
        dataset_in_place(storage, "d2")


def test_large_files_are_copied_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards are whole in memory while they are copied, so there is a limit in bytes for all
    that are under way."""
    monkeypatch.setattr("prefect_torch_ddp.data.dataset_store.IN_MEMORY_BYTES", 200_000)
    peak = [0]

    class Watched(FarStorage):
        under_way = 0

        def write(self, key: str, data: bytes) -> None:
            with lock:
                self.under_way += len(data)
                peak[0] = max(peak[0], self.under_way)
            time.sleep(0.02)
            super().write(key, data)
            with lock:
                self.under_way -= len(data)

    lock = threading.Lock()
    (tmp_path / "storage").mkdir()
    storage = Watched(tmp_path / "storage")
    with prepare_folder(storage, "d1") as folder:
        for number in range(12):
            (folder / f"{number}.tar").write_bytes(bytes(60_000))
        publish_dataset(storage, "d1", folder)
    assert 60_000 < peak[0] <= 200_000
