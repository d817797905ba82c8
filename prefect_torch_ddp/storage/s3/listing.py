"""Owns how the names in a bucket are listed, page by page."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from prefect_torch_ddp.storage.protocol import ListedObject

if TYPE_CHECKING:
    from prefect_torch_ddp.storage.s3.storage import S3Storage


def objects_below(storage: "S3Storage", prefix: str) -> Iterator[ListedObject]:
    """Yield every object whose name begins with the storage's prefix and this one, sorted by
    name, whatever it is called.
    """
    root = storage.name_of("")
    for found in _found(storage, root + prefix):
        yield _listed(found, root)


def level_below(storage: "S3Storage", prefix: str) -> Iterator[ListedObject | str]:
    """Yield the objects whose name goes on without a slash, and the folders; sorted."""
    root = storage.name_of("")
    for found in _found(storage, root + prefix, Delimiter="/"):
        yield found["Prefix"].removeprefix(root) if "Prefix" in found else _listed(found, root)


def uploads_below(storage: "S3Storage", name_prefix: str) -> Iterator[dict[str, Any]]:
    """Yield the uploads in parts that have begun and not ended, of objects whose whole name
    begins so.
    """
    for page in _pages(
        storage, "list the unfinished uploads of", name_prefix, "list_multipart_uploads"
    ):
        yield from page.get("Uploads", ())


def _found(storage: "S3Storage", name_prefix: str, **options: str) -> Iterator[dict[str, Any]]:
    for page in _pages(storage, "list", name_prefix, "list_objects_v2", **options):
        found = [*page.get("Contents", ()), *page.get("CommonPrefixes", ())]
        yield from sorted(found, key=_name) if options else found


def _pages(
    storage: "S3Storage", verb: str, name_prefix: str, method: str, **options: str
) -> Iterator[dict[str, Any]]:
    """Yield the answers, each asked for again where it doesn't come or can't be read;
    botocore's paginator would end there.
    """
    after: dict[str, str] = {}
    while True:
        arguments = {"Bucket": storage.bucket, "Prefix": name_prefix, **options, **after}
        page: dict[str, Any] = storage.ask(verb, name_prefix, partial(_ask, method, arguments))
        yield page
        if not page.get("IsTruncated"):
            return
        names = ("NextContinuationToken", "NextKeyMarker", "NextUploadIdMarker")
        after = {name.removeprefix("Next"): page[name] for name in names if page.get(name)}


def _ask(method: str, arguments: dict[str, str], client: Any) -> dict[str, Any]:
    page: dict[str, Any] = getattr(client, method)(**arguments)
    return page


def _name(found: dict[str, Any]) -> str:
    name: str = found["Prefix"] if "Prefix" in found else found["Key"]
    return name


def _listed(found: dict[str, Any], root: str) -> ListedObject:
    return ListedObject(found["Key"].removeprefix(root), found["Size"], found["ETag"].strip('"'))
