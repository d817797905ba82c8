"""A storage under a prefix of an S3 bucket."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

from prefect_torch_ddp.storage.protocol import (
    Contents,
    ListedObject,
    ObjectPart,
    StoredObject,
    check_key,
    check_prefix,
    is_key,
    probe,
)
from prefect_torch_ddp.storage.s3.client import S3Location
from prefect_torch_ddp.storage.s3.read import reader_of
from prefect_torch_ddp.storage.s3.retries import ask, request
from prefect_torch_ddp.storage.s3.transfer import read_whole, write_if_absent, write_whole


@dataclass(frozen=True)
class S3Storage(S3Location):
    """A storage under a prefix of an S3 bucket; its options are those of `S3Location`.

    Objects are checked end to end, and written conditionally where one of several writers wins.
    """

    def read(self, key: str) -> bytes:
        """See `Storage.read`."""
        return read_whole(self, self.name_of(check_key(key)))

    def write(self, key: str, data: bytes | memoryview) -> None:
        """See `Storage.write`."""
        write_whole(self, self.name_of(check_key(key)), data)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        """See `Storage.write_if_absent`."""
        return write_if_absent(self, self.name_of(check_key(key)), data)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """See `Storage.list`."""
        found = self.list_objects(check_prefix(prefix))
        return (StoredObject(item.key, item.num_bytes) for item in found if is_key(item.key))

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """See `Readable.read_many`; by one request each, on kept connections."""
        return reader_of(self).read_many(parts)

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """See `Readable.list_objects`."""
        for page in self._pages("list", prefix, "list_objects_v2"):
            yield from map(self._listed, page.get("Contents", ()))

    def list_level(self, prefix: str) -> Iterator[ListedObject | str]:
        """Yield names without a slash after `prefix`, and folders (up to their slash), sorted."""
        for page in self._pages("list", prefix, "list_objects_v2", Delimiter="/"):
            found = {item["Key"]: self._listed(item) for item in page.get("Contents", ())}
            folders = {item["Prefix"] for item in page.get("CommonPrefixes", ())}
            for name in sorted(found.keys() | folders):
                yield found[name] if name in found else name.removeprefix(self.name_of(""))

    def delete(self, key: str) -> None:
        """See `Storage.delete`."""
        request(self, "delete", self.name_of(check_key(key)), "delete_object")

    def drop_unfinished(self, prefix: str, is_over: Callable[[str], bool]) -> None:
        """See `KeepsUnfinished.drop_unfinished`; aborts uploads in parts, which are paid for."""
        verb = "list the unfinished uploads of"
        for page in self._pages(verb, check_prefix(prefix), "list_multipart_uploads"):
            for upload in page.get("Uploads", ()):
                name, options = upload["Key"], {"UploadId": upload["UploadId"]}
                if is_over(name.removeprefix(self.name_of(""))):
                    request(self, "abort the upload of", name, "abort_multipart_upload", **options)

    def check_writable(self) -> None:
        """See `Storage.check_writable`."""
        probe(self)

    def _pages(
        self, verb: str, prefix: str, method: str, **options: str
    ) -> Iterator[dict[str, Any]]:
        """Yield the answers; what can't be read is asked for again, unlike botocore's paginator."""
        options |= {"Bucket": self.bucket, "Prefix": self.name_of(prefix)}
        while True:
            page = ask(self, verb, options["Prefix"], methodcaller(method, **options))
            yield page
            if not page.get("IsTruncated"):
                return
            names = ("NextContinuationToken", "NextKeyMarker", "NextUploadIdMarker")
            options |= {name.removeprefix("Next"): page[name] for name in names if page.get(name)}

    def _listed(self, found: dict[str, Any]) -> ListedObject:
        key = found["Key"].removeprefix(self.name_of(""))
        return ListedObject(key, found["Size"], found["ETag"].strip('"'))
