"""A Call is what the ranks get: a function, its arguments, and whether it makes a RankContext."""

import pickle
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.gang.caller.sent.code import pickle_call
from prefect_torch_ddp.protocol.call import Call

ENTRY = Call("package.stages:run_task", takes_context=True)


def fit(x: int, *, y: int = 0) -> int:
    """Stand for the user's function."""
    return x + y


def test_arguments_are_added_after_those_there_are() -> None:
    """By keyword they replace one of the same name."""
    call = Call(fit, (1,), {"y": 2}).with_arguments((3,), {"y": 4, "z": 5})
    assert call == Call(fit, (1, 3), {"y": 4, "z": 5})
    assert ENTRY.with_arguments(("config", fit), {}).takes_context


@pytest.mark.parametrize(
    ("call", "code"),
    [
        pytest.param(Call(fit, (1,)), fit, id="a function"),
        pytest.param(Call("train.py", ("--lr", "1")), "train.py", id="a script"),
        pytest.param(ENTRY.with_arguments(("config", fit), {}), fit, id="a task's function"),
        pytest.param(
            ENTRY.with_arguments(("config", "flows.cats"), {}), "flows.cats", id="a stage"
        ),
    ],
)
def test_its_code_is_what_the_user_wrote(call: Call, code: Callable[..., Any] | str) -> None:
    """Also if an entry of ours calls that."""
    assert call.code == code
    assert call.users_own.fn == code


def test_the_users_own_call_has_none_for_its_context() -> None:
    """It names the arguments as the user's function gets them."""
    given = ENTRY.with_arguments(("config", fit, (1,), {"y": 2}), {})
    assert given.users_own == Call(fit, (None, 1), {"y": 2})
    assert ENTRY.with_arguments(("config", fit), {}).users_own == Call(fit, (None,))
    assert Call(fit, (1,)).users_own == Call(fit, (1,))


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        pytest.param(fit, "fit", id="a function"),
        pytest.param("package.module:fit", "package.module:fit", id="a name"),
        pytest.param(partial(fit, 1), "partial", id="an object"),
    ],
)
def test_its_name_is_for_people(fn: Callable[..., Any] | str, name: str) -> None:
    """The function's own, or that of its type."""
    assert Call(fn).name == name


def test_it_is_pickled_whole_and_a_script_by_its_whole_path() -> None:
    """A rank may run in another folder."""
    call = Call(fit, (1,), {"y": 2})
    assert pickle.loads(pickle_call(call)) == call
    sent = pickle.loads(pickle_call(Call("train.py", ("--lr", "1"))))
    assert sent == Call(str(Path("train.py").resolve()), ("--lr", "1"))


def test_what_can_not_be_pickled_is_refused_by_name() -> None:
    """Before anything is started."""
    with pytest.raises(InvalidParamsError, match="x can't be sent to the ranks"):
        pickle_call(Call(fit, (threading.Lock(),)))
