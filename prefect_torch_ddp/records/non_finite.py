"""Floats that JSON lacks: infinities and NaN are stored as texts, and are read as floats again.

A text that is written like one of them, such as a table's word for a missing value, is marked, so
that it stays a text.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

_MARK = "(text) "
_LIKE_ONE = re.compile(rf"(?:{re.escape(_MARK)})*(?:NaN|-?Infinity)")
_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def as_stored(value: Any) -> Any:
    """Return a value as JSON can have it, at any depth; tuples become lists."""
    if isinstance(value, Mapping):
        return {key: as_stored(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_stored(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    is_like_one = isinstance(value, str) and _LIKE_ONE.fullmatch(value)
    return f"{_MARK}{value}" if is_like_one else value


def as_given(value: Any) -> Any:
    """Return what `as_stored` was given, but with lists for tuples."""
    if isinstance(value, Mapping):
        return {key: as_given(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_given(item) for item in value]
    is_like_one = isinstance(value, str) and _LIKE_ONE.fullmatch(value)
    return _FLOATS.get(value, value.removeprefix(_MARK)) if is_like_one else value
