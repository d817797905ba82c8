"""Stored files as another version of the package would write them."""

import gzip
import hashlib
import json
from typing import Any

from prefect_torch_ddp.storage.formats import Format
from prefect_torch_ddp.storage.protocol import Storage

NEWER = {"format": 7, "version": "9.1.0"}
"""What a file of a later version says."""
MORE = {"later_field": {"of": ["a later version"]}}
"""What a later version may add within a format."""


def rewrite(storage: Storage, key: str, changes: dict[str, Any]) -> None:
    """Change fields of a stored JSON object, and its checksum if it has one."""
    values = {**json.loads(storage.read(key)), **changes}
    old = json.loads(storage.read(key))
    if old.pop("sha256", None) == _digest(old):  # of a model card it is that of the weights
        del values["sha256"]
        values["sha256"] = _digest(values)
    storage.write(key, json.dumps(values).encode())


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def rewrite_lines(
    storage: Storage, key: str, changes: dict[str, Any], of_lines: dict[str, Any] | None = None
) -> None:
    """Change the head of a file of JSON lines, and perhaps each line after it."""
    data = storage.read(key)
    is_packed = key.endswith(".gz")
    first, *lines = (gzip.decompress(data) if is_packed else data).splitlines()
    changed = [{**json.loads(line), **(of_lines or {})} for line in lines]
    text = "".join(f"{json.dumps(each)}\n" for each in ({**json.loads(first), **changes}, *changed))
    storage.write(key, gzip.compress(text.encode()) if is_packed else text.encode())


def head(kind: Format) -> bytes:
    """Return the first line of a file of JSON lines."""
    return json.dumps(kind.stamp({})).encode() + b"\n"


def snapshot(storage: Storage, prefix: str = "") -> dict[str, bytes]:
    """Return all objects."""
    return {found.key: storage.read(found.key) for found in storage.list(prefix)}
