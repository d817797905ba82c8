"""By what a training of a `run_key` is known again: the call's arguments, and the function."""

import hashlib
import pickle
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import Path, PurePath
from re import Pattern
from types import FunctionType, SimpleNamespace
from typing import Any
from uuid import UUID

import cloudpickle
from pydantic import BaseModel

_NUMBERS = int | float | complex | Decimal | Fraction
_LEAVES = _NUMBERS | str | bytes | bytearray | PurePath | UUID | date | time | timedelta | range
_LEAVES_OF_TORCH = {"torch.dtype", "torch.device"}
"""What is written the same way in every process."""


def value_digest(value: object) -> str:
    """Return a digest that equal values share, also in other processes, and other values don't.

    Not promised for what is pickled by value, such as functions and classes of `__main__` and
    instances of such classes, nor for what contains itself: equal ones may differ then.
    """
    try:
        return _digest(value)
    except (ValueError, RecursionError, pickle.PicklingError):  # it contains itself
        return hashlib.sha256(cloudpickle.dumps(value)).hexdigest()


def _digest(value: object) -> str:
    sha256 = hashlib.sha256()
    pickler = _ContentPickler(SimpleNamespace(write=sha256.update), protocol=5)
    pickler.fast = True  # without a memo, which tells equal objects from the same one
    pickler.dump(value)
    return sha256.hexdigest()


class _ContentPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    # Not reducer_override, which isn't asked about sets and dicts.
    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, type | FunctionType):
            # By itself, with a memo: a class refers to itself.
            return f"code {hashlib.sha256(cloudpickle.dumps(value)).hexdigest()}"
        if type(value) is dict:
            pairs = sorted(_digest(key) + _digest(item) for key, item in value.items())
            return f"dict {pairs}"
        if isinstance(value, set | frozenset):
            return f"{_digest(type(value))} {sorted(map(_digest, value))}"
        return _array(value)


def _array(value: Any) -> str | None:
    """Describe a tensor or an array; their pickles depend on addresses and strides."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")  # else it is of neither
    if torch and type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            return None  # made of others
        whole = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        flat = whole.reshape(-1)  # which by itself would keep a single dimension's stride
        content, about = flat.view(torch.uint8).numpy().data, value.requires_grad
    elif numpy and type(value) is numpy.ndarray and not value.dtype.hasobject:
        content, about = value.tobytes(), ""
    else:
        return None
    kind = f"{type(value).__name__} {value.dtype} {tuple(value.shape)} {about}"
    return f"{kind} {hashlib.sha256(content).hexdigest()}"


def own_of(fn: Any) -> tuple[object, ...]:
    """Return what tells a function from another one that is a task of the same name.

    That is its file, its name in it and, if another function made it, what it has of that. Not its
    module: a retried flow may have loaded the file under another name.
    """
    if isinstance(fn, partial):
        return (*own_of(fn.func), fn.args, fn.keywords)
    code = getattr(fn, "__code__", None)
    if code is None:
        return (type(fn).__qualname__,)
    enclosed = {}
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            value = cell.cell_contents
            enclosed[name] = type(value).__qualname__
            with suppress(RecursionError):  # it contains itself, or is nested too deeply
                enclosed[name] = _form(value)
    return Path(code.co_filename).name, fn.__qualname__, enclosed


def _form(value: Any) -> str:
    """Write a value's class and its parts; of a function, its name.

    Of any other object only the class: its content needn't be the same in another process.
    """
    kind = type(value)
    if f"{kind.__module__}.{kind.__qualname__}" in _LEAVES_OF_TORCH or (
        isinstance(value, _LEAVES) and not isinstance(value, Enum)
    ):
        parts: Iterable[str] = [repr(value)]
    elif (name := getattr(value, "__qualname__", None)) is not None:
        parts = [str(name)]
    elif isinstance(value, set | frozenset):
        parts = sorted(map(_form, value))
    elif isinstance(value, list | tuple | deque):
        parts = map(_form, value)
    else:
        parts = sorted(f"{_form(key)}: {_form(item)}" for key, item in _items(value))
    return f"{kind.__qualname__}({', '.join(parts)})"


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of an object, each with its name."""
    if isinstance(value, Enum | Pattern):
        names = ("name",) if isinstance(value, Enum) else ("pattern", "flags")
        yield from ((name, getattr(value, name)) for name in names)
    elif is_dataclass(value):
        yield from ((each.name, getattr(value, each.name, None)) for each in fields(value))
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, BaseModel):
        yield from value
    elif getattr(value, "shape", None) == () and hasattr(value, "item"):  # such as NumPy's
        with suppress(Exception):  # not at hand, such as a tensor of the device "meta"
            yield "item", value.item()
