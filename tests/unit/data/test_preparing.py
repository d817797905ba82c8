"""The split is fixed by its seed, disjoint, and as even over the classes as whole samples
allow."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_ddp.data.preparing import seeded_split, tables_in
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.directory import DirectoryStorage


@given(
    n=st.integers(2, 300),
    held_out=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**63),
    num_classes=st.integers(0, 5),
)
def test_split_is_disjoint_complete_sorted_and_repeatable(
    n: int, held_out: float, seed: int, num_classes: int
) -> None:
    """No leak between train and test, and the same split on a second run."""
    targets = [i % num_classes for i in range(n)] if num_classes else None
    train, held = seeded_split(n, held_out, seed, targets)
    assert sorted(train + held) == list(range(n))
    assert train == sorted(train)
    assert held == sorted(held)
    assert len(held) == min(max(round(n * held_out), 1), n - 1)
    assert (train, held) == seeded_split(n, held_out, seed, targets)


@given(sizes=st.lists(st.integers(1, 40), min_size=2, max_size=6), held_out=st.floats(0.05, 0.95))
def test_stratified_split_holds_out_the_same_share_of_each_class(
    sizes: list[int], held_out: float
) -> None:
    """Within one sample of the exact share of the samples held out."""
    targets = [name for name, size in zip("abcdef", sizes, strict=False) for _ in range(size)]
    _, held = seeded_split(len(targets), held_out, 0, targets)
    counts = Counter(targets[i] for i in held)
    for name, size in zip("abcdef", sizes, strict=False):
        assert abs(counts[name] - size * len(held) / len(targets)) < 1


LABELS = [number * 7 % 10 for number in range(100)]


@pytest.mark.parametrize(
    "targets",
    [
        torch.tensor(LABELS),
        [torch.tensor(label) for label in LABELS],
        np.array(LABELS),
        np.array(LABELS, object),
        pd.Series(LABELS, index=np.random.default_rng(0).permutation(100)),
    ],
    ids=["tensor", "tensors", "array", "objects", "series"],
)
def test_classes_are_the_values_by_position_whatever_holds_them(targets: Any) -> None:
    """A tensor, such as torchvision's `targets`, a list of them, NumPy, a Series of any index."""
    train, held = seeded_split(100, 0.2, 0, targets)
    assert (train, held) == seeded_split(100, 0.2, 0, LABELS)
    assert Counter(LABELS[i] for i in held) == dict.fromkeys(range(10), 2)


@pytest.mark.parametrize(
    "targets", [[i / 7 for i in range(100)], [i // 2 for i in range(100)]], ids=["floats", "pairs"]
)
def test_the_seed_chooses_among_classes_of_one_size(targets: list[float]) -> None:
    """If there is less than one sample of each to hold out, it isn't that of the first classes."""
    held = [seeded_split(100, 0.2, seed, targets)[1] for seed in range(3)]
    assert held[0] != held[1] != held[2] != held[0]
    assert all(max(each) > 80 for each in held)


def test_without_equal_classes_the_split_stays_what_it_was() -> None:
    """Datasets that were prepared before have it."""
    targets = list("aaaaaaabbbbbccc")
    assert seeded_split(15, 0.4, 5, targets)[1] == [1, 2, 4, 7, 11, 13]
    assert seeded_split(10, 0.3, 7)[1] == [0, 7, 8]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1, 0.5, 0), "1 samples can't be split"),
        ((10, 0.0, 0), "held_out is 0.0"),
        ((10, 1.5, 0), "held_out is 1.5"),
        ((10, 0.5, -1), "seed is -1"),
        ((10, 0.5, 0, [1, 2]), "2 classes for 10 samples"),
        ((10, 0.5, 0, torch.zeros(11)), "11 classes for 10 samples"),
        ((10, 0.5, 0, torch.zeros(10, 2)), r"targets has the shape \(10, 2\)"),
        ((10, 0.5, 0, np.array(3)), r"targets has the shape \(\)"),
        ((2, 0.5, 0, [torch.zeros(3)] * 2), r"targets\[0\] has the shape \(3,\)"),
    ],
)
def test_impossible_splits_are_refused(arguments: tuple[int, float, int], words: str) -> None:
    """The message says which value is wrong."""
    with pytest.raises(InvalidParamsError, match=words):
        seeded_split(*arguments)


def test_the_tables_of_a_source_are_a_dataset_where_they_lie(tmp_path: Path) -> None:
    """It has the files that `table` reads, and another id when one of them changes."""
    source = DirectoryStorage(tmp_path)
    for name in ("a.parquet", "below/b.PQ", "_metadata.parquet", ".tmp/c.parquet", "readme.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"four")
    found = tables_in(source)
    assert (found.uri, found.num_files, found.num_bytes) == (source.uri, 2, 8)
    assert tables_in(source) == found
    (tmp_path / "readme.txt").write_bytes(b"other")
    assert tables_in(source) == found
    (tmp_path / "a.parquet").write_bytes(b"longer")
    changed = tables_in(source)
    assert changed.dataset_id != found.dataset_id
    assert changed.digest != found.digest


def test_a_source_without_tables_needs_a_prepare(tmp_path: Path) -> None:
    """The error names the source and the way out."""
    (tmp_path / "cat.jpg").write_bytes(b"x")
    with pytest.raises(InvalidParamsError, match=rf"no prepare.*no Parquet file in {tmp_path}"):
        tables_in(DirectoryStorage(tmp_path))
