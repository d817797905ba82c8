"""Owns the decision whether a rank's exception is a cause or the consequence of another rank's
failure. Pure.

Owns what an exception says about another attempt: bound to fail again, nothing to do with the
code, or open. Pure.

Owns how a rank's return value is sent home.
"""

import io
import re
import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle

from prefect_torch_ddp.errors import (
    InvalidParamsError,
    StorageError,
    SupersededError,
    UnpicklableValueError,
)
from prefect_torch_ddp.protocol.events import Retryability

# What gloo, NCCL and TCPStore say when a peer goes away; gathered from killed, exited and
# raising peers on torch 2.11 to 2.15.
_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|connection reset by peer|broken pipe|gloo/transport|"
    r"application timeout caused pair closure|nccl (error|communicator)|remote process exited|"
    r"failed to recv, got 0 bytes|timed out waiting .*ms for (recv|send) operation|socket closed|"
    r"connectFullMesh failed|failed to connect to .* store",
    re.IGNORECASE,
)
_DISTRIBUTED_ERRORS = {"DistBackendError", "DistNetworkError", "DistStoreError"}


def is_collateral(error: BaseException) -> bool:
    """Tell whether what went wrong first was a connection to another rank.

    The first exception of the chain decides: a cleanup that fails because its peers are gone
    doesn't turn a cause into a consequence, and user code that wraps a closed connection in an
    error of its own doesn't turn a consequence into a cause.
    """
    first = error
    seen = {id(first)}
    while (before := first.__cause__ or first.__context__) is not None and id(before) not in seen:
        seen.add(id(before))
        first = before
    if type(first).__name__ in _DISTRIBUTED_ERRORS:
        return True
    # The user's own network trouble (a requests or socket error) is his, whatever its text.
    return type(first) is RuntimeError and _PEER_GONE.search(_text(first)) is not None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - an argument's own __str__ may raise anything
        return ""


# A superseded attempt that began again would fence off its successor.
_HOPELESS = (ImportError, SyntaxError, InvalidParamsError, SupersededError)
_TRANSIENT = (OSError, MemoryError, StorageError)
# A device, a driver or the kernel speaks here, in exceptions that are RuntimeErrors to Python.
_TRANSIENT_TEXT = re.compile(
    r"out of memory|CUDA error|CUDA driver|CUDNN_STATUS|cuDNN error|CUBLAS_STATUS|"
    r"DataLoader worker .* (is killed|exited unexpectedly)",
    re.IGNORECASE | re.DOTALL,
)


def retryability_of(error: BaseException) -> Retryability:
    """Tell what an exception of a rank says about another attempt.

    An ImportError counts where it was raised, or was named as the cause by `raise ... from`:
    that somewhere before an optional module was looked for and not found says nothing. An
    OSError counts wherever it is in the chain.
    """
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return "transient"
    if any(isinstance(link, _HOPELESS) for link in _chain(error, with_context=False)):
        return "hopeless"
    if any(_is_transient(link) for link in _chain(error, with_context=True)):
        return "transient"
    return "open"


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, _TRANSIENT) or type(error).__name__ == "OutOfMemoryError":
        return True
    try:
        return isinstance(error, RuntimeError) and _TRANSIENT_TEXT.search(str(error)) is not None
    except Exception:  # noqa: BLE001 - a class's own __str__ may raise anything
        return False


def _chain(error: BaseException, *, with_context: bool) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (link.__context__ if with_context else None)


class _HomePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    def reducer_override(self, obj: Any) -> Any:
        # The caller may have no GPU, and must not be handed memory of one that a dead process
        # held.
        torch = sys.modules.get("torch")  # whoever returns a tensor has loaded it
        if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            return obj.detach().cpu().__reduce_ex__(4)
        return super().reducer_override(obj)


def pickle_value(value: Any, rank: int) -> bytes:
    """Pickle what a rank returned, tensors moved to the CPU.

    Raises:
        UnpicklableValueError: names the rank and the type.
    """
    buffer = io.BytesIO()
    try:
        _HomePickler(buffer).dump(value)
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        msg = f"rank {rank} returned a value of type {kind} that can't be pickled: {error}; return plain data"
        raise UnpicklableValueError(msg) from error
    return buffer.getvalue()
