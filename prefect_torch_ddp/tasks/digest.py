"""Digests by which a call of a `ddp_task` is known again: of its arguments and of its code."""

import ast
import hashlib
import pickle
import sys
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import cloudpickle

from prefect_torch_ddp.lazy import parse_python


def digest_of(value: object) -> str:
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
        flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
        content, about = flat.view(torch.uint8).numpy().data, value.requires_grad
    elif numpy and type(value) is numpy.ndarray and not value.dtype.hasobject:
        content, about = value.tobytes(), ""
    else:
        return None
    kind = f"{type(value).__name__} {value.dtype} {tuple(value.shape)} {about}"
    return f"{kind} {hashlib.sha256(content).hexdigest()}"


def code_of(source: Path, function: str) -> str | None:
    """Return a digest of a function with all of its module that it uses; None: it isn't found.

    Comments and layout don't count, nor do other modules.

    Args:
        source: the module's file.
        function: its qualified name; one within another function counts with that.
    """
    try:
        nodes = parse_python(source.read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # as in a notebook
        return None
    wanted, counting = {function.partition(".")[0]}, set[int]()
    bound = [_names(node, is_bound=True) for node in nodes]
    while more := {at for at, names in enumerate(bound) if names & wanted} - counting:
        counting |= more
        wanted |= set[str]().union(*(_names(nodes[at], is_bound=False) for at in more))
    code = "\n".join(ast.dump(nodes[at]) for at in sorted(counting))
    return hashlib.sha256(code.encode()).hexdigest() if counting else None


def _names(statement: ast.stmt, *, is_bound: bool) -> set[str]:
    """Return the names that a module's statement binds there, or those that it uses."""
    definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    is_definition, names = isinstance(statement, definition), set[str]()
    for node in [statement] if is_bound and is_definition else ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) is is_bound:
            names.add(node.id)
        elif is_bound and isinstance(node, definition):
            names.add(node.name)
        elif is_bound and isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return names
