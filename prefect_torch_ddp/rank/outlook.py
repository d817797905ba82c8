"""Owns what an exception says about another attempt: bound to fail again, nothing to do with the code, or open. Pure."""

import re
from collections.abc import Iterator

from prefect_torch_ddp.checkpoint.attempts import SupersededError
from prefect_torch_ddp.errors import InvalidParamsError, StorageError
from prefect_torch_ddp.messages import Outlook

# A superseded attempt that began again would fence off its successor.
_HOPELESS = (ImportError, SyntaxError, InvalidParamsError, SupersededError)
_TRANSIENT = (OSError, MemoryError, StorageError)
# A device, a driver or the kernel speaks here, in exceptions that are RuntimeErrors to Python.
_TRANSIENT_TEXT = re.compile(
    r"out of memory|CUDA error|CUDA driver|CUDNN_STATUS|cuDNN error|CUBLAS_STATUS|"
    r"DataLoader worker .* (is killed|exited unexpectedly)",
    re.IGNORECASE | re.DOTALL,
)


def outlook_of(error: BaseException) -> Outlook:
    """Tell what an exception of a rank says about another attempt.

    An ImportError counts where it was raised, or was named as the cause by `raise ... from`: that somewhere before an optional
    module was looked for and not found says nothing. An OSError counts wherever it is in the chain.
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
