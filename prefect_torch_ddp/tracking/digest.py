"""The digest of a call's arguments by which a `ddp_task` with a `run_key` is known again."""

import hashlib
import pickle
import sys
from types import FunctionType, SimpleNamespace
from typing import Any

import cloudpickle


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
