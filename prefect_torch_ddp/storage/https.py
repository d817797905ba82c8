"""A single file on a web server, as the raw data of a run."""

import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from http.client import BadStatusLine, HTTPException, HTTPResponse, InvalidURL
from typing import Any, Self, cast
from urllib.parse import SplitResult, unquote, urldefrag, urlsplit

from prefect_torch_ddp.errors import (
    BadKeyError,
    DamagedObjectError,
    InvalidParamsError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
)
from prefect_torch_ddp.lazy import __version__
from prefect_torch_ddp.storage.names import check_key
from prefect_torch_ddp.storage.protocol import (
    CHANGED,
    Contents,
    ListedObject,
    ObjectPart,
    Readable,
)

SCHEME = "https://"
MAX_BYTES = 4 * 2**30
"""Of a file, which is held in memory while it is read."""
MAX_PORT = 65535
ANSWER_S = 60.0
"""How long the server may be silent."""
NUM_TRIES = 4
"""In a row that bring nothing."""
WAIT_S = 1.0
"""Before the second try; before each later one twice as long."""
CHUNK_BYTES = 2**20
GONE, MAY_PASS = (404, 410), (408, 429, 500, 502, 503, 504)
"""Statuses: of a file that isn't there, and those that another try may not get."""
_DIGEST = re.compile(r"sha256=([0-9a-f]{64})")


@dataclass(frozen=True)
class HttpsFile(Readable):
    """One file at an https address, under the last part of its path as its key.

    The server has to say how long the file is. What was read has that length, and the digest if
    one was given. Redirects lead to https addresses only.
    """

    url: str
    sha256: str | None = None
    """The file's digest, in hexadecimal digits."""

    @classmethod
    def from_uri(cls, uri: str) -> Self:
        """Make it of `https://host/path/name`, perhaps with `#sha256=<64 hexadecimal digits>`.

        Raises:
            InvalidParamsError: it is no such address, or has a query or a password.
        """
        url, fragment = urldefrag(uri)
        try:
            parts = urlsplit(url)
        except ValueError as error:
            msg = f"an https:// address can't be read: {error}"
            raise InvalidParamsError(msg) from error
        digest = _DIGEST.fullmatch(fragment.lower())
        fault = _fault_of(url, parts)
        if not fault and not _has_valid_port(parts):
            fault = "has a port that is no number up to 65535; write https://host:8443/path/name"
        if fragment and digest is None:
            fault = "may only end with #sha256= and the file's digest, 64 hexadecimal digits"
        if fault:
            msg = f"{SCHEME}{parts.hostname or ''}{parts.path} {fault}"
            raise InvalidParamsError(msg)
        return cls(url, digest and digest[1])

    @property
    def uri(self) -> str:
        """The address."""
        return self.url

    @property
    def key(self) -> str:
        """The file's name."""
        return unquote(self.url.rpartition("/")[2])

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """Yield the file, if its name begins so.

        Raises:
            StorageError: it can't be read.
            InvalidParamsError: it is too large, or nothing says how large it is, or which version.
        """
        if not self.key.startswith(prefix):
            return
        with self._get(0, 1) as answer:
            num_bytes, version = _size(answer), self._version(answer)
        do, fault = "copy it to a bucket or a folder", ""
        if num_bytes is None:
            fault = "is of unknown size, since the server doesn't say it"
        elif num_bytes > MAX_BYTES:
            fault = f"has {num_bytes} bytes, and at most {MAX_BYTES} can be read from there"
        elif not version:
            fault = "may change unseen, since the server sends neither ETag nor Last-Modified"
            do = "append #sha256= and the file's digest, which is checked"
        if fault:
            msg = f"{self.url} {fault}; {do}"
            raise InvalidParamsError(msg)
        yield ListedObject(self.key, cast("int", num_bytes), version)

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """Read the parts, one after the other; see `Readable.read_many`."""
        found: Contents = []
        for part in parts:
            try:
                found.append(self._read(part))
            except StorageError as error:
                found.append(error)
        return found

    def _read(self, part: ObjectPart) -> bytes:
        if part.key != self.key:
            msg = f"there is no {part.key} at {self.url}"
            raise ObjectNotFoundError(msg)
        if self.sha256 is not None and part.start is not None:
            msg = f"a part of {self.url} can't be checked by the file's digest: leave #sha256= out"
            raise StorageError(msg)
        content = self._range(part.start or 0, part.num_bytes, part.etag)
        if self.sha256 is not None and (found := sha256(content).hexdigest()) != self.sha256:
            msg = f"{self.url} has the sha256 {found}, not {self.sha256}"
            raise DamagedObjectError(msg)
        return content

    def _range(self, start: int, num_bytes: int, version: str | None) -> bytes:
        """Return the bytes, in several requests if the connection breaks."""
        content, num_failed = bytearray(), 0
        while (num_left := num_bytes - len(content)) > 0:
            before = len(content)
            with self._get(start + before, num_left) as answer, suppress(OSError, HTTPException):
                if version not in (None, self._version(answer)):
                    msg = f"{self.url} {CHANGED}"
                    raise ObjectChangedError(msg)
                while num_left > 0 and (chunk := answer.read(min(num_left, CHUNK_BYTES))):
                    content += chunk
                    num_left -= len(chunk)
            num_failed = 0 if len(content) > before else num_failed + 1
            if num_failed == NUM_TRIES:
                msg = f"{self.url} ends after {before} of {num_bytes} bytes, {NUM_TRIES} times"
                raise StorageError(msg)
        return bytes(content)

    def _get(self, start: int, num_bytes: int) -> HTTPResponse:
        """Ask for bytes, several times if need be; the answer may have more, from there on.

        Raises:
            StorageError: the server doesn't answer, refuses it, packs it, or begins elsewhere.
        """
        for number in range(NUM_TRIES):
            try:
                return self._ask(start, num_bytes)
            except (OSError, HTTPException) as error:
                trouble = error
            if number < NUM_TRIES - 1:
                time.sleep(WAIT_S * 2**number)
        reason = getattr(trouble, "reason", trouble)
        if not isinstance(trouble, OSError):
            fault = "isn't HTTP" if isinstance(trouble, BadStatusLine) else "can't be read"
            reason = f"the answer {fault}: {trouble!r:.200}"
        msg = f"{self.url} can't be read, in {NUM_TRIES} tries: {reason}"
        raise StorageError(msg) from trouble

    def _ask(self, start: int, num_bytes: int) -> HTTPResponse:
        headers = {
            "Range": f"bytes={start}-{start + num_bytes - 1}",
            "Accept-Encoding": "identity",  # else the length would be that of packed bytes
            "User-Agent": f"prefect-torch-ddp/{__version__}",
        }
        request = urllib.request.Request(self.url, headers=headers)  # noqa: S310 - it is https
        try:
            answer: HTTPResponse = opener().open(request, timeout=ANSWER_S)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in MAY_PASS:
                raise
            kind = ObjectNotFoundError if error.code in GONE else StorageError
            msg = f"{self.url} can't be read: {error.code} {error.reason}"
            raise kind(msg) from error
        except (ValueError, InvalidURL) as error:  # of a host's name, or of a redirect's address
            msg = f"{self.url} can't be read: {error}"
            raise StorageError(msg) from error
        begins = answer.headers.get("Content-Range", "bytes 0-")
        if not begins.startswith(f"bytes {start}-"):
            answer.close()
            msg = f"{self.url} can't be read in parts: the server sends the whole file"
            raise StorageError(msg)
        if not self._is_unpacked(encoding := answer.headers.get("Content-Encoding", "identity")):
            answer.close()
            msg = (
                f"{self.url} is sent packed (Content-Encoding: {encoding}); copy it to a bucket or "
                "a folder"
            )
            raise StorageError(msg)
        return answer

    def _is_unpacked(self, encoding: str) -> bool:
        """Tell whether an answer has the file's own bytes."""
        if encoding.lower() in {"gzip", "x-gzip"}:  # some servers name the format of the file so
            return self.key.lower().endswith((".gz", ".tgz"))
        return encoding.lower() == "identity"

    def _version(self, answer: HTTPResponse) -> str:
        if self.sha256 is not None:
            return self.sha256
        return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


