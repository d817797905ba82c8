"""How a string names a storage: a path, s3://bucket/prefix, or a scheme of another package."""

import os
import re
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.https import HttpsFile
from prefect_torch_ddp.storage.protocol import Readable, Storage
from prefect_torch_ddp.storage.s3.storage import S3Storage

SCHEMES: Mapping[str, Callable[..., Storage]] = {"s3": S3Storage.from_uri}
"""Those that come along; each is called with the URI."""
OF_FSSPEC = frozenset({"s3"})
"""Those of `SCHEMES` that fsspec opens too."""
OF_HADOOP = frozenset({"s3a", "s3n"})
"""How Hadoop and Spark write s3."""
GROUP = "prefect_torch_ddp.storages"
"""The group of entry points by which installed packages name their own schemes."""
WITHOUT_TLS = frozenset({"http", "ftp"})
WEB = WITHOUT_TLS | {"https"}
WRITE_INSTEAD = (
    "write a directory (/data/runs, ~/runs), s3://bucket/prefix, "
    "or a Prefect block such as s3-bucket/name"
)


@exported_by("prefect_torch_ddp")
def storage_from_uri(uri: str, **access: Any) -> Storage:
    """Make the storage that a path or a URI names; nothing is read or written.

    Besides `s3://`, a URI may have any scheme that an installed package has named: an entry point
    of the group `prefect_torch_ddp.storages` whose name is the scheme, and whose object is called
    with the URI and returns a `Storage`.

    Args:
        uri: a path, which may begin with `~`, or a URI.
        **access: for an `s3://` URI: endpoint_url, region, anonymous; see `S3Storage`.

    Raises:
        InvalidParamsError: `uri` doesn't name a storage. The message says what to write instead.

    Example:
        The names of all runs in a bucket of a store that isn't AWS:

            from prefect_torch_ddp import storage_from_uri

            storage = storage_from_uri("s3://bucket/prefix", endpoint_url="http://10.0.0.5:9000")
            print({found.key.split("/")[1] for found in storage.list("runs/")})
    """
    if not uri.strip() or "\0" in uri:
        msg = f"{uri!r} names no storage; {WRITE_INSTEAD}"
        raise InvalidParamsError(msg)
    if uri != uri.strip():
        msg = "there are spaces around the storage's name; remove them"
        raise InvalidParamsError(msg)
    _refuse_no_colon(uri)
    scheme, _, rest = uri.partition(":")
    make = None
    if not is_path(uri):
        _refuse_no_slashes(scheme, rest)
        make = _maker_of(scheme.lower()) if rest.startswith("//") else None
    if access and (is_path(uri) or scheme.lower() != "s3"):
        kind = f"{uri} is a folder" if is_path(uri) else f"{scheme}: isn't S3"
        msg = f"{kind}; {', '.join(access)} belong to an s3:// URI"
        raise InvalidParamsError(msg)
    if is_path(uri):
        return DirectoryStorage(Path(uri))
    if make is None:
        raise InvalidParamsError(_no_known(scheme, WRITE_INSTEAD))
    return make(uri, **access)


def source_from_uri(uri: str) -> Readable:
    """Return what a path or a URI of raw data names: a storage, or a file on a web server.

    Raises:
        InvalidParamsError: it names neither.
    """
    scheme = _scheme_of(uri)
    if scheme == "https":
        return HttpsFile.from_uri(uri)
    if scheme in WITHOUT_TLS and not _named(scheme):
        msg = (
            f"raw data isn't read by {scheme}:, which others may change on its way; give the "
            f"https:// address of a single file, or {WRITE_INSTEAD}"
        )
        raise InvalidParamsError(msg)
    return storage_from_uri(uri)


def is_path(reference: str) -> bool:
    """Return whether what names a storage is a path, and no URI."""
    return _scheme_of(reference) is None


