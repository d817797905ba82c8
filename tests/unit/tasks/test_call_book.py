"""Which training a call of a ddp_task is."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from prefect_torch_ddp.tasks.call_book import Call, CallBook, _plain


class Settings(BaseModel):
    """A model."""

    lr: float


@dataclass
class Shape:
    """A dataclass."""

    size: int


class Kind(Enum):
    """An enumeration."""

    A = 1
    B = 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        ("1", 1),
        ({"lr": 0.1}, {"lr": 0.2}),
        ([1, 2], [2, 1]),
        (Path("/a"), Path("/b")),
        (b"a", b"b"),
        (Settings(lr=0.1), Settings(lr=0.2)),
        (Shape(1), Shape(2)),
        (Kind.A, Kind.B),
        (torch.ones(1), 1.0),
    ],
)
def test_other_arguments_are_another_call(one: Any, other: Any) -> None:
    """Plain values, paths and models of them."""
    assert _plain(one) != _plain(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": {2, 3}}, {"b": {3, 2}, "a": 1}),
        ({1: "x", (1, 2): "y"}, {(1, 2): "y", 1: "x"}),
        (Settings(lr=0.1), Settings(lr=0.1)),
        (torch.ones(1), torch.zeros(2)),
    ],
)
def test_equal_arguments_are_the_same_call(one: Any, other: Any) -> None:
    """Whatever the order of a mapping or set; a tensor counts by its type."""
    assert _plain(one) == _plain(other)


def test_calls_are_told_apart_by_their_order_and_those_that_failed_are_taken_up() -> None:
    """The second of equal calls is another training, and the one after a failure is the one
    that failed."""
    book = CallBook()
    calls: list[Call] = [book.begin("a"), book.begin("a"), book.begin("b")]
    assert len({call.key for call in calls}) == 3
    calls[0].is_lost = True
    assert book.begin("a").key == calls[0].key
    assert book.begin("a").key not in {call.key for call in calls}
    again = CallBook()
    assert [again.begin("b").key, again.begin("a").key, again.begin("a").key] == [
        calls[2].key,
        calls[0].key,
        calls[1].key,
    ]
