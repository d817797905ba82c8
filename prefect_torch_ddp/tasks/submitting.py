"""Submitting a `ddp_task`: it waits without a thread, and what can't be sent is named."""

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


@contextmanager
def submitting(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Have a task whose function is `fn` submitted in the context, with these arguments.

    Raises:
        InvalidParamsError: an argument, or what the function uses, can't be sent to a worker; or
            the flow's task runner has a cluster object.
    """
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
