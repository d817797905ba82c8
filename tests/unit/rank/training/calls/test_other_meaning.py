"""A training is resumed, and the numbers of its table mean something else than before."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from torch import nn
from torch.utils.data import Subset

from prefect_torch_ddp import InvalidParamsError, RankContext
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.data import table
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.storage.directory import DirectoryStorage

EVERY_STEP = CheckpointParams(every_steps=1, every_s=None)
TREES = {"tree": ["ash", "oak"]}


def write(folder: Path, *trees: str) -> None:
    """Write a table with a column of texts, over an earlier one."""
    frame = pd.DataFrame({"a": 1.0, "b": 2.0, "tree": trees})
    folder.mkdir(exist_ok=True)
    frame.to_parquet(folder / "0.parquet")


def train(
    folder: Path,
    options: Mapping[str, Any],
    *,
    dies_at: int | None = None,
    calls: int = 1,
    wraps: bool = False,
) -> int:
    """Make four steps, two each epoch, in one or two calls of ctx.steps; return how many of them
    this attempt made."""
    num_made = 0
    copy = folder / "copies" if wraps else False
    with RankContext.local(storage=folder / "store", checkpoint=EVERY_STEP) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        rows: Any = table(str(folder / "table"), local_copy=copy, **options)
        loader = ctx.loader(Subset(rows, range(4)) if wraps else rows, global_batch_size=2)
        for _ in range(calls):
            for _ in ctx.steps(loader, epochs=2 // calls):
                num_made += 1
                if ctx.step == dies_at:
                    raise InterruptedError
    return num_made


@pytest.mark.parametrize("wraps", [False, True], ids=["in windows", "a Subset of a local copy"])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        (TREES, {"tree": ["oak", "ash"]}, "lists the categories of tree in another way"),
        (TREES, {"tree": ["oak"]}, "has the value|lists the categories of tree in another way"),
        (TREES, {"tree": ["ash", "oak", "elm"]}, None),
        (TREES, TREES, None),
    ],
    ids=["another order", "fewer", "one more", "the same"],
)
def test_a_resume_with_other_codes_is_refused(
    before: Any, after: Any, error: str | None, calls: int, tmp_path: Path, *, wraps: bool
) -> None:
    """Whether its call has ended or not; a code that was added later means what it did."""
    write(tmp_path / "table", "ash", "oak", "oak", "ash")
    how: Any = {"calls": calls, "wraps": wraps}
    with pytest.raises(InterruptedError):
        train(tmp_path, {"categories": before}, dies_at=3, **how)
    refused = pytest.raises(InvalidParamsError, match=error) if error else nullcontext()
    with refused:
        assert train(tmp_path, {"categories": after}, **how) == 2
    *_, last = list_manifests(DirectoryStorage(tmp_path / "store"), "local")
    assert last.position["meaning"]["categories of tree"][0] == (2 if error else len(after["tree"]))


def test_a_table_that_was_written_with_more_texts_is_refused(tmp_path: Path) -> None:
    """Its sorted texts have other codes; the list of then goes on."""
    write(tmp_path / "table", "bay", "oak", "oak", "bay")
    with pytest.raises(InterruptedError):
        train(tmp_path, {"categories": ["tree"]}, dies_at=3)
    write(tmp_path / "table", "bay", "oak", "oak", "ash")
    says = r"the table in call 1 of ctx\.steps lists the categories of tree in another way"
    with pytest.raises(InvalidParamsError, match=says):
        train(tmp_path, {"categories": ["tree"]})
    assert train(tmp_path, {"categories": {"tree": ["bay", "oak", "ash"]}}) == 2


@pytest.mark.parametrize(
    ("name", "before", "after", "is_refused"),
    [
        ("features", ["a", "b"], ["b", "a"], True),
        ("features", ["a", "b"], ["a"], False),
        ("columns", ["a", "b"], ["b", "a"], False),
    ],
    ids=["features", "fewer features", "columns of a dict"],
)
def test_a_resume_with_features_in_another_order_is_refused(
    name: str, before: Sequence[str], after: Sequence[str], tmp_path: Path, *, is_refused: bool
) -> None:
    """As from list({"a", "b"}) in another process. Other features are no other order."""
    write(tmp_path / "table", "ash", "oak", "oak", "ash")
    with pytest.raises(InterruptedError):
        train(tmp_path, {name: before}, dies_at=3)
    error = pytest.raises(InvalidParamsError, match=r"lists the features and .* another way")
    with error if is_refused else nullcontext():
        assert train(tmp_path, {name: after}) == 2
