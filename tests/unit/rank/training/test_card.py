"""A model's card says which codes the texts of its table had, within bounds."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.rank.training.outcome import FIRST_VALUES, MOST_CHARACTERS
from prefect_torch_ddp.storage.directory import DirectoryStorage

pytest.importorskip("pyarrow")

from prefect_torch_ddp.data import table
from tests.unit.data.tables.parquet_files import write

PAGE = Path(__file__).parents[4] / "docs/formats.md"


def card_of(tmp_path: Path, *loaded: Any) -> dict[str, Any]:
    """Train a step on the first dataset, with loaders of all; return the exported card."""
    storage = DirectoryStorage(tmp_path / "store")
    with RankContext.local(tmp_path, {}, 0, storage, run_id="r") as ctx:
        model = ctx.wrap(torch.nn.Linear(1, 1))
        ctx.track(model=model)
        loader, *_ = [ctx.loader(each, global_batch_size=4) for each in loaded]
        for _ in ctx.steps(loader, epochs=1):
            pass
    uris = ctx._assembly.export_models("w", {})
    card: dict[str, Any] = json.loads(Path(uris["model"]).with_suffix(".json").read_bytes())
    return card


@pytest.fixture(name="trees")
def _trees(tmp_path: Path) -> Path:
    return write(tmp_path / "trees/a.parquet", {"tree": ["oak", "ash", "oak", "elm"], "n": [1] * 4})


@pytest.mark.parametrize("is_copy", [False, True], ids=["files", "a subset of a copy"])
def test_a_card_has_the_values_of_each_category(
    trees: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_copy: bool
) -> None:
    """In the order of their codes, with a digest; those of the first loader of a column count."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    rows: Any = table(trees, categories=["tree"], local_copy=is_copy)
    other = table(trees, categories={"tree": ["elm", "oak", "ash", "fir"]})
    card = card_of(tmp_path, Subset(rows, [0, 1, 2]) if is_copy else rows, other)
    values = ["ash", "elm", "oak"]
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    assert card["categories"] == {"tree": {"num_values": 3, "sha256": digest, "values": values}}
    assert {"categories", "num_values", "sha256", "values"} <= set(
        re.findall(r"`(\w+)`", PAGE.read_text(encoding="utf-8"))
    )


def test_of_a_long_list_the_card_has_the_first_values(trees: Path, tmp_path: Path) -> None:
    """And the digest of all."""
    values = ["ash", "elm", "oak", *(f"{i:020d}" for i in range(MOST_CHARACTERS // 20))]
    card = card_of(tmp_path, table(trees, categories={"tree": values}))
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    expected = {"num_values": len(values), "sha256": digest, "first": values[:FIRST_VALUES]}
    assert card["categories"] == {"tree": expected}


def test_without_categories_the_card_has_none(trees: Path, tmp_path: Path) -> None:
    """Also if a dataset of others has an attribute of that name."""
    rows = torch.utils.data.TensorDataset(torch.zeros(4))
    rows.categories = ["cat", "dog"]  # type: ignore[attr-defined] - as COCO and others have it
    card = card_of(tmp_path, rows, table(trees, columns=["n"]))
    assert "categories" not in card
