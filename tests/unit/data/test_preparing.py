"""The split is fixed by its seed, disjoint, and as even over the classes as whole samples
allow."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_ddp.data.preparing import seeded_split
from prefect_torch_ddp.errors import InvalidParamsError


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1, 0.5, 0), "1 samples can't be split"),
        ((10, 0.0, 0), "held_out is 0.0"),
        ((10, 1.5, 0), "held_out is 1.5"),
        ((10, 0.5, -1), "seed is -1"),
        ((10, 0.5, 0, [1, 2]), "2 classes for 10 samples"),
    ],
)
def test_impossible_splits_are_refused(arguments: tuple[int, float, int], words: str) -> None:
    """The message says which value is wrong."""
    with pytest.raises(InvalidParamsError, match=words):
        seeded_split(*arguments)
