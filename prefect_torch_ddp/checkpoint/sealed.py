"""Owns small JSON records that carry their own digest, so that no flipped bit in one goes unnoticed."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def sealed(values: Mapping[str, Any]) -> bytes:
    """Return the values as JSON, with the sha256 of what they are."""
    return json.dumps({**values, "sha256": _digest(values)}, indent=1, allow_nan=False).encode()


def unsealed(data: bytes) -> dict[str, Any]:
    """Return the values; raises ValueError, TypeError, KeyError or AttributeError where they aren't what was sealed."""
    values: dict[str, Any] = json.loads(data)
    if values.pop("sha256") != _digest(values):
        msg = "its content isn't that of its sha256"
        raise ValueError(msg)
    return values


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, allow_nan=False).encode()).hexdigest()
