"""What a training without processes leaves in its ledger."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext, read_ledger
from prefect_torch_ddp.errors import StorageError
from tests.support.forwarding import WatchedStorage


def test_loops_that_were_left_are_no_error(tmp_path: Path) -> None:
    """A break and an early stop leave epochs unfinished; the ledger says so, and is clean."""
    with RankContext.local(storage=tmp_path, ledger=True) as ctx:
        loader = ctx.loader(TensorDataset(torch.arange(10)), global_batch_size=3, drop_last=True)
        for _ in ctx.steps(loader, epochs=3):
            if ctx.step == 5:
                break
        for _ in ctx.steps(loader, epochs=3):
            if ctx.step == 9:
                ctx.request_stop("enough")
    assert str(read_ledger(tmp_path, "local")).splitlines() == [
        "epoch 1: 9 samples, each once; 1 left out by drop_last",
        "epoch 2: 6 samples of 10, each once; not finished",
        "epoch 3: 9 samples, each once; 1 left out by drop_last",
        "epoch 4: 3 samples of 10, each once; not finished",
    ]


def test_another_batch_size_in_the_middle_of_an_epoch_is_told(tmp_path: Path) -> None:
    """Samples that are seen twice by it are named, as the log's warning says."""
    dataset = TensorDataset(torch.arange(10.0))
    for size, epochs in ((3, 1), (4, 1)):
        with RankContext.local(storage=tmp_path, ledger=True) as ctx:
            ctx.track(model=torch.nn.Linear(1, 1))
            for _ in ctx.steps(
                ctx.loader(dataset, global_batch_size=size, shuffle=False), epochs=epochs
            ):
                if ctx.attempt == 1 and ctx.step == 3:
                    break
    assert str(read_ledger(tmp_path, "local")) == "epoch 1: 10 samples; 1 repeated (8 in step 4)"


def test_a_ledger_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """A run that is to be proven doesn't end well without its proof; the metrics are written
    all the same."""
    (tmp_path / "runs/local").mkdir(parents=True)
    (tmp_path / "runs/local/ledger").write_text("not a folder")
    with (
        pytest.raises(StorageError, match="3 records of ledger could not be written"),
        RankContext.local(storage=tmp_path, ledger=True) as ctx,
    ):
        for _ in ctx.steps(
            ctx.loader(TensorDataset(torch.arange(4)), global_batch_size=4), epochs=1
        ):
            ctx.report(loss=1.0)
    assert list((tmp_path / "runs/local/metrics/rank-00000").iterdir())


@pytest.mark.parametrize("fails", [False, True])
def test_a_bug_is_not_taken_for_trouble_with_the_storage(tmp_path: Path, fails: bool) -> None:
    """It is raised as it is, unless the training's own error is on its way; the metrics are
    written all the same."""

    def before(request: str) -> None:
        if re.match("write.* runs/local/ledger/", request):
            raise ValueError(request)

    storage = WatchedStorage(tmp_path, before)
    with (
        pytest.raises(KeyError if fails else ValueError),
        RankContext.local(storage=storage, ledger=True) as ctx,
    ):
        loader = ctx.loader(TensorDataset(torch.arange(4)), global_batch_size=4)
        for _ in ctx.steps(loader, epochs=1):
            ctx.report(loss=1.0)
        if fails:
            raise KeyError
    assert list((tmp_path / "runs/local/metrics/rank-00000").iterdir())
