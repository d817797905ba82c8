"""Submitting a `ddp_task`: it waits without a thread, and what can't be sent is named."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from prefect.futures import PrefectFuture

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.gang.caller.sent.modules import let_modules_be_sent
from prefect_torch_ddp.gang.caller.sent.unsendable import unsendable
from prefect_torch_ddp.rank.lazy_dataset import let_frames_be_sent
from prefect_torch_ddp.tasks.clusters.cluster_objects import refuse_sent
from prefect_torch_ddp.tasks.off_thread import off_thread

PREFECTS = frozenset({"wait_for", "return_state"})
"""Keywords of `submit` and `map` that aren't the function's."""


def refuse_unbound(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of a call that don't fit a task's function, as Prefect does.

    Prefect's error would be shown with 80 lines of its own frames.
    """
    signature = inspect.signature(fn)
    own = {name: value for name, value in kwargs.items() if name not in PREFECTS}
    try:
        signature.bind(*args, **own)
    except TypeError as error:
        whole = inspect.signature(inspect.unwrap(fn)).parameters
        context, name = next(iter(whole)), fn.__name__
        if context in own:
            takes = ", ".join(["ctx", *(each for each in whole if each != "ctx")])
            hint = f"it is given a RankContext as its first argument: write `def {name}({takes})`"
        else:
            rest = signature.replace(return_annotation=signature.empty)
            hint = f"its first argument, {context}, is the RankContext, and then it takes {rest}"
        msg = f"{name} can't be called so: {error}; {hint}"
        raise InvalidParamsError(msg) from None


@contextmanager
def submitting(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Have a task whose function is `fn` submitted in the context, with these arguments.

    Raises:
        InvalidParamsError: the arguments don't fit the function; an argument, or what the function
            uses, can't be sent to a worker; or the flow's task runner has a cluster object.
    """
    refuse_unbound(fn, args, kwargs)
    let_modules_be_sent()
    let_frames_be_sent()
    refuse_sent()
    try:
        with off_thread():
            yield
    except TypeError as error:  # as Dask wraps what pickle raises; it names no argument
        own = {name: value for name, value in kwargs.items() if name not in PREFECTS}
        if (msg := unsendable(fn, args, own, (PrefectFuture,))) is None:
            raise
        raise InvalidParamsError(msg) from error
