"""Checks of `run_gang`'s arguments before work starts; its options are declared in `params`."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from distributed import Client
from pydantic import ValidationError

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.params import Params
from prefect_torch_ddp.protocol.call import Call
from prefect_torch_ddp.protocol.rank import is_script
from prefect_torch_ddp.refusals import in_words

IMPORT_STRING = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")

M = TypeVar("M", bound=Params)


def checked(model: type[M], options: Mapping[str, object]) -> M:
    """Make parameters from Python values, not converted: True is no number of ranks.

    Raises:
        InvalidParamsError: names each option that is unknown or can't be so, and what to give.
    """
    try:
        return model.model_validate(dict(options), strict=True)
    except ValidationError as error:
        raise InvalidParamsError(in_words(error, model)) from error


def check_client(client: object) -> None:
    """Refuse anything but a connected, synchronous client."""
    if not isinstance(client, Client) or client.asynchronous:
        msg = f"client is {client!r}; run_gang needs a synchronous distributed.Client"
        raise InvalidParamsError(msg)
    if client.status != "running":
        msg = f"client is {client.status}; connect it to a Dask scheduler first"
        raise InvalidParamsError(msg)


def check_function(fn: object) -> None:
    """Refuse a function whose call on a rank would run nothing."""
    for is_one in (
        inspect.iscoroutinefunction,
        inspect.isgeneratorfunction,
        inspect.isasyncgenfunction,
    ):
        if is_one(fn):
            kind = is_one.__name__.removeprefix("is").removesuffix("function")
            name = getattr(fn, "__qualname__", repr(fn))
            msg = f"{name} is a {kind} function, whose call runs nothing; give a plain one"
            raise InvalidParamsError(msg)


def check_call(fn: object, args: object, kwargs: object) -> None:
    """Refuse a function or arguments that can't be called."""
    is_named = isinstance(fn, str) and (is_script(fn) or IMPORT_STRING.fullmatch(fn))
    if not callable(fn) and not is_named:
        hint = (
            "give a callable, 'package.module:function', the path of a .py script, or "
            "'-m package.module'"
        )
        msg = f"fn is {fn!r}; {hint}"
        raise InvalidParamsError(msg)
    check_function(fn)
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        msg = f"args is {args!r}; give a sequence, e.g. args=({args!r},)"
        raise InvalidParamsError(msg)
    if kwargs is not None and (
        not isinstance(kwargs, Mapping) or any(not isinstance(key, str) for key in kwargs)
    ):
        msg = f"kwargs is {kwargs!r}; give a mapping whose keys are strings"
        raise InvalidParamsError(msg)


def check_arguments(call: Call) -> None:
    """Refuse arguments that don't fit a plain function; ranks would start only to fail.

    What a decorator made is left alone: it may show the signature of what it calls with more.
    """
    fn, args, kwargs = call.fn, call.args, call.kwargs
    if not inspect.isroutine(fn) or hasattr(fn, "__signature__"):
        return
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        first = next(iter(signature.parameters), "")
        is_workload = first == "ctx" and not args and "ctx" not in kwargs
        hint = (
            "run_gang passes no RankContext: make it a ddp_task, or a workload of train_flow"
            if is_workload
            else "give them as args=(...) and kwargs={...}"
        )
        msg = f"{call.name}() can't be called on the ranks: {error}; {hint}"
        raise InvalidParamsError(msg) from None
