"""How a string names a storage: a path or s3://bucket/prefix."""

import re
from dataclasses import replace
from pathlib import Path

from prefect_torch_ddp.errors import BadKeyError, InvalidParamsError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage, check_key
from prefect_torch_ddp.storage.s3.storage import S3Storage

WRITE_INSTEAD = (
    "write a directory (/data/runs, ~/runs), s3://bucket/prefix, "
    "or a Prefect block such as s3-bucket/name"
)


def storage_from_uri(uri: str) -> Storage:
    """Make the storage that a path or a URI names; nothing is read or written.

    Raises:
        InvalidParamsError: it names none; says what to write instead.
    """
    if not uri.strip() or "\0" in uri:
        msg = f"{uri!r} names no storage; {WRITE_INSTEAD}"
        raise InvalidParamsError(msg)
    if uri != uri.strip():
        msg = "there are spaces around the storage's name; remove them"
        raise InvalidParamsError(msg)
    scheme, colon, rest = uri.partition(":")
    if not colon or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        return DirectoryStorage(Path(uri))
    if scheme.lower() == "s3" and rest.startswith("//"):
        return _s3(rest[2:])
    way_out = f"{WRITE_INSTEAD}; a path that begins like that is written ./{scheme}:..."
    msg = f"{scheme}: names no known storage; {way_out}"
    raise InvalidParamsError(msg)


def storage_below(storage: Storage, folder: str) -> Storage:
    """Return a folder of a directory or of S3 as a storage of its own.

    Args:
        storage: which.
        folder: a key, without a slash at its end.

    Raises:
        BadKeyError: the folder would leave the storage.
        InvalidParamsError: the storage is of another kind.
    """
    check_key(folder)
    if isinstance(storage, DirectoryStorage):
        return replace(storage, root=storage.root / folder)
    if isinstance(storage, S3Storage):
        return replace(storage, prefix=storage.name_of(folder))
    kind = type(storage).__name__
    msg = f"{kind} has no folders that can be storages by themselves; use a directory or S3"
    raise InvalidParamsError(msg)


def _s3(rest: str) -> S3Storage:
    bucket, _, prefix = rest.partition("/")
    if not bucket or re.search(r"[?#:@\s]", bucket) or re.search(r"^/|[?#]", prefix):
        msg = (  # the text isn't shown: a secret may be in it
            "that s3:// URI can't be used; write s3://bucket/prefix, and endpoint, region and "
            "credentials into a Prefect block, or as AWS_ACCESS_KEY_ID and the like"
        )
        raise InvalidParamsError(msg)
    try:
        return S3Storage(bucket, prefix)
    except BadKeyError as error:
        msg = f"s3://{rest} can't be used: {error}"
        raise InvalidParamsError(msg) from error
