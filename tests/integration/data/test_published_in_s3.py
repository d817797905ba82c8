"""A published dataset in a bucket, whose folders are listed level by level."""

from prefect_torch_ddp.data.datasets.dataset_store import published_dataset
from prefect_torch_ddp.data.images.listing import list_dataset
from tests.support.s3_server import S3Server
from tests.unit.data.datasets.test_published_files import publish


def test_a_bucket_lists_what_the_manifest_names(s3_server: S3Server) -> None:
    """The levels, the endpoint and the credentials are those of the bucket."""
    storage = s3_server.storage()
    key = publish(storage, {"a/b/1": b"1", "a/2": b"2", "3": b"3"})
    for late in ("a/b/late", "late/1", "late"):
        storage.write(f"{key}/{late}", b"")
    where = published_dataset(storage, "d")
    levels = [each if isinstance(each, str) else each.key for each in where.list_level("")]
    assert levels == ["3", "a/"]
    assert [each.key for each in list_dataset(where)] == ["3", "a/2", "a/b/1"]
    assert where.storage_options == storage.storage_options
    assert where.identity == storage.below(key).identity
