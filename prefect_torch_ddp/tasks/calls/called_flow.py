"""How our own flows are called and end: arguments are checked first, and a cancel is a state."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from prefect import Flow
from prefect.logging import get_run_logger
from pydantic import ValidationError

from prefect_torch_ddp.blocks import is_block, resolve_source, resolve_storage
from prefect_torch_ddp.checkpoint.resume_point import parse_resume_from
from prefect_torch_ddp.errors import InvalidParamsError, PrefectTorchDdpError, TaskCancelled
from prefect_torch_ddp.params import TrainParams
from prefect_torch_ddp.rank.link import current_link
from prefect_torch_ddp.records.run_record import is_choice, run_ids
from prefect_torch_ddp.refusals import in_words
from prefect_torch_ddp.server import check_embedded_server
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.calls.submitting import PREFECTS
from prefect_torch_ddp.tasks.cancel.left_tasks import SIGNALS
from prefect_torch_ddp.tasks.cancel.states import cancel_in_words, flow_cancelled
from prefect_torch_ddp.tasks.workload import checked_workload
from prefect_torch_ddp.tracking.trackers.known import check_trackers

P = ParamSpec("P")
R = TypeVar("R")


class _CheckedFlow(Flow[P, R]):
    refuse: Callable[..., None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current_link().is_of_a_rank:
            msg = (
                f"{self.name} is called by a rank, which imports the module of this call: write "
                'the call below `if __name__ == "__main__":`'
            )
            raise InvalidParamsError(msg)
        check_embedded_server()  # first, since `refuse` may make the storage's folder
        if self.refuse is not None and not kwargs.get("return_state"):
            self.refuse(*args, **kwargs)
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


def refuse_early(*given: Any, **named: Any) -> None:
    """Refuse what is seen to be wrong here, before Prefect makes a run of train_flow's call.

    `Run.from_params` refuses the same and more: what only a network or a Prefect server knows.

    Args:
        given: the call's arguments: a TrainParams, or what Prefect makes one of.
        named: the same by name; with them options of Prefect's.

    Raises:
        InvalidParamsError, StorageError: something given can't work.
    """
    params = _only_params(given, named)
    checked_workload(params)
    storage = None if is_block(params.storage) else resolve_storage(params.storage)
    if params.source is not None and not is_block(params.source):
        resolve_source(params.source)
    if storage is not None:
        check_trackers(params.trackers, storage)
        if storage.local_folder is not None:
            _refuse_lost(params.resume_from, storage)
            storage.check_writable()


def _refuse_lost(reference: str | None, storage: Storage) -> None:
    """Refuse the id of a run that isn't there or has saved nothing."""
    if reference is None or is_choice(reference) or "/runs/" in reference:
        return
    try:
        parse_resume_from(reference, storage, resolve_storage).find()
    except InvalidParamsError as error:
        near = difflib.get_close_matches(reference, run_ids(storage), 1)
        if not near or near[0] == reference:
            raise
        msg = f"{error}; did you mean {near[0]}?"
        raise InvalidParamsError(msg) from None


def _only_params(given: Sequence[Any], named: Mapping[str, Any]) -> TrainParams:
    values = [*given, *(named[name] for name in named if name == "params")] or [{}]
    others = sorted(named.keys() - PREFECTS - {"params"})
    if others or len(values) > 1 or not isinstance(values[0], TrainParams | Mapping):
        wrong = f"has no argument {others[0]}" if others else "takes one TrainParams"
        like = 'train_flow(TrainParams(workload="my_workload", world_size=2))'
        msg = f"train_flow {wrong}: write {like}"
        raise InvalidParamsError(msg)
    try:
        return TrainParams.model_validate(values[0])
    except ValidationError as error:
        raise InvalidParamsError(in_words(error, TrainParams)) from error
