"""The ledger of real ranks and data workers: each sample once, over kills and resumes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext, read_ledger
from prefect_torch_ddp.rank.config import RankConfig
from tests.support.ranks import Died, config_for, train_on
from tests.workloads import healthy

NUM_SAMPLES, EPOCHS = 33, 4

EACH_ONCE = [f"epoch {epoch}: {NUM_SAMPLES} samples, each once" for epoch in range(1, EPOCHS + 1)]


def ledger_config(folder: Path, **options: Any) -> RankConfig:
    """Describe a training with a ledger; claims the run's next attempt."""
    return config_for(folder, options=options, ledger=True)


def fit(ctx: RankContext) -> str:
    """Train the healthy workload; return what its weights hash to."""
    value: str = healthy.fit(ctx, TensorDataset(*healthy.points(NUM_SAMPLES)))["sha256"]
    return value


def test_a_training_killed_twice_and_resumed_at_other_sizes_is_clean(tmp_path: Path) -> None:
    """2 ranks, then 3, then 1: each sample once an epoch, told from what survived; and a lost
    part is missed."""
    first = ledger_config(tmp_path, die_at=5, die_on=1, die_after=4)
    assert Died(-9) in train_on(2, first, fit)
    assert Died(-9) in train_on(3, ledger_config(tmp_path, die_at=9, die_on=0, die_after=8), fit)
    under_way = read_ledger(tmp_path, "run")
    assert under_way.is_clean, str(under_way)
    assert not under_way.epochs[-1].is_finished
    assert under_way.epochs[1].is_finished
    train_on(1, ledger_config(tmp_path), fit)

    report = read_ledger(str(tmp_path), "run")
    assert report.is_clean
    assert str(report).splitlines() == EACH_ONCE
    assert report.attempts == {1: 2, 2: 3, 3: 1}

    lost = next(
        path
        for path in sorted((tmp_path / "runs/run/ledger/rank-00001").iterdir())
        if path.name.startswith("000001")
    )
    lost.unlink()
    assert not read_ledger(tmp_path, "run").is_clean


def test_a_ledger_changes_no_bit(tmp_path: Path) -> None:
    """The weights are those of the run without one, which leaves none."""
    plain = replace(ledger_config(tmp_path / "plain"), ledger=False)
    expected = train_on(2, plain, fit)
    assert train_on(2, ledger_config(tmp_path / "kept"), fit) == expected
    assert not (tmp_path / "plain/runs/run/ledger").exists()
    assert "has no ledger" in str(read_ledger(tmp_path / "plain", "run"))


def test_a_training_on_shards_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """Killed in the middle of a shard: the samples, and what was drawn for them, are those of
    the undisturbed run, each once."""
    options, death = {"sharded": True}, {1: {"step": 4, "how": "SIGKILL"}}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = train_on(2, ledger_config(whole, **options), healthy.fit_elastic)
    killed = ledger_config(broken, **options), healthy.fit_elastic, str(tmp_path), death
    assert Died(-9) in train_on(2, *killed)
    assert train_on(2, ledger_config(broken, **options), healthy.fit_elastic) == expected
    report = read_ledger(broken, "run")
    each_once = [f"epoch {n}: {healthy.NUM_SAMPLES} samples, each once" for n in (1, 2)]
    assert str(report).splitlines() == each_once
    assert report.attempts == {1: 2, 2: 2}


def lengths(words: list[tuple[torch.Tensor]]) -> list[int]:
    """Collate samples to the numbers in them."""
    return [int(number) for (number,) in words]


def test_the_ids_come_with_the_batch_through_worker_processes(tmp_path: Path) -> None:
    """Through the user's own collate function, which sees nothing of it; nor does a pass for
    evaluation."""
    with RankContext.local(storage=tmp_path, ledger=True) as ctx:
        options: dict[str, Any] = {"num_workers": 2, "collate_fn": lengths}
        loader = ctx.loader(TensorDataset(torch.arange(11)), global_batch_size=4, **options)
        seen = [number for batch in ctx.steps(loader, epochs=1) for number in batch]
        assert [number for batch in loader for number in batch] == seen
    assert sorted(seen) == list(range(11))
    assert str(read_ledger(tmp_path, "local")) == "epoch 1: 11 samples, each once"
    (part,) = (tmp_path / "runs/local/ledger/rank-00000").iterdir()
    lines = [json.loads(line) for line in part.read_text().splitlines()]
    assert [sample for line in lines for sample in line.get("samples", [])] == seen
