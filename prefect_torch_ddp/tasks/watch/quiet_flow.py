"""A flow whose call raises our own errors, and a cancel, without the frames of Prefect."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Flow
from prefect.exceptions import CancelledRun
from prefect.logging import get_run_logger

from prefect_torch_ddp.errors import PrefectTorchDdpError, TaskCancelled
from prefect_torch_ddp.server import check_embedded_server
from prefect_torch_ddp.tasks.cancel.left_tasks import SIGNALS
from prefect_torch_ddp.tasks.cancel.states import cancel_in_words, flow_cancelled

P = ParamSpec("P")
R = TypeVar("R")


class _QuietFlow(Flow[P, R]):
    refuse: Callable[..., None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if self.refuse is not None and not kwargs.get("return_state"):
                self.refuse(*args, **kwargs)
            check_embedded_server()
            return super().__call__(*args, **kwargs)
        except (PrefectTorchDdpError, CancelledRun) as error:
            # A script that doesn't catch it prints the script's frames and this one. Prefect's
            # would be 30 lines that end in its engine; the error's text says what is wrong.
            raise error.with_traceback(None)  # noqa: B904 - it is the same error


def without_frames(
    refuse: Callable[..., None] | None = None,
) -> Callable[[Flow[P, R]], Flow[P, R]]:
    """Leave Prefect's frames out of what a flow's call raises if it is ours or a cancel.

    This concerns scripts and notebooks, which call the flow. A worker runs it in another way.

    Args:
        refuse: is called first, with the call's arguments, before Prefect starts a temporary
            server and makes a flow run. It raises what is wrong with them.
    """

    def decorate(made: Flow[P, R]) -> Flow[P, R]:
        made.__class__ = _QuietFlow
        made.refuse = refuse  # type: ignore[attr-defined]
        return made

    return decorate


def quietly(work: Callable[[], R]) -> R:
    """Do a flow's work in its function; return what it returns, or the state of a cancelled flow.

    Prefect takes a state that a flow returns for what it is.
    """
    try:
        return work()
    except PrefectTorchDdpError as error:
        # Its text says what is wrong; Prefect, Dask and this package would add 40 lines of frames.
        get_run_logger().debug("raised by these calls:", exc_info=error)
        raise error.with_traceback(None)  # noqa: B904 - it is the same error
    except (TaskCancelled, *SIGNALS) as cancelled:
        state: Any = flow_cancelled(cancel_in_words(cancelled))
        return state  # type: ignore[no-any-return]
