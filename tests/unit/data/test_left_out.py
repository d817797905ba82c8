"""A `collate_fn` that leaves out samples that are None: where that spoils a gradient, an error."""

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Subset, default_collate

from prefect_torch_ddp.data import left_out
from prefect_torch_ddp.data.handover import Tagged
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
}
HARMLESS: dict[str, Callable[[list[Any]], Any]] = {
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


@pytest.mark.parametrize("collate", DROPPING.values(), ids=DROPPING)
@pytest.mark.parametrize("share", [2, 4])
def test_on_several_ranks_it_is_an_error_that_names_the_sample(collate: Any, share: int) -> None:
    """Whatever the batch is; the rank without such a sample knows nothing of it."""
    options = {"shuffle": False, "collate_fn": collate}
    loader = loader_of(broken(), 2 * share, 0, 2, **options)
    with pytest.raises(InvalidParamsError, match=r"^sample 1 of the dataset is None, and collate"):
        next(loader.lockstep(0))
    next(loader_of(broken(), 2 * share, 1, 2, **options).lockstep(0))


def test_a_share_of_which_nothing_is_left_is_one_too() -> None:
    """None, or empty lists; a stand-in that is None is rank 0's sample as well."""
    for nothing in (None, ([], []), (None, None), []):

        def collate(batch: list[Any], nothing: Any = nothing) -> Any:
            return drop(batch) if kept(batch) else nothing

        loader = loader_of(Subset(broken(), [1, 0]), 2, 0, 2, shuffle=False, collate_fn=collate)
        with pytest.raises(InvalidParamsError, match=r"^sample 0 of the dataset is None"):
            next(loader.lockstep(0))


def test_with_virtual_ranks_it_is_one_on_one_rank_too() -> None:
    """Their weights are the planned ones; of any number of ranks the result shall be the same."""
    loader = loader_of(broken(), 8, shuffle=False, collate_fn=drop, virtual_ranks=2)
    with pytest.raises(InvalidParamsError, match=r"^sample 1 of the dataset is None"):
        next(loader.lockstep(0))


@pytest.mark.parametrize("collate", HARMLESS.values(), ids=HARMLESS)
@pytest.mark.parametrize("share", [2, 4])
def test_nothing_is_said_of_a_none_that_is_replaced(collate: Any, share: int) -> None:
    """By another sample, or where the batch has no row for each sample, so that nobody knows."""
    loader = loader_of(broken(), 2 * share, 0, 2, shuffle=False, collate_fn=collate, keep_ids=True)
    _, counts = next(loader.lockstep(0))
    assert (counts.num_skipped, counts.samples) == (0, tuple(range(share)))


def test_batches_without_a_none_may_have_any_number_of_rows() -> None:
    """Pairs, points in time, one row for all: only a None says that a sample is missing."""
    for rows in (1, 2, 3, 5):
        collate = lambda _, rows=rows: torch.zeros(rows, 2)  # noqa: E731
        next(loader_of(Numbers(8), 8, 0, 2, collate_fn=collate).lockstep(0))


class Finished:
    """A batch of a class that nobody can look into."""


@pytest.mark.parametrize("batch", [Finished(), {"weight": torch.tensor(0.0)}, 0.5])
def test_in_an_unknown_batch_a_none_may_have_been_replaced(batch: object) -> None:
    """Also where each share has a single sample."""
    loader = loader_of(broken(), 2, 1, 2, shuffle=False, collate_fn=lambda _: batch)
    assert len(list(loader.lockstep(0))) == 4


def test_none_for_each_sample_may_stand_for_made_up_data() -> None:
    """Such as a benchmark's."""
    dataset = Numbers(8, transform=lambda _: None)
    next(loader_of(dataset, 8, 0, 2, collate_fn=lambda _: torch.zeros(64, 3)).lockstep(0))


def test_a_pass_for_evaluation_may_leave_samples_out() -> None:
    """What is counted there is what came, on any number of ranks."""
    loader = loader_of(broken(), 8, 0, 2, shuffle=False, collate_fn=drop)
    assert [labels.tolist() for _, labels in loader] == [[0, 2, 3]]
    nothing = loader_of(Subset(broken(), [1]), 1, shuffle=False, collate_fn=nothing_of)
    assert list(nothing) == [None]


def test_alone_a_rank_trains_on_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """Their mean is right there. What is left out doesn't count as used, which is said once."""
    left_out._warn_of_nones.cache_clear()
    loader = loader_of(broken(), 4, shuffle=False, collate_fn=drop, keep_ids=True)
    for epoch in range(2):
        (_, first), (_, second) = loader.lockstep(epoch)
        assert (first.num_local, first.num_skipped, first.samples) == (4, 1, (0, 2, 3))
        assert (second.num_skipped, second.samples) == (0, (4, 5, 6, 7))
    (said,) = caplog.messages
    assert said.startswith("collate_fn leaves out samples that are None")


def test_a_batch_that_is_pinned_still_says_so() -> None:
    """The DataLoader pins what collate_fn gave."""
    batch = Tagged((0, 1), "data", left_out=(1,))
    assert batch.pin_memory() == batch
