"""The Dask task that calls a gang: what it holds on its worker, which the gang may need."""

from collections.abc import Mapping
from contextlib import suppress

from distributed import Worker, get_worker, secede
from distributed.worker import thread_state

from prefect_torch_ddp.errors import InvalidParamsError


def leave_thread() -> None:
    """Give up the thread of the Dask worker that runs this task, if it is one.

    For good: to take a thread again, the task would wait until another one of the worker ends.
    """
    # No Dask task; a thread that the task itself has started; a task that has left before.
    with suppress(ValueError, AttributeError, KeyError):
        secede()


def refuse_held_resources(resources: Mapping[str, float]) -> None:
    """Refuse a gang that needs Dask resources of which this task itself holds some.

    A task can't give them back before it ends. Raises InvalidParamsError.
    """
    worker, key = _own_worker(), getattr(thread_state, "key", None)
    task = worker.state.tasks.get(key) if worker is not None and key is not None else None
    if worker is None or task is None:
        return
    held = task.resource_restrictions or {}  # Dask has None for none
    both = {name: amount for name, amount in held.items() if name in resources}
    if both:
        amounts = ", ".join(f"{name}={amount:g}" for name, amount in both.items())
        holds = f"the task that runs the gang itself holds {amounts} of worker {worker.address}"
        do = "submit the task without dask.annotate(resources=...)"
        msg = f"{holds}, and its ranks might wait for them forever; {do}: the gang reserves them"
        raise InvalidParamsError(msg)


def _own_worker() -> Worker | None:
    with suppress(ValueError):  # no Dask task
        return get_worker()
    return None
