"""The records of ranks have their samples, and times that name the slow rank."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from distributed import Client
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext, read_ledger, run_gang
from prefect_torch_ddp.protocol.events import GangEvent, LogLine
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.records.timing import newest_lines
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.report.page.ranks import awaited_rank, rank_table
from prefect_torch_ddp.tracking.attempt_log import RunAttemptLog
from tests.support.gangs import RUN_WITH_CONTEXT
from tests.support.ranks import config_for, train_on
from tests.support.waiting import wait_until
from tests.unit.data.test_none_samples import broken, drop
from tests.workloads import descend

SLOW_S = 0.02


def train(ctx: RankContext, until: str) -> None:
    """Train until a file appears; rank 1 sleeps in its steps."""
    model = ctx.wrap(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.rand(200_000, 4))
    for (inputs,) in ctx.steps(ctx.loader(data, global_batch_size=2), epochs=1):
        time.sleep(SLOW_S * ctx.rank)
        descend(ctx, optimizer, model(inputs).square().mean())
        if ctx.rank == 0 and Path(until).exists():
            ctx.request_stop("the test has seen enough")


def test_the_slow_rank_is_named_while_it_trains(tmp_path: Path) -> None:
    """A rank that is 20 ms slower in each step is named within 30 s."""
    storage, until = DirectoryStorage(tmp_path), tmp_path / "enough"

    def names_it() -> bool:
        return "for rank 1 on" in awaited_rank(newest_lines(storage, "run"))

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train_on, 2, config_for(tmp_path, None), train, str(until))
        try:
            wait_until(lambda: training.done() or names_it(), timeout_s=30.0, what="times")
            assert not training.done()
        finally:
            until.touch()
        training.result()
    assert names_it()
    table = rank_table(newest_lines(storage, "run")).splitlines()
    cells = [row.split("|") for row in table[2:4]]
    compute, waiting = ([float(row[at].strip(" %")) for row in cells] for at in (6, 7))
    assert compute[1] > 2 * compute[0]
    assert waiting[0] > 50 > waiting[1]
    assert all("MB" in row[9] for row in cells)


def lengths(words: list[tuple[torch.Tensor]]) -> list[int]:
    """Collate samples to the numbers in them."""
    return [int(number) for (number,) in words]


def test_the_ids_come_with_the_batch_through_worker_processes(tmp_path: Path) -> None:
    """The user's collate function doesn't see the ids."""
    with RankContext.local(storage=tmp_path, ledger=True) as ctx:
        options: dict[str, Any] = {"num_workers": 2, "collate_fn": lengths}
        loader = ctx.loader(TensorDataset(torch.arange(11)), global_batch_size=4, **options)
        seen = [number for batch in ctx.steps(loader, epochs=1) for number in batch]
        assert [number for batch in loader for number in batch] == seen
    assert sorted(seen) == list(range(11))
    assert str(read_ledger(tmp_path, "local")) == "epoch 1: 11 samples, each once"
    # More than one part if the worker processes take long to start.
    parts = sorted((tmp_path / "runs/local/ledger/rank-00000").iterdir())
    lines = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    assert [sample for line in lines for sample in line.get("samples", [])] == seen


def test_a_sample_that_collate_fn_left_out_is_missing_in_the_ledger(tmp_path: Path) -> None:
    """The records name the samples on which a single rank trained."""
    with RankContext.local(storage=tmp_path, ledger=True) as ctx:
        loader = ctx.loader(broken(), global_batch_size=8, collate_fn=drop)
        for batch in ctx.steps(loader, epochs=1):
            for (images, labels), weight in ctx.micro_batches(batch, max_samples=4):
                assert len(images) == len(labels) == 7 * weight
    assert str(read_ledger(tmp_path, "local")).startswith("epoch 1: 7 samples of 8; 1 missing (1)")


def report_a_step(ctx: RankContext) -> None:
    """Report one step, and end well."""
    for _ in ctx.steps(total=1):
        ctx.report(loss=1.0)


def test_what_ranks_could_not_write_is_not_said_of_killed_ones(
    dask_client: Client, tmp_path: Path
) -> None:
    """The times of ranks that end well can't be written; the warning says what is lost."""
    storage, said = DirectoryStorage(tmp_path), list[str]()
    storage.write("runs/run/timing", b"a file where their folder should be")

    def arguments(attempt: int) -> tuple[Any, ...]:
        return RankConfig("run", attempt, "task", storage), report_a_step

    def listen(event: GangEvent) -> None:
        if isinstance(event, LogLine):
            said.append(event.text)

    log = RunAttemptLog(storage, "run", knows_steps=True)
    about = {"args": arguments, "attempt_log": log, "on_event": listen}
    run_gang(dask_client, RUN_WITH_CONTEXT, world_size=2, **about)
    (lost,) = [line for line in said if line.startswith("records ")]
    assert lost.startswith("records that ranks had not written are lost: ")
    assert "runs/run/timing/rank-0000" in lost
