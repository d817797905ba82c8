"""The formats of stored files: each file says which one it has, and a newer one is an error.

Every JSON object, and the first line of every file of JSON lines, has a `format` and the
`version` of this package that wrote it. docs/formats.md lists the files and their fields.

Within a format a later version may add fields. A reader ignores those that it doesn't know, so
each must be one that may be ignored; whoever reads a file and writes it back keeps them. Any
other change takes a higher format. A file of a higher format is a `NewerFormatError`. It is not
damaged, so no older one may be taken in its place, and nothing that it names may be deleted.
The same holds for a file whose format isn't a whole number from 1: what it is isn't guessed.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import BaseModel, ValidationError

from prefect_torch_ddp.errors import DamagedObjectError, NewerFormatError
from prefect_torch_ddp.lazy import __version__
from prefect_torch_ddp.storage.protocol import Storage

DAMAGE = (DamagedObjectError, ValueError, TypeError, KeyError, AttributeError)
"""What reading raises if the content isn't what was written."""
_FORMAT, _VERSION, _SHA256 = "format", "version", "sha256"

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class UnknownField(NamedTuple):
    """A field that this version doesn't know, and what a later one wrote there."""

    location: tuple[int | str, ...]
    value: Any
    of: str | None = None
    """All that is known of the object that has it, as JSON; None: an object that may change. Then
    it is the whole file or an item of a list."""


Unknown = Sequence[UnknownField]


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
            NewerFormatError: they are of a newer format, or of one that can't be understood.
            ValueError: they have no format.
        """
        if not isinstance(values, dict) or _FORMAT not in values:
            msg = "it doesn't say its format"
            raise ValueError(msg)
        number = values.pop(_FORMAT)
        version = values.pop(_VERSION, None)
        if type(number) is not int or number < 1:
            msg = (
                f"{where} is a {self.kind} whose format is {json.dumps(number)}, and formats are "
                "whole numbers from 1. It is left as it is: put back a copy of it, or install the "
                "version of prefect-torch-ddp that wrote it"
            )
            raise NewerFormatError(msg)
        if number > self.number:
            is_named = isinstance(version, str)
            wrote = f", which version {version} wrote" if is_named else ""
            install = f"{version} or newer" if is_named else "a newer version"
            msg = (
                f"{where} is a {self.kind} of format {number}{wrote}; prefect-torch-ddp "
                f"{__version__} reads formats up to {self.number}. Install {install} of "
                "prefect-torch-ddp; the file is left as it is"
            )
            raise NewerFormatError(msg)
        return values

    def to_bytes(self, values: Mapping[str, Any]) -> bytes:
        """Return the values as a JSON file of this format."""
        stamped = self.stamp(values)
        if self.is_checksummed:
            stamped[_SHA256] = _digest(stamped)
        return json.dumps(stamped, indent=1, allow_nan=False).encode()

    def from_bytes(self, data: bytes, where: str) -> dict[str, Any]:
        """Return the values of a JSON file.

        Raises:
            NewerFormatError: see `check`.
            ValueError, TypeError, KeyError, AttributeError: it is damaged; see `DAMAGE`.
        """
        values = json.loads(data)
        read = dict(values)
        checked = self.check(values, where)
        if self.is_checksummed:  # after the format: a newer one may have another digest
            del checked[_SHA256]
            if read.pop(_SHA256) != _digest(read):
                msg = "its content doesn't match its sha256"
                raise ValueError(msg)
        return checked


def location(storage: Storage, key: str) -> str:
    """Return the URI of an object."""
    return f"{storage.uri.rstrip('/')}/{key}"


def sha256_in(data: bytes) -> str:
    """Return the sha256 that a checksummed file holds."""
    return str(json.loads(data)[_SHA256])


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Make a dataclass or named tuple of the values that it has fields for."""
    try:
        return cls(**values)  # what nearly all files need, and fast
    except TypeError:
        names = _names(cast("Any", cls))
        return cls(**{name: value for name, value in values.items() if name in names})


@cache
def _names(cls: Any) -> frozenset[str]:
    return frozenset(getattr(cls, "_fields", None) or (each.name for each in fields(cls)))


def build_model(cls: type[M], values: dict[str, Any]) -> tuple[M, Unknown]:
    """Make a pydantic model of values that may have fields which it doesn't know, at any depth.

    Returns the model, and those fields; for `restore_unknown`, where it is written back.

    Raises:
        ValidationError: the values are wrong in another way.
    """
    try:
        return cls.model_validate(values), ()
    except ValidationError as error:
        locations = [each["loc"] for each in error.errors() if each["type"] == "extra_forbidden"]
    removed = [(path, _at(values, path[:-1]).pop(path[-1])) for path in locations]
    model = cls.model_validate(values)
    known = model.model_dump(mode="json")
    unknown = []
    for path, value in removed:
        may_change = len(path) == 1 or isinstance(path[-2], int)
        of = None if may_change else json.dumps(_at(known, path[:-1]))
        unknown.append(UnknownField(path, value, of))
    return model, unknown


def restore_unknown(values: dict[str, Any], unknown: Unknown) -> dict[str, Any]:
    """Add to a model's values the unknown fields that were read.

    Those of an object that is gone, or that another one has replaced, go too.
    """
    found = []
    for each in unknown:
        try:
            item = _at(values, each.location[:-1])
        except (LookupError, TypeError):
            continue
        if isinstance(item, dict) and each.of in (None, json.dumps(item)):
            found.append((item, each))
    for item, each in found:
        item.setdefault(each.location[-1], each.value)
    return values


def _at(values: Any, location: Sequence[int | str]) -> Any:
    for name in location:
        values = values[name]
    return values


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, allow_nan=False).encode()).hexdigest()


MANIFEST = Format("checkpoint manifest", is_checksummed=True)
RESUME = Format("resume record", is_checksummed=True)
ENDED = Format("record of a training's end", is_checksummed=True)
CLAIM = Format("claim of an attempt")
FAILURE = Format("record of a failure")
FINISHED = Format("record of a finished training")
CARD = Format("model card")
RUN_RECORD = Format("run record")
DATASET = Format("dataset manifest")
IMAGE_INDEX = Format("list of images")
STATISTICS = Format("statistics of a variable")
METRICS = Format("part of the metrics")
TIMING = Format("part of the timing")
LEDGER = Format("part of the ledger")
TENSORBOARD = Format("state of a TensorBoard folder")
WANDB = Format("state of a Weights & Biases folder")
LINES = {"metrics": METRICS, "timing": TIMING, "ledger": LEDGER}
"""The files of JSON lines, by their folders."""
FORMATS = (
    *(MANIFEST, RESUME, ENDED, CLAIM, FAILURE, FINISHED, CARD),
    *(RUN_RECORD, DATASET, IMAGE_INDEX, STATISTICS, METRICS, TIMING, LEDGER, TENSORBOARD, WANDB),
)
"""All of them."""
