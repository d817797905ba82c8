"""The questions of a storage that have an answer in the protocol, and those of the storages that
come along."""

from pathlib import Path

import pytest

from prefect_torch_ddp.errors import BadKeyError, ObjectChangedError, ObjectNotFoundError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import ListedObject, ObjectPart, StorageBelow, StoredObject
from prefect_torch_ddp.storage.s3.storage import S3Storage
from tests.support.records import Shelf

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # SHA-256 of abc
KEYS = {"endpoint_url": "http://a:9000", "access_key_id": "key", "secret_access_key": "secret"}


@pytest.fixture
def shelf() -> Shelf:
    """Give a storage that answers only what it has to."""
    return Shelf({"a/b.x": b"abc", "a/c.x": b"cde", "a-b": b"-"})


def test_a_simple_storage_is_no_folder_and_seen_by_all(shelf):
    """Nobody asks hosts whether they share it, moves files into it or maps its objects."""
    assert shelf.local_folder is None
    assert shelf.is_shared_by_hosts
    assert shelf.open_file("a/b.x") is None
    assert shelf.relocated("shelf://x") is None
    assert shelf.identity == shelf.uri
    shelf.drop_unfinished("", lambda _: True)
    assert len(shelf.objects) == 3


def test_a_directory_is_a_folder_that_hosts_may_not_share(tmp_path):
    """Each host may have one of that name."""
    storage = DirectoryStorage(tmp_path)
    assert storage.local_folder == tmp_path
    assert not storage.is_shared_by_hosts
    assert storage.relocated("/elsewhere") is None


def test_a_bucket_leads_to_other_prefixes_of_it():
    """With its endpoint and credentials, which another bucket's storage doesn't get."""
    storage = S3Storage("bucket", "new", **KEYS)
    assert storage.is_shared_by_hosts
    assert storage.local_folder is None
    assert storage.relocated("s3://bucket/old/x") == S3Storage("bucket", "old/x", **KEYS)
    assert storage.below("x").relocated("S3://bucket") == S3Storage("bucket", **KEYS)
    for elsewhere in ("s3://bucket2/old", "/bucket/old", "s3-bucket/name", "shelf://bucket/old"):
        assert storage.relocated(elsewhere) is None


@pytest.mark.parametrize(
    ("storage", "folder", "expected"),
    [
        (S3Storage("b", "team", **KEYS), "x/y", S3Storage("b", "team/x/y", **KEYS)),
        (S3Storage("b"), "x", S3Storage("b", "x")),
        (DirectoryStorage(Path("/d")), "x/y", DirectoryStorage(Path("/d/x/y"))),
        (Shelf(), "x/y", StorageBelow(Shelf(), "x/y")),
    ],
    ids=["a prefix", "a bucket", "a directory", "a simple storage"],
)
def test_a_folder_of_a_storage_is_a_storage(storage, folder, expected):
    """The same place and credentials, further down; it can't lead out."""
    assert storage.below(folder) == expected
    first, *rest = folder.split("/")
    assert storage.below(folder).uri == f"{storage.uri}/{folder}"
    for wrong in ("../x", "/x", "", "x/.."):
        with pytest.raises(BadKeyError):
            storage.below(wrong)
    if rest:
        assert storage.below(first).below("/".join(rest)).uri == f"{storage.uri}/{folder}"


def test_a_folder_of_a_simple_storage_has_its_objects(shelf):
    """Keys are relative to the folder, in what is asked and in what is answered."""
    below = shelf.below("a")
    assert list(below.list("b")) == [StoredObject("b.x", 3)]
    assert list(below.list_objects("b")) == [ListedObject("b.x", 3, ABC)]
    assert below.read_many([ObjectPart("c.x", 2, 1)]) == [b"de"]
    below.write("new", b"1")
    assert not below.write_if_absent("new", b"2")
    assert shelf.read("a/new") == below.read("new") == b"1"
    below.delete("b.x")
    assert sorted(shelf.objects) == ["a-b", "a/c.x", "a/new"]
    with pytest.raises(BadKeyError):
        below.read(".tmp/x")


def test_a_simple_storage_can_be_read_from_as_a_dataset(shelf):
    """An object's digest is its ETag, so one that changed since it was listed isn't read."""
    listed = list(shelf.list_objects("a/"))
    assert listed == [ListedObject("a/b.x", 3, ABC), ListedObject("a/c.x", 3, listed[1].etag)]
    assert list(shelf.list_level("a/")) == listed
    parts = [ObjectPart(found.key, 3, etag=found.etag) for found in listed]
    parts += [ObjectPart("a/b.x", 2, 1), ObjectPart("a/b.x", 4), ObjectPart("gone", 1)]
    shelf.write("a/c.x", b"CDE")
    whole, changed, part, short, gone = shelf.read_many(parts)
    assert (whole, part) == (b"abc", b"bc")
    assert isinstance(changed, ObjectChangedError)
    assert isinstance(short, ObjectChangedError)
    assert isinstance(gone, ObjectNotFoundError)
