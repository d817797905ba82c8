"""Batches of every structure are cut into micro-batches, or refused by name."""

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.gradients.share_weights import ShareWeights

Pair = namedtuple("Pair", "images labels")  # noqa: PYI024 - the kind that a user's collate_fn gives


def parts_of(batch: Any, max_samples: int | None) -> list[tuple[Any, float]]:
    """Cut a batch outside of a training."""
    return list(ShareWeights(1).micro_batches(batch, max_samples))


def test_every_kind_of_batch_is_cut_alike() -> None:
    """Tensors, tuples, lists, named tuples, nested ones, names of samples: the same rows of each,
    nothing lost; a mapping of any class becomes a plain dict."""
    x, y = torch.arange(10).reshape(5, 2), torch.arange(5)
    names = list("abcde")
    for batch, get in [
        (x, lambda part: (part,)),
        ((x, y), lambda part: part),
        ([x, y], tuple),
        (Pair(x, y), lambda part: (part.images, part.labels)),
        ({"x": x, "y": y}, lambda part: (part["x"], part["y"])),
        (UserDict(x=x, y=y), lambda part: (part["x"], part["y"])),
        ((UserDict(x=UserDict(x=x)), y), lambda part: (part[0]["x"]["x"], part[1])),
        (({"x": [x, None]}, y), lambda part: (part[0]["x"][0], part[1])),
    ]:
        parts = parts_of(batch, 2)
        kind = dict if isinstance(batch, UserDict) else type(batch)
        assert {type(part) for part, _ in parts} == {kind}
        assert [weight for _, weight in parts] == [2 / 5, 2 / 5, 1 / 5]
        for i, column in enumerate(get(batch)):
            assert torch.equal(torch.cat([get(part)[i] for part, _ in parts]), column)
    assert [part[1] for part, _ in parts_of((x, names), 3)] == [names[:3], names[3:]]
    ((whole, weight),) = parts_of((x, y), None)
    assert (whole[0].shape, weight) == (x.shape, 1.0)


@pytest.mark.parametrize(
    ("batch", "max_samples", "says"),
    [
        (
            (torch.zeros(5, 2), torch.zeros(4)),
            2,
            r"batch\[1\]: it has 4 rows where this rank's share has 5",
        ),
        (
            {"x": torch.zeros(3), "scale": torch.tensor(2.0)},
            2,
            r"batch\['scale'\]: it is a single number",
        ),
        ((torch.zeros(3), "train"), 2, r"batch\[1\], a str"),
        (({"x": object()},), 2, r"batch\[0\]\['x'\], a object"),
        ((), 2, "a tuple without a tensor"),
        (torch.zeros(0, 2), 2, "it has 0 rows"),
        (torch.zeros(3), 0, "max_samples is 0"),
        ((torch.zeros(3), ["a", "b"]), 2, r"batch\[1\]: it has 2 rows"),
    ],
)
def test_what_cannot_be_cut_is_named(batch: Any, max_samples: int, says: str) -> None:
    """Where it is, and what it is."""
    with pytest.raises(InvalidParamsError, match=says):
        parts_of(batch, max_samples)


def test_a_batch_of_something_else_than_samples_is_refused() -> None:
    """In a step the share's size is known: images of a list, each with channels first, aren't
    cut by channels."""
    with RankContext.local() as ctx:
        for _ in ctx.steps(
            ctx.loader(TensorDataset(torch.zeros(4)), global_batch_size=4), epochs=1
        ):
            with pytest.raises(
                InvalidParamsError,
                match=r"batch\[0\]: it has 3 rows where this rank's share has 4 samples",
            ):
                list(ctx.micro_batches([torch.zeros(3, 8, 8)] * 4, max_samples=2))
