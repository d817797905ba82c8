"""Listing the names in a bucket, page by page."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from prefect_torch_ddp.storage.protocol import ListedObject
from prefect_torch_ddp.storage.s3.location import S3Location
from prefect_torch_ddp.storage.s3.retries import ask


def objects_below(location: S3Location, prefix: str) -> Iterator[ListedObject]:
    """Yield every object whose name begins with the location's prefix and this one, by name."""
    for page in _pages(location, "list", location.name_of(prefix), "list_objects_v2"):
        for found in page.get("Contents", ()):
            yield _listed(location, found)


def level_below(location: S3Location, prefix: str) -> Iterator[ListedObject | str]:
    """Yield the objects without a further slash in their names, and the folders; sorted."""
    root, whole = location.name_of(""), location.name_of(prefix)
    for page in _pages(location, "list", whole, "list_objects_v2", Delimiter="/"):
        found = {item["Key"]: _listed(location, item) for item in page.get("Contents", ())}
        folders = {item["Prefix"] for item in page.get("CommonPrefixes", ())}
        for name in sorted(found.keys() | folders):
            yield found[name] if name in found else name.removeprefix(root)


def uploads_below(location: S3Location, prefix: str) -> Iterator[dict[str, Any]]:
    """Yield the uploads in parts that have begun and not ended; each has `Key` and `UploadId`."""
    verb, whole = "list the unfinished uploads of", location.name_of(prefix)
    for page in _pages(location, verb, whole, "list_multipart_uploads"):
        yield from page.get("Uploads", ())


def _pages(
    location: S3Location, verb: str, whole_prefix: str, method: str, **options: str
) -> Iterator[dict[str, Any]]:
    """Yield the answers; a request is repeated if its answer is missing or can't be read.

    botocore's paginator would end there.
    """
    options |= {"Bucket": location.bucket, "Prefix": whole_prefix}
    while True:
        page = ask(location, verb, whole_prefix, partial(_page, method, options))
        yield page
        if not page.get("IsTruncated"):
            return
        names = ("NextContinuationToken", "NextKeyMarker", "NextUploadIdMarker")
        options |= {name.removeprefix("Next"): page[name] for name in names if page.get(name)}


def _page(method: str, options: dict[str, str], client: Any) -> Any:
    return getattr(client, method)(**options)


def _listed(location: S3Location, found: dict[str, Any]) -> ListedObject:
    key = found["Key"].removeprefix(location.name_of(""))
    return ListedObject(key, found["Size"], found["ETag"].strip('"'))
