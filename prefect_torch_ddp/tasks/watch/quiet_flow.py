"""How our own flows begin and end: their arguments are checked first, a cancel is a state."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Flow
from prefect.logging import get_run_logger

from prefect_torch_ddp.errors import PrefectTorchDdpError, TaskCancelled
from prefect_torch_ddp.server import check_embedded_server
from prefect_torch_ddp.tasks.cancel.left_tasks import SIGNALS
from prefect_torch_ddp.tasks.cancel.states import cancel_in_words, flow_cancelled

P = ParamSpec("P")
R = TypeVar("R")


class _CheckedFlow(Flow[P, R]):
    refuse: Callable[..., None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.refuse is not None and not kwargs.get("return_state"):
            self.refuse(*args, **kwargs)
        check_embedded_server()
        return super().__call__(*args, **kwargs)


def checked_first(
    refuse: Callable[..., None] | None = None,
) -> Callable[[Flow[P, R]], Flow[P, R]]:
    """Check a call of a flow before Prefect starts a temporary server and makes a flow run.

    This concerns scripts and notebooks, which call the flow. A worker runs it in another way.

    Args:
        refuse: is called with the call's arguments. It raises what is wrong with them.
    """

    def decorate(made: Flow[P, R]) -> Flow[P, R]:
        made.__class__ = _CheckedFlow
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
        get_run_logger().debug("raised by these calls:", exc_info=error)
        raise
    except (TaskCancelled, *SIGNALS) as cancelled:
        state: Any = flow_cancelled(cancel_in_words(cancelled))
        return state  # type: ignore[no-any-return]
