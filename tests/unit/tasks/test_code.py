"""When a function counts as the same code: its own source, and what it closes over."""

import functools
import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_torch_ddp.tasks.digest import code_of, digest_of

MODULE = """
def made(epochs):
    def fit(ctx):
        return epochs * 2
    return fit

fit = made(10)

def later():
    return 1
"""


def function_in(path: Path, source: str) -> Callable[..., Any]:
    """Return `fit` of a module of that source."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., Any] = module.fit
    return found


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        ("epochs * 2", "epochs * 3", True),
        ("made(10)", "made(20)", True),
        ("return 1", "return 2", False),
    ],
)
def test_what_counts_as_another_code(tmp_path: Path, old: str, new: str, *, counts: bool) -> None:
    """Not a later step of the flow, which is mended."""
    before = function_in(tmp_path / "before.py", MODULE)
    after = function_in(tmp_path / "after.py", MODULE.replace(old, new))
    assert (code_of(before) != code_of(after)) == counts
    assert code_of(functools.wraps(before)(lambda: None)) == code_of(before), "as decorated"


def test_code_that_is_in_no_file_is_unknown() -> None:
    """As that of a notebook is on a Dask worker."""
    found: dict[str, Any] = {}
    exec("def fit(ctx): pass", found)
    assert code_of(found["fit"]) is None


def test_code_that_holds_what_has_no_digest_is_unknown() -> None:
    """The call fails, or runs, as it would without a key."""
    lock = threading.Lock()

    def fit() -> object:
        return lock

    assert code_of(fit) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(4, 3)[:, 0],
        torch.ones(6)[::2],
        torch.ones(1).expand(5),
        torch.tensor([True, False, True])[::2],
        torch.arange(6.0).reshape(2, 3).T,
    ],
    ids=["a column", "every second", "expanded", "booleans", "turned"],
)
def test_how_a_tensor_lies_in_memory_does_not_count(tensor: torch.Tensor) -> None:
    """A view that isn't contiguous has the digest of its copy; as a parameter and in a dict too."""
    whole = tensor.clone(memory_format=torch.contiguous_format)
    assert digest_of(tensor) == digest_of(whole)
    assert digest_of({"x": torch.nn.Parameter(tensor, requires_grad=False)}) == digest_of(
        {"x": torch.nn.Parameter(whole, requires_grad=False)}
    )
