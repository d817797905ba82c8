"""Real ranks' times: the slow one is named while they train, and where time went adds up."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext, read_goodput
from prefect_torch_ddp.records.timing import newest_lines
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.report.ranks import awaited_rank, rank_table
from tests.support.ranks import Died, config_for, train_on
from tests.support.records import assert_adds_up
from tests.support.waiting import wait_until
from tests.workloads import descend, healthy

SLOW_S = 0.02


def train(ctx: RankContext, until: str) -> None:
    """Train until a file appears; rank 1 sleeps in its steps."""
    model = ctx.wrap(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.rand(200_000, 4))
    for (inputs,) in ctx.steps(ctx.loader(data, global_batch_size=2), epochs=1):
        time.sleep(0.005 + SLOW_S * ctx.rank)
        descend(ctx, optimizer, model(inputs).square().mean())
        if ctx.rank == 0 and Path(until).exists():
            ctx.request_stop("the test has seen enough")


def test_the_slow_rank_is_named_while_it_trains(tmp_path: Path) -> None:
    """20 ms a step, within 30 s."""
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


def fit(ctx: RankContext) -> None:
    """Train the healthy workload, slowly."""
    healthy.fit(ctx, _Slow(*healthy.points(96)))


class _Slow(TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        time.sleep(0.01)
        return super().__getitem__(index)


def test_the_time_of_a_killed_training_adds_up(tmp_path: Path) -> None:
    """Two ranks, one of which dies in step 15; the next two resume from step 10."""
    killed = config_for(tmp_path, 5, options={"die_at": 15, "die_on": 1, "die_after": 10})
    began_s = time.monotonic()
    assert Died(-9) in train_on(2, killed, fit)
    train_on(2, config_for(tmp_path, 5), fit)
    found, took_s = read_goodput(tmp_path, "run"), time.monotonic() - began_s
    assert_adds_up(found, num_attempts=2, at_most_s=took_s)
    assert found.data_s > 0.01 * 4 * 96 / 2 * 0.9
    assert found.steps_s > 0
    assert found.starting_s > 0