def opens_by_fsspec(uri: str) -> bool:
    """Return whether fsspec may open what a path or a URI names: no storage of a package does."""
    scheme = _scheme_of(uri)
    return scheme is None or scheme in OF_FSSPEC or not (scheme in SCHEMES or _named(scheme))


def storage_at(where: "Storage | str | os.PathLike[str]") -> Storage:
    """Return a storage as it is, or the one that a path or a URI names.

    Raises:
        InvalidParamsError: it is none of them, or names no storage.
    """
    if isinstance(where, Storage):
        return where
    try:
        uri = os.fspath(where)
    except TypeError as error:
        kind = type(where).__name__
        msg = f"a {kind} isn't a storage; give a path, a URI, or an object whose class is a Storage"
        raise InvalidParamsError(msg) from error
    return storage_from_uri(uri)


def as_readable(
    given: object,
    what: str = "a dataset",
    takes: str = "a path, an s3:// URI, or a storage with read_many",
) -> Readable:
    """Return what a dataset, or something else, was said to be read from, as it is.

    Args:
        given: in place of a storage.
        what: is read from there, for the error.
        takes: what to give, for the error.

    Raises:
        InvalidParamsError: it can't be read from that.
    """
    if isinstance(given, Readable):
        return given
    msg = f"{what} can't be read from a {type(given).__name__}; give {takes}"
    raise InvalidParamsError(msg)


def _scheme_of(uri: str) -> str | None:
    scheme, colon, _ = uri.partition(":")
    is_scheme = colon and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme)
    return scheme.lower() if is_scheme else None


def _no_known(scheme: str, way_out: str) -> str:
    path = f"a path that begins like that is written ./{scheme}:..."
    return f"{scheme}: names no known storage; {way_out}; {path}"


def _refuse_no_colon(uri: str) -> None:
    """Refuse `s3//bucket`, which would be a folder; other folders may have two slashes."""
    scheme, slashes, _ = uri.partition("//")
    if slashes and (_is_known(known := scheme.lower()) or known in WEB):
        msg = (
            f"{scheme}// lacks its colon: write {known}://; a folder of that name is written "
            f"./{scheme}//..."
        )
        raise InvalidParamsError(msg)


def _refuse_no_slashes(scheme: str, rest: str) -> None:
    """Refuse `s3:/bucket` and `s3:bucket`; the rest isn't shown, as it may hold a secret."""
    if not rest.startswith("//") and _is_known(known := scheme.lower()):
        way_out = f"write {known}:// at its beginning, with two slashes"
        raise InvalidParamsError(_no_known(scheme, way_out))


def _is_known(scheme: str) -> bool:
    return scheme in SCHEMES or scheme in OF_HADOOP or bool(_named(scheme))


def _named(scheme: str) -> Mapping[str, EntryPoint]:
    return {each.value: each for each in entry_points(group=GROUP, name=scheme)}


def _maker_of(scheme: str) -> Callable[..., Storage] | None:
    if scheme in SCHEMES:
        return SCHEMES[scheme]
    found = _named(scheme)
    if scheme in OF_HADOOP and not found:
        msg = f"{scheme}: is how Hadoop and Spark write s3:; write s3:// in its place"
        raise InvalidParamsError(msg)
    if len(found) > 1:
        msg = f"{scheme}: is named by several packages, {', '.join(found)}; uninstall all but one"
        raise InvalidParamsError(msg)
    return next((_loaded(each, scheme) for each in found.values()), None)


def _loaded(named: EntryPoint, scheme: str) -> Callable[..., Storage]:
    try:
        make = named.load()
    except (ImportError, AttributeError) as error:
        msg = (
            f"{scheme}: is a storage of {named.value}, which can't be loaded: {error}; "
            "install what it needs"
        )
        raise InvalidParamsError(msg) from error

    def checked(uri: str) -> Storage:
        storage = make(uri)
        if not isinstance(storage, Storage):
            kind = type(storage).__name__
            msg = f"{named.value} made a {kind} of a {scheme}: URI, and has to return a Storage"
            raise InvalidParamsError(msg)
        return storage

    return checked
