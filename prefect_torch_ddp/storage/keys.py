"""Keys: the names that every storage can hold and that can't leave its root."""

import re
import unicodedata

from prefect_torch_ddp.errors import BadKeyError

MAX_KEY_BYTES = 900  # S3 allows 1024 for the storage's prefix and the key together
MAX_PART_BYTES = 255  # the longest file name of common file systems
MAX_SHOWN = 120
RESERVED_PART = ".tmp"  # where a directory keeps what isn't whole yet


def check_key(key: str) -> str:
    """Return the key as it is, or raise `BadKeyError` that says what is wrong with it."""
    fault = _fault(key) or _fault_of_parts(key)
    if fault is not None:
        msg = f"{_shown(key)} can't be the key of an object: {fault}; write it like folder/name"
        raise BadKeyError(msg)
    return key


def check_prefix(prefix: str) -> str:
    """Return the prefix as it is, or raise `BadKeyError` where no key can begin with it."""
    folder, slash, _ = prefix.rpartition("/")
    fault = _fault(prefix) or (_fault_of_parts(folder) if slash else None)
    if fault is not None:
        shown = f"{_shown(prefix)} can't be the prefix of a listing"
        msg = f"{shown}: {fault}; write it like folder/ or folder/na"
        raise BadKeyError(msg)
    return prefix


def is_key(name: str) -> bool:
    """Return whether a name is a key; others, which someone else put there, aren't listed."""
    return _fault(name) is None and _fault_of_parts(name) is None


def _fault(key: str) -> str | None:
    """Find what neither a key nor the beginning of one may have."""
    if key.startswith("/"):
        return "it is absolute"
    if re.match(r"[A-Za-z]:", key):
        return "it begins with a drive"
    if "\\" in key:
        return "it has a backslash"
    if any(unicodedata.category(character) in {"Cc", "Cs"} for character in key):
        return "it has a control character or half a character"
    num_bytes = len(key.encode())
    if num_bytes > MAX_KEY_BYTES:
        return f"it has {num_bytes} bytes, and {MAX_KEY_BYTES} are allowed"
    return None


def _fault_of_parts(key: str) -> str | None:
    parts = key.split("/")
    if "" in parts:
        return "it is empty" if not key else "a part between its slashes is empty"
    if "." in parts or ".." in parts:
        return "a part of it is '.' or '..'"
    if parts[0] == RESERVED_PART:
        return f"{RESERVED_PART} is where unfinished files lie"
    if any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        return f"a part of it has more than {MAX_PART_BYTES} bytes"
    return None


def _shown(key: str) -> str:
    return repr(key) if len(key) <= MAX_SHOWN else f"{key[:MAX_SHOWN]!r}..."
