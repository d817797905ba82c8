"""A flow whose call raises our own errors, and a cancel, without the frames of Prefect."""

from typing import Any, ParamSpec, TypeVar

from prefect import Flow
from prefect.exceptions import CancelledRun

from prefect_torch_ddp.errors import PrefectTorchDdpError, RankFailedError
from prefect_torch_ddp.tasks.watch.frames import users_frames

P = ParamSpec("P")
R = TypeVar("R")


class _QuietFlow(Flow[P, R]):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except (PrefectTorchDdpError, CancelledRun) as error:
            if isinstance(error, RankFailedError):
                error.shown_traceback = users_frames(error.shown_traceback)
            # A script that doesn't catch it prints the script's frames and this one. Prefect's
            # would be 30 lines that end in its engine; the error's text says what is wrong.
            raise error.with_traceback(None)  # noqa: B904 - it is the same error


def without_frames(made: Flow[P, R]) -> Flow[P, R]:
    """Leave Prefect's frames out of what a flow's call raises if it is ours or a cancel.

    This concerns scripts and notebooks, which call the flow. A worker runs it in another way.
    """
    made.__class__ = _QuietFlow
    return made
