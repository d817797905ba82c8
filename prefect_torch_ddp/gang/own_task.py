"""The Dask task that calls a gang: what it holds on its worker, which the gang may need."""

from contextlib import suppress

from distributed import secede


def leave_thread() -> None:
    """Give up the thread of the Dask worker that runs this task, if it is one.

    For good: to take a thread again, the task would wait until another one of the worker ends.
    """
    # No Dask task; a thread that the task itself has started; a task that has left before.
    with suppress(ValueError, AttributeError, KeyError):
        secede()
