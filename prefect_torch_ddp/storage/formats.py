"""The formats of stored files: each file says which one it has, and a newer one is an error.

Every JSON object, and the first line of every file of JSON lines, has a `format` and the
`version` of this package that wrote it. docs/formats.md lists the files and their fields.

Within a format a later version may add fields. A reader ignores those that it doesn't know, so
each must be one that may be ignored; whoever reads a file and writes it back keeps them. Any
other change takes a higher format. A file of a higher format is a `NewerFormatError`. It is not
damaged, so no older one may be taken in its place, and nothing that it names may be deleted.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from prefect_torch_ddp.errors import DamagedObjectError, NewerFormatError
from prefect_torch_ddp.lazy import __version__
from prefect_torch_ddp.storage.protocol import Storage

DAMAGE = (DamagedObjectError, ValueError, TypeError, KeyError, AttributeError)
"""What reading raises if the content isn't what was written."""
_FORMAT, _VERSION, _SHA256 = "format", "version", "sha256"


@dataclass(frozen=True)
class Format:
    """A kind of file, and the newest format of it that this version knows."""

    kind: str
    """What the file is, for people."""
    number: int = 1
    """This version writes it, and reads it and all before it."""
    is_checksummed: bool = False
    """Whether the file holds the sha256 of its values, so that no flipped bit goes unnoticed."""

    def stamp(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values with the format and this package's version before them."""
        return {_FORMAT: self.number, _VERSION: __version__, **values}

    def check(self, values: Any, where: str) -> dict[str, Any]:
        """Return the values without format and version.

        Args:
            values: what was read; changed in place.
            where: the file's URI, for the error.

        Raises:
            NewerFormatError: they are of a newer format.
            ValueError, TypeError, KeyError, AttributeError: they are no such values; see `DAMAGE`.
        """
        number = values.pop(_FORMAT)
        version = values.pop(_VERSION, None)
        if type(number) is not int or number < 1:
            msg = f"its format is {number!r}"
            raise ValueError(msg)
        if number > self.number:
            wrote = f", which version {version} wrote" if version else ""
            install = f"{version} or newer" if version else "a newer version"
            msg = (
                f"{where} is a {self.kind} of format {number}{wrote}; prefect-torch-ddp "
                f"{__version__} reads formats up to {self.number}. Install {install} of "
                "prefect-torch-ddp; the file is left as it is"
            )
            raise NewerFormatError(msg)
        checked: dict[str, Any] = values
        return checked

    def to_bytes(self, values: Mapping[str, Any]) -> bytes:
        """Return the values as a JSON file of this format."""
        stamped = self.stamp(values)
        if self.is_checksummed:
            stamped[_SHA256] = _digest(stamped)
        return json.dumps(stamped, indent=1, allow_nan=False).encode()

    def from_bytes(self, data: bytes, where: str) -> dict[str, Any]:
        """Return the values of a JSON file; raises as `check`, also if the sha256 doesn't match."""
        values = json.loads(data)
        digest = values.pop(_SHA256) if self.is_checksummed else None
        read = dict(values)
        checked = self.check(values, where)
        # After the format: a newer one may have another digest.
        if digest is not None and digest != _digest(read):
            msg = "its content doesn't match its sha256"
            raise ValueError(msg)
        return checked


def location(storage: Storage, key: str) -> str:
    """Return the URI of an object."""
    return f"{storage.uri.rstrip('/')}/{key}"


def sha256_in(data: bytes) -> str:
    """Return the sha256 that a checksummed file holds."""
    return str(json.loads(data)[_SHA256])


def known_fields(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values that a dataclass or named tuple has fields for."""
    names = _names(cls)
    return {name: value for name, value in values.items() if name in names}


@cache
def _names(cls: type) -> frozenset[str]:
    named = getattr(cls, "_fields", None) or (each.name for each in fields(cls))
    return frozenset(named)


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, allow_nan=False).encode()).hexdigest()


MANIFEST = Format("checkpoint manifest", is_checksummed=True)
RESUME = Format("resume record", is_checksummed=True)
ENDED = Format("record of a training's end", is_checksummed=True)
CLAIM = Format("claim of an attempt")
FAILURE = Format("record of a failure")
FORMATS = (MANIFEST, RESUME, ENDED, CLAIM, FAILURE)
"""All of them."""
