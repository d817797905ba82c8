"""Ids of parametrised cases: each describes its case, `world_size=2` or `sleep`, not `how1`.

If the values don't describe a case, the test passes `ids`.
"""

import ast
import enum
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any

MAX_ID = 48
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_SET = re.compile(r"frozenset\(|\{[^:{}]+\}")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Return what pytest shows for a value: a lambda by its code, an object by its repr or type.

    None for a value that has only a number.
    """
    shown: str | None = None
    match val:
        case enum.Enum():
            shown = val.name
        case str():
            shown = _shown(val) or f"{argname}="
        case bool() | int() | float() | None:
            shown = f"{argname}={val}"
        case partial() | Callable() if (named := _of_code(val)) is not None:
            shown = named
        case BaseException() | bytes() | list() | tuple() | Mapping() | range():
            with suppress(Exception):  # some cases are about values that can't be shown
                shown = _plain(val)
            if shown is None and isinstance(val, Mapping):
                parts = (f"{name}: {pytest_make_parametrize_id(val[name], name)}" for name in val)
                shown = _shown(f"{{{', '.join(parts)}}}")
        case _:
            with suppress(Exception):
                shown = _of_object(val)
    return shown


def _of_code(val: Any) -> str | None:
    """Show a function or a class; None for an object that can be called."""
    if isinstance(val, partial):
        given = [*map(repr, val.args), *(f"{name}={each!r}" for name, each in val.keywords.items())]
        return _shown(f"{val.func.__name__}({', '.join(given)})")
    name: str | None = getattr(val, "__name__", None)
    return _shown(_body_of(val.__code__)) if name == "<lambda>" else name


def _of_object(val: object) -> str:
    kind, shape = type(val).__name__, getattr(val, "shape", None)
    if shape is not None:  # a tensor or an array
        return _shown(f"{kind}{[*shape]}")
    if type(val).__repr__ is object.__repr__:
        return kind
    shown = repr(val)
    return kind if _ADDRESS.search(shown) or _SET.search(shown) else _shown(shown)


def _body_of(code: CodeType) -> str:
    """Return the code of a lambda's body; its end tells it from others."""
    last = max((p[1], p[3]) for p in code.co_positions() if p[1] and p[3])
    return next(
        ast.unparse(node.body)
        for node in _lambdas_in(code.co_filename)
        if (node.body.end_lineno, node.body.end_col_offset) == last
    )


@cache
def _lambdas_in(filename: str) -> list[ast.Lambda]:
    tree = ast.parse(Path(filename).read_bytes())
    return [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]


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
