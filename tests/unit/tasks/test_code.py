"""When a function counts as the same code: its source, with what it names in its module."""

from pathlib import Path

import pytest

from prefect_torch_ddp.tasks.digest import code_of

MODULE = """
import os
from math import pi as factor
try:
    import torch
except ImportError:
    def halved(x): return x
EPOCHS = 10
LR, SIZE = 0.1, 32

class Net:
    width = 3

def scaled(x):
    return x * LR

@task
def fit(ctx):
    later = EPOCHS * factor
    return Net().width, scaled(EPOCHS), halved(1)

@flow
def line():
    fit()
    later(2)

def later(x):
    return SIZE
"""


def code(tmp_path: Path, source: str, function: str = "fit") -> str | None:
    """Return the digest of a function in a module of that source."""
    path = tmp_path / "module.py"
    path.write_text(source)
    return code_of(path, function)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("EPOCHS = 10", "EPOCHS = 20"),
        ("LR, SIZE = 0.1", "LR, SIZE = 0.2"),
        ("width = 3", "width = 4"),
        ("x * LR", "x / LR"),
        ("pi as factor", "e as factor"),
        ("def halved(x): return x", "def halved(x): return 2"),
        ("scaled(EPOCHS)", "scaled(1)"),
        ("@task", "@other"),
    ],
)
def test_what_a_function_names_counts(tmp_path: Path, old: str, new: str) -> None:
    """Itself, and constants, classes, functions and imports, also by way of others."""
    assert code(tmp_path, MODULE) != code(tmp_path, MODULE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [("return SIZE", "return 2"), ("later(2)", "print(2)"), ("import os", ""), ("\n\n", "\n# x\n")],
)
def test_what_it_does_not_use_does_not_count(tmp_path: Path, old: str, new: str) -> None:
    """A later step of the flow that is mended; comments and layout."""
    assert code(tmp_path, MODULE) == code(tmp_path, MODULE.replace(old, new))


def test_a_function_in_another_one_counts_with_that_and_unknown_code_is_none(
    tmp_path: Path,
) -> None:
    """As of a lambda, or of a cell of a notebook, which is no file."""
    within = code(tmp_path, MODULE, "fit.<locals>.inner")
    assert within == code(tmp_path, MODULE)
    assert code(tmp_path, MODULE, "<lambda>") is None
    assert code(tmp_path, "def fit(:") is None
    assert code_of(tmp_path / "none.py", "fit") is None
    assert code_of(Path(), "fit") is None
