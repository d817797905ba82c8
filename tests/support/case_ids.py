"""Ids of parametrised cases: each describes its case, `world_size=2` or `sleep`, not `how1`.

If the values don't describe a case, the test passes `ids`.
"""

import enum
import re
from collections.abc import Callable, Mapping
from contextlib import suppress

MAX_ID = 48
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Return what pytest shows for a value; None for a value that has only a number."""
    shown: str | None = None
    match val:
        case enum.Enum():
            shown = val.name
        case str():
            shown = _shown(val) or f"{argname}="
        case bool() | int() | float() | None:
            shown = f"{argname}={val}"
        case type() | Callable() if "<lambda>" not in getattr(val, "__qualname__", ""):
            shown = getattr(val, "__name__", None)
        case BaseException() | bytes() | list() | tuple() | Mapping() | range():
            with suppress(Exception):  # some cases are about values that can't be shown
                shown = _plain(val)
    return shown


def _plain(val: object) -> str | None:
    """Show plain values; a set's order and an object's address differ between processes."""
    shown = f"{type(val).__name__}: {val}" if isinstance(val, BaseException) else repr(val)
    return None if _has_set(val) or _ADDRESS.search(shown) else _shown(shown)


def _has_set(val: object) -> bool:
    if isinstance(val, Mapping):
        return any(map(_has_set, val.values()))
    return isinstance(val, set | frozenset) or (
        isinstance(val, list | tuple) and any(map(_has_set, val))
    )


def _shown(text: str) -> str:
    plain = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return plain if len(plain) <= MAX_ID else f"{plain[: MAX_ID - 1]}…"
