"""What a training without processes leaves in its ledger; damage is found."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext, read_ledger
from prefect_torch_ddp.errors import StorageError


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


def test_a_damaged_line_is_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning names the object, and its samples are missing."""
    with RankContext.local(storage=tmp_path, ledger=True) as ctx:
        for _ in ctx.steps(
            ctx.loader(TensorDataset(torch.arange(4)), global_batch_size=2, shuffle=False), epochs=1
        ):
            pass
    (part,) = (tmp_path / "runs/local/ledger/rank-00000").iterdir()
    part.write_bytes(part.read_bytes().replace(b'"samples":[2,3]', b'"samples":[2,'))
    assert (
        str(read_ledger(tmp_path, "local"))
        == "epoch 1: 2 samples of 4; 2 missing (2, 3); not finished"
    )
    assert "000001-000001.jsonl is damaged and left out" in caplog.text


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


def test_virtual_ranks_are_on_record_too(tmp_path: Path) -> None:
    """Under elastic determinism a batch comes in parts; all their samples are in the line of
    its step."""
    options: dict[str, Any] = {"determinism": "elastic", "virtual_ranks": 4}
    with RankContext.local(storage=tmp_path, ledger=True, **options) as ctx:
        model = ctx.wrap(torch.nn.Linear(1, 1))
        loader = ctx.loader(TensorDataset(torch.arange(10.0)[:, None]), global_batch_size=7)
        for batch in ctx.steps(loader, epochs=2):
            model.zero_grad()
            for (x,), weight in ctx.micro_batches(batch):
                (model(x).mean() * weight).backward()
    assert str(read_ledger(tmp_path, "local")).splitlines() == [
        f"epoch {epoch}: 10 samples, each once" for epoch in (1, 2)
    ]
