"""A storage under a prefix of an S3 bucket."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prefect_torch_ddp.errors import BadKeyError
from prefect_torch_ddp.storage.keys import check_key, check_prefix, is_key
from prefect_torch_ddp.storage.probe import probe
from prefect_torch_ddp.storage.protocol import Contents, ListedObject, ObjectPart, StoredObject
from prefect_torch_ddp.storage.s3.lean.read import reader_of
from prefect_torch_ddp.storage.s3.listing import level_below, objects_below, uploads_below
from prefect_torch_ddp.storage.s3.location import S3Location
from prefect_torch_ddp.storage.s3.retries import request
from prefect_torch_ddp.storage.s3.transfer import read_whole, write_if_absent, write_whole

MAX_NAME_BYTES = 1024


@dataclass(frozen=True)
class S3Storage(S3Location):
    """A storage under a prefix of an S3 bucket; its options are those of `S3Location`.

    Objects are checked end to end, and written conditionally where one of several writers wins.
    """

    def read(self, key: str) -> bytes:
        """See `Storage.read`."""
        return read_whole(self, self._name(key))

    def write(self, key: str, data: bytes | memoryview) -> None:
        """See `Storage.write`."""
        write_whole(self, self._name(key), data)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        """See `Storage.write_if_absent`."""
        return write_if_absent(self, self._name(key), data)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """See `Storage.list`."""
        found = objects_below(self, check_prefix(prefix))
        return (StoredObject(item.key, item.num_bytes) for item in found if is_key(item.key))

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """See `ReadsMany.read_many`; by one request each, on kept connections."""
        return reader_of(self).read_many(parts)

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """See `ReadsMany.list_objects`."""
        return objects_below(self, prefix)

    def list_level(self, prefix: str) -> Iterator[ListedObject | str]:
        """See `ListsLevels.list_level`."""
        return level_below(self, prefix)

    def delete(self, key: str) -> None:
        """See `Storage.delete`."""
        request(self, "delete", self._name(key), "delete_object")

    def drop_unfinished(self, prefix: str, is_over: Callable[[str], bool]) -> None:
        """See `KeepsUnfinished.drop_unfinished`; aborts uploads in parts, which are paid for."""
        for upload in list(uploads_below(self, check_prefix(prefix))):
            name, options = upload["Key"], {"UploadId": upload["UploadId"]}
            if is_over(name.removeprefix(self.name_of(""))):
                request(self, "abort the upload of", name, "abort_multipart_upload", **options)

    def check_writable(self) -> None:
        """See `Storage.check_writable`."""
        probe(self)

    def _name(self, key: str) -> str:
        name = self.name_of(check_key(key))
        if len(name.encode()) > MAX_NAME_BYTES:
            shown = f"{key[:120]!r} is too long below {self.uri}"
            msg = f"{shown}: S3 allows {MAX_NAME_BYTES} bytes; shorten the prefix"
            raise BadKeyError(msg)
        return name
