"""Names that every storage can hold: the keys of objects, and a folder's absolute path."""

import os
import re
import unicodedata
from pathlib import Path

from prefect_torch_ddp.errors import BadKeyError, InvalidParamsError
from prefect_torch_ddp.lazy import exported_by

MAX_KEY_BYTES = 900  # S3 allows 1024 for the storage's prefix and the key together
MAX_NAME_BYTES = 255  # the longest file name of common file systems
MAX_SHOWN = 120
_USUAL_PART = rf"\w[\w.=-]{{0,{MAX_NAME_BYTES - 1}}}"
_USUAL_KEY = re.compile(rf"{_USUAL_PART}(/{_USUAL_PART})*", re.ASCII)
"""What nearly all keys are: a dataset's manifest may have hundreds of thousands."""
RESERVED_FOLDER = ".tmp"  # where a directory keeps what isn't whole yet


@exported_by("prefect_torch_ddp")
def check_key(key: str) -> str:
    """Return the key as it is, or raise `BadKeyError` if it isn't valid in every storage.

    A valid key can't lead out of a storage's root. The error says what is wrong with the key.

    Example:
        In your own `Storage`, before a key becomes a path:

            from prefect_torch_ddp import check_key

            print(check_key("results/scores.csv"))
    """
    if (fault := _fault(key)) is not None:
        msg = f"{_shown(key)} can't be the key of an object: {fault}; write it like folder/name"
        raise BadKeyError(msg)
    return key


@exported_by("prefect_torch_ddp")
def check_prefix(prefix: str) -> str:
    """Return the prefix as it is, or raise `BadKeyError` if no key can begin with it.

    Example:
        In the `list` of your own `Storage`:

            from prefect_torch_ddp import check_prefix

            print(check_prefix("results/"))
    """
    if (fault := _fault(f"{prefix}x")) is not None:
        msg = f"no key can begin with {_shown(prefix)}: {fault}; write it like folder/"
        raise BadKeyError(msg)
    return prefix


def is_key(name: str) -> bool:
    """Return whether a name is a key; others, which someone else put there, aren't listed."""
    return _fault(name) is None


def is_folder_name(name: str) -> bool:
    """Return whether a name can be that of one folder in a key."""
    return "/" not in name and is_key(name)


def _shown(key: str) -> str:
    return repr(key) if len(key) <= MAX_SHOWN else f"{key[:MAX_SHOWN]!r}..."


def _fault(key: str) -> str | None:
    if len(key) <= MAX_KEY_BYTES and _USUAL_KEY.fullmatch(key):
        return None
    parts, num_bytes = key.split("/"), len(key.encode(errors="replace"))
    faults = {
        "it is empty": not key,
        "it is absolute": key.startswith("/"),
        "it begins with a drive": re.match(r"[A-Za-z]:", key),
        "it has a backslash": "\\" in key,
        "it has a control character or half a character": any(
            unicodedata.category(character) in {"Cc", "Cs"} for character in key
        ),
        f"it has {num_bytes} bytes, and {MAX_KEY_BYTES} are allowed": num_bytes > MAX_KEY_BYTES,
        "a part between its slashes is empty": "" in parts,
        "a part of it is '.' or '..'": "." in parts or ".." in parts,
        f"{RESERVED_FOLDER} is where unfinished files lie": parts[0] == RESERVED_FOLDER,
        f"a part of it has more than {MAX_NAME_BYTES} bytes": any(
            len(part.encode(errors="replace")) > MAX_NAME_BYTES for part in parts
        ),
    }
    return next((fault for fault, applies in faults.items() if applies), None)


def absolute_folder(folder: str | Path) -> Path:
    """Return a folder's absolute path, `~` expanded; InvalidParamsError without such a home."""
    try:
        return Path(os.path.normpath(Path(folder).expanduser().absolute()))
    except RuntimeError as error:
        msg = f"{folder} names a home folder that can't be found; write the whole path"
        raise InvalidParamsError(msg) from error
