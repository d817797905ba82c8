"""Owns the raw data of a run: found once, where the flow runs, and recognised by its listing."""

from collections.abc import Mapping

from prefect_torch_ddp.data.listing import digest_of_listing
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.objects import Readable
from prefect_torch_ddp.storage.s3 import S3Storage
from prefect_torch_ddp.tasks.blocks import resolve_storage


def resolve_source(reference: str) -> Readable:
    """Return what raw data is read from.

    Args:
        reference: a directory, an `s3://` URI or a block.

    Raises:
        InvalidParamsError: it names nothing that can be read.
    """
    found = resolve_storage(reference)
    if isinstance(found, DirectoryStorage) and not found.root.is_dir():
        msg = f"source is {reference}, and there is no folder {found.root} here; the flow and the ranks have to see the same one"
        raise InvalidParamsError(msg)
    assert isinstance(found, DirectoryStorage | S3Storage)  # blocks resolve to nothing else
    return found


def fingerprint_of(source: Readable) -> Mapping[str, str]:
    """List the raw data, and return what changes when any object of it does, or its place.

    Takes some seconds for 20,000 objects of a bucket.

    Raises:
        InvalidParamsError: there is nothing.
        StorageError: it can't be listed.
    """
    if next(source.list_objects(""), None) is None:
        msg = f"source is {source.uri}, and there is nothing; give the place of the raw data, or leave source out"
        raise InvalidParamsError(msg)
    return {"uri": source.uri, "listing": digest_of_listing(source)}
