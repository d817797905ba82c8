"""Which part of a call can't be sent: the words that name it."""

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.gang.caller.sent.code import pickle_call
from prefect_torch_ddp.gang.caller.sent.unsendable import unsendable
from prefect_torch_ddp.protocol.call import Call

LOCK = threading.Lock()


def fit(ctx: object, dataset: object = None, *more: object, **options: object) -> None:
    """Be called with anything."""


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    """A file of the test's own."""
    with (tmp_path / "file").open("wb") as file:
        yield file


@pytest.mark.parametrize(
    ("place", "call"),
    [
        pytest.param("dataset", lambda item: (item,), id="itself"),
        pytest.param("dataset.file", lambda item: (SimpleNamespace(file=item),), id="attribute"),
        pytest.param(
            "dataset.parts[1]['x'].file",
            lambda item: (SimpleNamespace(parts=[1, {"x": SimpleNamespace(file=item)}]),),
            id="deep",
        ),
        pytest.param("more[0]", lambda item: (1, item), id="one_of_any_number"),
        pytest.param("dataset[1]", lambda item: (functools.partial(print, item),), id="partial"),
    ],
)
def test_an_argument_is_named_to_the_part_that_cannot_be_sent(
    place: str, call: Any, opened: Any
) -> None:
    """By the name of its parameter, with pickle's reason and the way out."""
    said = f"{place} can't be sent to the ranks: TypeError: cannot pickle '_io.BufferedWriter' obj"
    with pytest.raises(InvalidParamsError) as refused:
        pickle_call(Call(fit, (None, *call(opened))))
    assert str(refused.value).startswith(said)
    assert "a dataset opens its file when it first reads" in str(refused.value)


def test_an_argument_by_name_and_of_a_task_is_named(opened: Any) -> None:
    """Also within the call of a `ddp_task`, whose ranks get a context first."""
    for place, args, kwargs in (
        ("options['extra']", (), {"extra": opened}),
        ("dataset", (opened,), {}),
    ):
        with pytest.raises(InvalidParamsError) as refused:
            pickle_call(Call("package.stages:run", (0, fit, args, kwargs), takes_context=True))
        assert str(refused.value).startswith(f"{place} can't be sent to the ranks: TypeError")


def test_what_a_function_uses_is_named() -> None:
    """A variable that it closes over, and one of its module, if it travels by value."""
    lock = threading.Lock()

    def closes_over() -> object:
        return lock

    called = "test_what_a_function_uses_is_named.<locals>.closes_over"
    assert str(unsendable(closes_over, (), {})).startswith(f"{called}'s lock can't be sent")
    made: dict[str, Any] = {"__name__": "__main__", "LOCK": LOCK}
    exec("def uses():\n    return LOCK", made)
    assert str(unsendable(made["uses"], (), {})).startswith("uses's LOCK can't be sent")


def test_a_call_that_can_be_sent_has_no_such_part(opened: Any) -> None:
    """Nor has one whose part is of a class that never reaches pickle."""
    assert unsendable(fit, (None, {"a": [1]}), {}) is None
    assert unsendable(fit, (None, [opened]), {}, (type(opened),)) is None
