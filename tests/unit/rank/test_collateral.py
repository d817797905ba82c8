"""Whether an exception is a consequence is a pure decision over its chain."""

import pytest

from prefect_torch_ddp.rank.failure import is_collateral

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:35522."


def caught(*steps: BaseException) -> BaseException:
    """Raise the exceptions, each while the one before is handled, and return the last."""
    last: BaseException | None = None
    for step in steps:
        try:
            try:
                if last is not None:
                    raise last
            finally:
                raise step
        except BaseException as error:  # noqa: BLE001
            last = error
    assert last is not None
    return last


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([RuntimeError(GLOO)], True),
        ([ValueError("boom")], False),
        ([RuntimeError("CUDA out of memory")], False),
        ([ConnectionResetError("Connection reset by peer")], False),
        ([ValueError("boom"), RuntimeError(GLOO)], False),
        ([RuntimeError(GLOO), ValueError("cleanup failed")], True),
    ],
)
def test_the_first_of_the_chain_decides(steps: list[BaseException], expected: bool) -> None:
    """A cause whose cleanup loses its peers stays a cause; a consequence that user code wraps
    stays a consequence."""
    assert is_collateral(caught(*steps)) is expected
