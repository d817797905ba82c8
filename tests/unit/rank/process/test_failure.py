"""What an exception says, consequence or cause and fit for another attempt, is a pure decision."""

import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._utils import ExceptionWrapper
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.errors import (
    InvalidParamsError,
    StorageError,
    SupersededError,
    UnpicklableValueError,
)
from prefect_torch_ddp.protocol.call import Call
from prefect_torch_ddp.rank.process import main
from prefect_torch_ddp.rank.process.failure import (
    describe,
    is_collateral,
    pickle_value,
    retryability_of,
)
from prefect_torch_ddp.rank.training.agreement import Agreement, Want, end_of, outside_after

GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer "
    "[127.0.0.1]:35522."
)


class OutOfMemoryError(RuntimeError):
    """Is called as torch's is."""


class MuteError(RuntimeError):
    """Has no text."""

    def __str__(self) -> str:
        raise ZeroDivisionError


def caught(*steps: BaseException, explicitly: bool = False) -> BaseException:
    """Raise the exceptions, each while the one before is handled, and return the last."""
    last: BaseException | None = None
    for step in steps:
        if explicitly:
            step.__cause__ = last
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


def test_what_main_defines_and_cannot_be_pickled_is_advised_about() -> None:
    """A spawned DataLoader worker doesn't find it: the note names the way out."""
    squares = type("Squares", (), {"__module__": "__main__"})
    with pytest.raises(pickle.PicklingError) as caught_error:
        pickle.dumps(squares())
    text = describe(caught_error.value, 0, "here").traceback_text
    assert "put the class or function into its own module" in text


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(GLOO), True),
        (ValueError("boom"), False),
        (MuteError(), False),
        (RuntimeError("CUDA out of memory"), False),
        (ConnectionResetError("Connection reset by peer"), False),
        (caught(ValueError("boom"), RuntimeError(GLOO)), False),
        (caught(RuntimeError(GLOO), ValueError("cleanup failed")), True),
    ],
)
def test_the_first_of_the_chain_decides(error: BaseException, *, expected: bool) -> None:
    """A cause whose cleanup loses its peers stays a cause; a wrapped consequence stays one."""
    assert is_collateral(error) is expected


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
        (UnpicklableValueError("a lock"), "hopeless"),
        (FileNotFoundError("no"), "open"),
        (ConnectionResetError("gone"), "transient"),
        (TimeoutError("slow"), "transient"),
        (StorageError("down"), "transient"),
        (MemoryError(), "transient"),
        (OutOfMemoryError("CUDA"), "transient"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "transient"),
        (RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed."), "transient"),
        (SystemExit(3), "open"),
        (caught(ImportError("no"), ValueError("bad"), explicitly=True), "hopeless"),
        (caught(ImportError("no apex here"), ValueError("bad")), "open"),
        (caught(OSError("gone"), ValueError("no sample")), "transient"),
        (caught(OSError("gone"), ValueError("no sample"), explicitly=True), "transient"),
    ],
)
def test_retryability(error: BaseException, retryability: str) -> None:
    """Hopeless by its own class or the named cause's; transient by any of its chain's."""
    assert retryability_of(error) == retryability


def test_the_traceback_begins_at_the_users_code() -> None:
    """Our own frames, which called the function, say nothing to the user."""

    def users_function() -> None:
        msg = "boom"
        raise ValueError(msg)

    try:
        main._run_call(Call(users_function))
    except ValueError as error:
        error.__traceback__ = error.__traceback__.tb_next  # this test's own frame
        text = describe(error, 0, "a").traceback_text
    assert "users_function" in text
    assert "main.py" not in text


def test_an_error_in_a_loaders_worker_is_named_by_its_own_text() -> None:
    """Of more than a line too. The worker's number differs from attempt to attempt."""
    msg = "sample 77 is corrupt:\n    its checksum differs"
    raised = caught(ValueError(msg))
    info = type(raised), raised, raised.__traceback__
    wrapped = ExceptionWrapper(info, where="in DataLoader worker process 3")
    with pytest.raises(ValueError, match="Caught ValueError in DataLoader") as reraised:
        wrapped.reraise()
    failure = describe(reraised.value, 0, "a")
    assert failure.summary == f"ValueError: {msg} (in a DataLoader worker)"
    assert "Caught ValueError in DataLoader worker process 3" in failure.traceback_text


def test_a_tail_of_one_sample_names_drop_last_where_batch_norm_refuses_it() -> None:
    """Beside torch's error, which says nothing of batches."""
    with RankContext.local() as ctx, pytest.raises(ValueError, match="more than 1 val") as caught:
        dataset = TensorDataset(torch.ones(5, 3))
        for (x,) in ctx.steps(ctx.loader(dataset, global_batch_size=4), epochs=1):
            nn.BatchNorm1d(3)(x)
    assert "pass drop_last=True to ctx.loader" in describe(caught.value, 0, "a").summary


@pytest.mark.parametrize("attribute", ["module", "no_sync"])
def test_what_one_rank_has_not_is_advised_about_once(attribute: str) -> None:
    """Torch's error that comes only on one rank gets one note, in a gang and in a debugger."""
    with pytest.raises(AttributeError) as caught, RankContext.local() as ctx:
        getattr(ctx.wrap(nn.Linear(1, 1)), attribute)
    assert describe(caught.value, 0, "a").summary.count("use the model that you gave") == 1
    assert len(caught.value.__notes__) == 1
    with pytest.raises(AttributeError) as caught, RankContext.local():
        getattr(SimpleNamespace(), attribute)
    assert not hasattr(caught.value, "__notes__"), "that of another object"


def test_a_model_in_ddp_is_refused_where_it_is_returned() -> None:
    """Within a value too: the caller couldn't rebuild it, and would say init_process_group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        value = {"model": DistributedDataParallel(nn.Linear(1, 1))}
    finally:
        dist.destroy_process_group()
    says = r"rank 1 .* return the state_dict\(\) of the model that it wraps, or have ctx\.track"
    with pytest.raises(UnpicklableValueError, match=says):
        pickle_value(value, 1)


def test_the_loss_of_the_store_is_no_hang_and_no_cause() -> None:
    """Rank 0, which serves it, died: the ranks that wait for an agreement fail, and aren't
    blamed."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    agreement = Agreement(0, 2, outside_after(0))
    del server
    with pytest.raises(RuntimeError) as caught:
        agreement.begin(outside_after(0), end_of(1), end_of(9), Want.STOP)
    agreement.close(failed=True)
    dist.destroy_process_group()
    assert is_collateral(caught.value)
