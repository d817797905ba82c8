"""What a rank sends to the caller at its end: its failure as a value, or its pickled result."""

import io
import os
import pickle
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from prefect_torch_ddp.errors import COMES_BACK, StorageError, UnpicklableValueError
from prefect_torch_ddp.protocol.events import MAX_TEXT, RankFailure, Retryability
from prefect_torch_ddp.rank.user_code import advise, text_of

# What gloo, NCCL and TCPStore say when a peer goes away; gathered from killed, exited and
# raising peers on torch 2.11 to 2.15.
_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|connection reset by peer|broken pipe|"
    r"gloo/transport|application timeout caused pair closure|nccl (error|communicator)|"
    r"remote process exited|failed to recv, got 0 bytes|"
    r"timed out waiting .*ms for (recv|send) operation|socket closed|"
    r"connectFullMesh failed|failed to connect to .* store",
    re.IGNORECASE,
)
_DISTRIBUTED_ERRORS = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_TRANSIENT = (OSError, MemoryError, StorageError)
_WRONG_PATHS = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""OSErrors that are most often a mistake."""
# Messages of a device, a driver or the kernel, in exceptions that Python calls RuntimeErrors.
_TRANSIENT_TEXT = re.compile(
    r"out of memory|CUDA error|CUDA driver|CUDNN_STATUS|cuDNN error|CUBLAS_STATUS|"
    r"DataLoader worker .* (is killed|exited unexpectedly)",
    re.IGNORECASE | re.DOTALL,
)
MAX_SUMMARY = 2_000
# What torch raises in a rank for an exception in a process that loads for it.
_IN_A_LOADER = re.compile(r"Caught \w+ in DataLoader worker process \d+\.\nOriginal Traceback ")
_RANK = Path(__file__).parents[1]
_OUR_FRAMES = {str(_RANK / name) for name in ("process/main.py", "stages.py")}


def describe(error: BaseException, rank: int, host: str) -> RankFailure:
    """Turn an exception into a value that can be sent to the caller, whatever its class."""
    advise(error)
    summary = _summary_of(error)[:MAX_SUMMARY]
    exit_code = None
    if isinstance(error, SystemExit):
        summary = f"left by sys.exit({error.code!r}) before its function returned"
        exit_code = error.code if isinstance(error.code, int) else int(error.code is not None)
    leaving = isinstance(error, SystemExit | KeyboardInterrupt)
    trace = error.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename in _OUR_FRAMES:
        trace = trace.tb_next  # the user's traceback begins at the user's code
    return RankFailure(
        rank=rank,
        host=host,
        pid=os.getpid(),
        kind="exit" if isinstance(error, SystemExit) else "exception",
        summary=summary,
        is_collateral=is_collateral(error),
        traceback_text="".join(traceback.format_exception(type(error), error, trace))[-MAX_TEXT:],
        exception_type=f"{type(error).__module__}.{type(error).__qualname__}",
        exception_pickle=None if leaving else _pickle_exception(error),
        exit_code=exit_code,
        retryability=retryability_of(error),
    )


def _summary_of(error: BaseException) -> str:
    """Return an exception's class and text; of one in a process that loads, its own."""
    summary = "".join(traceback.format_exception_only(error)).strip()
    if _IN_A_LOADER.search(summary) is None:
        return summary
    after_last_frame = re.split(r"^  File .*\n(?:    .*\n)*", summary, flags=re.MULTILINE)[-1]
    return f"{after_last_frame.strip()} (in a DataLoader worker)"


def _pickle_exception(error: BaseException) -> bytes | None:
    """Pickle an exception if it also unpickles; many classes with own arguments don't."""
    try:
        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)
    except BaseException:  # noqa: BLE001 - user classes refuse in every way; the text survives
        return None
    return data


def is_collateral(error: BaseException) -> bool:
    """Tell whether what went wrong first was a connection to another rank.

    The first exception of the chain decides. A cleanup that fails because its peers are gone
    doesn't turn a cause into a consequence, and user code that wraps a closed connection in
    its own error doesn't turn a consequence into a cause.
    """
    *_, first = _chain(error)
    if type(first).__name__ in _DISTRIBUTED_ERRORS:
        return True
    # A socket error is the user's own network trouble, whatever its text.
    return type(first) is RuntimeError and _PEER_GONE.search(text_of(first)) is not None


def retryability_of(error: BaseException) -> Retryability:
    """Tell what an exception of a rank says about another attempt.

    An ImportError counts where it was raised, or where `raise ... from` names it as the cause:
    code may look for an optional module, not find it, and continue. An OSError counts anywhere in
    the chain.
    """
    if isinstance(error, KeyboardInterrupt):
        return "transient"
    if any(isinstance(link, COMES_BACK) for link in _chain(error, with_context=False)):
        return "hopeless"
    return "transient" if any(map(_is_transient, _chain(error))) else "open"


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, _WRONG_PATHS):
        return False
    if isinstance(error, _TRANSIENT) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and _TRANSIENT_TEXT.search(text_of(error)) is not None


def _chain(error: BaseException, *, with_context: bool = True) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (link.__context__ if with_context else None)


class _HomePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    def reducer_override(self, obj: Any) -> Any:
        # The caller may have no GPU, and can't be given memory of one that a dead process held.
        torch = sys.modules.get("torch")  # whoever returns a tensor has loaded it
        if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            home = obj.detach().cpu()
            if isinstance(obj, torch.nn.Parameter):  # a model that is returned can still be trained
                home = torch.nn.Parameter(home, requires_grad=obj.requires_grad)
            return home.__reduce_ex__(4)
        if torch is not None and isinstance(obj, torch.nn.parallel.DistributedDataParallel):
            msg = (
                "a model in DistributedDataParallel can't leave its rank: return the state_dict() "
                "of the model that it wraps, or have ctx.track or ctx.save keep it"
            )
            raise TypeError(msg)
        return super().reducer_override(obj)


def pickle_value(value: Any, rank: int) -> bytes:
    """Pickle what a rank returned, tensors moved to the CPU."""
    buffer = io.BytesIO()
    try:
        _HomePickler(buffer).dump(value)
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        msg = (
            f"rank {rank} returned a value of type {kind} that can't be pickled: {error}; "
            "return plain data"
        )
        raise UnpicklableValueError(msg) from error
    return buffer.getvalue()