def _fault_of(url: str, parts: SplitResult) -> str:
    """Return why an address can't be used; empty if it can."""
    name = parts.path.rpartition("/")[2]
    if not parts.hostname or not name:
        return "names no single file; write https://host/path/name"
    if "@" in parts.netloc or "?" in url:
        return (
            "has a password or a query, which may be a secret and would be kept with the run's "
            "parameters; leave it out, or copy the file to a bucket or a folder"
        )
    if not url.isascii() or any(each.isspace() for each in url):
        return "has a character that an address can't have: write it as %.., e.g. %20"
    if "/" in unquote(name):
        return "ends with a name that has a slash, as %2F, and is no file's name"
    try:
        check_key(unquote(name))
    except BadKeyError as error:
        return f"ends with a name that can't be used: {error}"
    return ""


def _has_valid_port(parts: SplitResult) -> bool:
    """Tell whether the port is a number that can be one, or left out."""
    try:
        return parts.port != 0
    except ValueError:
        return False


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    """Follows no redirect to another scheme, where anybody could answer."""

    def redirect_request(self, *given: Any) -> urllib.request.Request | None:
        if not given[-1].startswith(SCHEME):
            scheme = given[-1].partition(":")[0]
            given[1].close()
            msg = f"{given[0].full_url} leads to an address with {scheme}:, and only https is read"
            raise StorageError(msg)
        port = re.search(r":(\d+)$", urlsplit(given[-1]).netloc)
        if port and int(port[1]) > MAX_PORT:  # or another one would be asked, in silence
            given[1].close()
            msg = (
                f"{given[0].full_url} leads to an address with the port {port[1]}, which is above "
                f"{MAX_PORT}"
            )
            raise StorageError(msg)
        return super().redirect_request(*given)


@cache
def opener() -> urllib.request.OpenerDirector:
    """Return what opens addresses, by the proxies and certificates that the environment names."""
    return urllib.request.build_opener(_HttpsOnly)


def _size(answer: HTTPResponse) -> int | None:
    """Return the whole file's size; None if the server doesn't say it."""
    _, _, total = answer.headers.get("Content-Range", "").rpartition("/")
    size = total or answer.headers.get("Content-Length", "")
    return int(size) if size.isdecimal() else None
