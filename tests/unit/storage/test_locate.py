"""How a text names a storage, and a folder of one."""

from pathlib import Path

import pytest

from prefect_torch_ddp.errors import BadKeyError, InvalidParamsError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.locate import storage_below, storage_from_uri
from prefect_torch_ddp.storage.s3.storage import S3Storage


@pytest.fixture(autouse=True)
def _at_home(tmp_path, monkeypatch):
    """Make home and the current folder known."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("/data/runs", "/data/runs"),
        ("~", "{home}"),
        ("~/runs", "{home}/runs"),
        ("runs/x", "{home}/runs/x"),
        ("x/../runs", "{home}/runs"),
        ("./s3-bucket/name", "{home}/s3-bucket/name"),
        ("./s3:x", "{home}/s3:x"),
        ("runs/2026:11", "{home}/runs/2026:11"),
    ],
)
def test_paths(uri, path, tmp_path):
    """A path and `~` are a directory, absolute: the same folder in every process."""
    storage = storage_from_uri(uri)
    assert isinstance(storage, DirectoryStorage)
    assert storage.uri == str(storage.root) == path.format(home=tmp_path)


@pytest.mark.parametrize(
    ("uri", "bucket", "prefix"),
    [
        ("s3://b", "b", ""),
        ("s3://b/", "b", ""),
        ("s3://b/p/q/", "b", "p/q"),
        ("S3://b/p", "b", "p"),
    ],
)
def test_buckets(uri, bucket, prefix):
    """s3:// is a bucket and a prefix, with whatever credentials are found."""
    storage = storage_from_uri(uri)
    assert storage == S3Storage(bucket, prefix)
    assert storage.uri == f"s3://{bucket}/{prefix}".rstrip("/")


@pytest.mark.parametrize(
    "uri",
    [
        *("", "  ", " /data", "/data\n", "a\0b", "gs://b/p", "az://c", "http://host/p"),
        *("C:\\runs", "c:/runs", "s3:b", "s3:/b", "s3a://b", "s3://", "s3:///p", "s3://b?x=1"),
        *("s3://b/p?x=1", "s3://b/p#x", "s3://b c/p", "s3://b/../c", "s3://b//c"),
        *("s3://b:9000/p", "file:///runs", "~no-such-user-here/x"),
        # A secret would end up in logs; the refusal doesn't put it there either.
        *("s3://AKIA:hunter2@bucket/p", "s3://AKIA:hun/hunter2@bucket", "s3://b?secret=hunter2"),
        *("https://u:hunter2@host/b", "file://u:hunter2@host/b"),
    ],
)
def test_anything_else_is_refused_with_what_to_write(uri):
    """Nothing is guessed: the message says what would work."""
    with pytest.raises(InvalidParamsError, match=r"write|remove") as caught:
        storage_from_uri(uri)
    assert "hunter2" not in str(caught.value)


def test_a_folder_of_a_storage_is_a_storage():
    """The same place and credentials, one folder further down; it can't lead out."""
    keys = {"endpoint_url": "http://a:9000", "access_key_id": "key", "secret_access_key": "secret"}
    for storage, folder, expected in (
        (S3Storage("b", "team", **keys), "x/y", S3Storage("b", "team/x/y", **keys)),
        (S3Storage("b"), "x", S3Storage("b", "x")),
        (DirectoryStorage(Path("/data")), "x/y", DirectoryStorage(Path("/data/x/y"))),
    ):
        assert storage_below(storage, folder) == expected
    for wrong in ("../x", "/x", "", "x/.."):
        with pytest.raises(BadKeyError):
            storage_below(S3Storage("b"), wrong)
    with pytest.raises(InvalidParamsError, match="object has no folders"):
        storage_below(object(), "x")
