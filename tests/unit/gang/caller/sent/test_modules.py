"""Functions whose attributes have the names of torch's own modules are sent."""

import pickle
import sys
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

from prefect_torch_ddp.gang.caller.sent.code import pickle_call
from prefect_torch_ddp.protocol.call import Call


def num_classes(images: Any) -> int:
    """Use torch, and a dataset's classes."""
    return int(torch.tensor(len(images.classes)))


def flags(_: Any) -> int:
    """Read a setting that is a property of a module."""
    return int(torch.backends.cudnn.benchmark)


@pytest.mark.parametrize(("fn", "expected"), [(num_classes, 2), (flags, 0)])
def test_a_function_of_a_script_is_sent(fn: Callable[..., int], expected: int) -> None:
    """It is pickled by value, as it is no import."""
    own = {"torch": torch, "__name__": "__main__", "__builtins__": __builtins__}
    by_value = FunctionType(fn.__code__, own, "own")
    by_value.__module__ = "__main__"
    assert "torch.classes" in sys.modules
    call = pickle.loads(pickle_call(Call(by_value)))
    assert call.fn is not by_value
    assert call.fn(SimpleNamespace(classes=["cat", "dog"])) == expected
