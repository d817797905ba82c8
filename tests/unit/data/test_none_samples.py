"""Samples that are None: in a step of several ranks an error, before `collate_fn` gets them."""

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Subset, default_collate

from prefect_torch_ddp.data import loader as loader_module
from prefect_torch_ddp.errors import InvalidParamsError
from tests.unit.data.test_loader import Numbers, loader_of

BROKEN = 1


def pair_of(index: int) -> tuple[torch.Tensor, int] | None:
    """Return an image with its class number; None for one that can't be read."""
    return None if index == BROKEN else (torch.full((5, 7), index), index)


def broken(num: int = 8) -> Numbers:
    """Make a dataset that returns None for a sample."""
    return Numbers(num, transform=pair_of)


def kept(batch: list[Any]) -> list[Any]:
    """Leave out what is None."""
    return [sample for sample in batch if sample is not None]


def drop(batch: list[Any]) -> Any:
    """Collate as most do who have images that are broken."""
    return default_collate(kept(batch))


def drop_in_place(batch: list[Any]) -> Any:
    """Change the list of samples itself."""
    batch[:] = kept(batch)
    return default_collate(batch)


def refill(batch: list[Any]) -> Any:
    """Repeat another sample in its place, as some do."""
    found = kept(batch)
    return default_collate(found + found[: len(batch) - len(found)])


DROPPING: dict[str, Callable[[list[Any]], Any]] = {
    "columns": drop,
    "in place": drop_in_place,
    "one tensor": lambda batch: drop(batch)[0],
    "a dict": lambda batch: dict(zip("xy", drop(batch), strict=True)),
    "another mapping": lambda batch: (UserDict(x=drop(batch)[0]), "train"),
    "a dict in a tuple": lambda batch: ({"x": drop(batch)[0]}, torch.tensor(1.0)),
    "images of any size": lambda batch: tuple(zip(*kept(batch), strict=True)),
    "a list of images": lambda batch: [x for x, _ in kept(batch)],
    # An inner tensor that has as many rows as samples were planned: four boxes of one image.
    "boxes": lambda batch: [{"boxes": torch.zeros(len(batch), 4)} for _ in kept(batch)],
}
REPLACING: dict[str, Callable[[list[Any]], Any]] = {
    "replaced": refill,
    "replaced, a dict": lambda batch: dict(zip("xy", refill(batch), strict=True)),
    "replaced in a list": lambda batch: [sample or pair_of(0) for sample in batch],
    "replaced images of any size": lambda batch: tuple(
        zip(*[sample or pair_of(0) for sample in batch], strict=True)
    ),
    "tokens": lambda batch: torch.cat([x for x, _ in kept(batch)]),
    "a graph": lambda batch: object(),
}


def nothing_of(samples: Any) -> Any:
    """Give what users give for a batch of which nothing is left."""
    return drop(samples) if kept(samples) else None


@pytest.mark.parametrize("collate", {**DROPPING, **REPLACING}.values(), ids=DROPPING | REPLACING)
@pytest.mark.parametrize("share", [2, 4])
def test_on_several_ranks_it_is_an_error_that_names_the_sample(collate: Any, share: int) -> None:
    """Nobody guesses what collate_fn would make of it, which isn't called; the rank without such a
    sample knows nothing of it."""
    collated = []

    def watched(batch: list[Any]) -> Any:
        collated.append(batch)
        return collate(batch)

    options = {"shuffle": False, "collate_fn": watched}
    loader = loader_of(broken(), 2 * share, 0, 2, **options)
    with pytest.raises(InvalidParamsError, match=r"^sample 1 of the dataset is None. .*keep"):
        next(loader.lockstep(0))
    assert not collated
    next(loader_of(broken(), 2 * share, 1, 2, **options).lockstep(0))
    assert len(collated) == 1


def test_a_share_of_which_nothing_is_left_is_one_too() -> None:
    """Also a stand-in for an empty share, which is rank 0's sample as well."""
    for rank, chosen in ((0, [1, 0]), (1, [1])):
        loader = loader_of(Subset(broken(), chosen), 2, rank, 2, shuffle=False, collate_fn=drop)
        with pytest.raises(InvalidParamsError, match=r"^sample 0 of the dataset is None"):
            next(loader.lockstep(0))


def test_with_virtual_ranks_it_is_one_on_one_rank_too() -> None:
    """Their weights are the planned ones; of any number of ranks the result shall be the same."""
    loader = loader_of(broken(), 8, shuffle=False, collate_fn=drop, virtual_ranks=2)
    with pytest.raises(InvalidParamsError, match=r"^sample 1 of the dataset is None"):
        next(loader.lockstep(0))


@pytest.mark.parametrize("collate", REPLACING.values(), ids=REPLACING)
@pytest.mark.parametrize("share", [2, 4])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_none_that_is_kept_counts_as_planned(collate: Any, share: int, world_size: int) -> None:
    """On the word that collate_fn puts another sample in its place."""
    options = {"shuffle": False, "collate_fn": collate, "keep_ids": True, "none_samples": "keep"}
    loader = loader_of(broken(), world_size * share, 0, world_size, **options)
    _, counts = next(loader.lockstep(0))
    assert (counts.num_skipped, counts.samples) == (0, tuple(range(share)))


def test_another_word_is_refused() -> None:
    """By name, before anything is loaded."""
    with pytest.raises(InvalidParamsError, match="none_samples is 'skip'; choose 'refuse' or"):
        loader_of(broken(), 8, none_samples="skip")


def test_batches_without_a_none_may_have_any_number_of_rows() -> None:
    """Pairs, points in time, one row for all: only a None says that a sample is missing."""
    for rows in (1, 2, 3, 5):
        collate = lambda _, rows=rows: torch.zeros(rows, 2)  # noqa: E731
        next(loader_of(Numbers(8), 8, 0, 2, collate_fn=collate).lockstep(0))


def test_a_pass_for_evaluation_may_leave_samples_out() -> None:
    """What is counted there is what came, on any number of ranks."""
    loader = loader_of(broken(), 8, 0, 2, shuffle=False, collate_fn=drop)
    assert [labels.tolist() for _, labels in loader] == [[0, 2, 3]]
    nothing = loader_of(Subset(broken(), [1]), 1, shuffle=False, collate_fn=nothing_of)
    assert list(nothing) == [None]


def test_alone_a_rank_trains_on_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """The mean over the other samples is right on one rank, and one warning reports the
    omission."""
    loader_module._warn_of_nones.cache_clear()
    loader = loader_of(broken(), 4, shuffle=False, collate_fn=drop, keep_ids=True)
    for epoch in range(2):
        (_, first), (_, second) = loader.lockstep(epoch)
        assert (first.num_local, first.num_skipped, first.samples) == (4, 1, (0, 2, 3))
        assert (second.num_skipped, second.samples) == (0, (4, 5, 6, 7))
    (said,) = caplog.messages
    assert said.startswith("the dataset has samples that are None")
