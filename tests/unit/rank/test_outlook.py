"""What an exception says about another attempt is a pure decision."""

import pytest

from prefect_torch_ddp.errors import InvalidParamsError, StorageError, SupersededError
from prefect_torch_ddp.rank.failure import retryability_of


class OutOfMemoryError(RuntimeError):
    """Is called as torch's is."""


class MuteError(RuntimeError):
    """Has no text."""

    def __str__(self) -> str:
        """Refuse."""
        raise ZeroDivisionError


def chained(first: BaseException, then: BaseException, *, explicitly: bool) -> BaseException:
    """Raise one out of the handling of the other."""
    try:
        try:
            raise first
        except type(first) as caught:
            if explicitly:
                raise then from caught
            raise then  # noqa: B904 - the implicit chain is what is shown
    except type(then) as error:
        return error


@pytest.mark.parametrize(
    ("error", "retryability"),
    [
        (ValueError("bad"), "open"),
        (RuntimeError("shapes do not match"), "open"),
        (MuteError(), "open"),
        (ModuleNotFoundError("no"), "hopeless"),
        (SyntaxError("no"), "hopeless"),
        (InvalidParamsError("no"), "hopeless"),
        (SupersededError("newer"), "hopeless"),
        (FileNotFoundError("no"), "transient"),
        (TimeoutError("slow"), "transient"),
        (StorageError("down"), "transient"),
        (MemoryError(), "transient"),
        (OutOfMemoryError("CUDA"), "transient"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "transient"),
        (RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed."), "transient"),
        (SystemExit(3), "transient"),
        (chained(ImportError("no"), ValueError("bad"), explicitly=True), "hopeless"),
        (chained(ImportError("no apex here"), ValueError("bad"), explicitly=False), "open"),
        (chained(OSError("gone"), ValueError("no sample"), explicitly=False), "transient"),
        (chained(OSError("gone"), ValueError("no sample"), explicitly=True), "transient"),
    ],
)
def test_outlook(error: BaseException, retryability: str) -> None:
    """Hopeless by its own class or the named cause's; transient by any of its chain's."""
    assert retryability_of(error) == retryability
