"""Real ranks' times: the slow one is named while they train, and where time went adds up."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.utils.data import Dataset

from prefect_torch_ddp import RankContext, read_goodput
from prefect_torch_ddp.records.timing import TimingLine, newest_lines
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.report.ranks import awaited_rank, rank_table
from tests.support.ranks import Died, config_for, train_on
from tests.support.records import assert_adds_up
from tests.support.waiting import wait_until
from tests.workloads import descend, healthy

SLOW_S, NUM_STEPS = 0.02, 100_000
Where = Literal["step", "dataset", "nowhere"]


class Samples(Dataset[torch.Tensor]):
    """Endless ones, each of which takes a while."""

    def __init__(self, sleep_s: float) -> None:
        self._sleep_s = sleep_s

    def __len__(self) -> int:
        return 2 * NUM_STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._sleep_s)
        return torch.full((4,), index / NUM_STEPS)


def train(ctx: RankContext, slow: Where, until: str) -> None:
    """Train until a file appears; rank 1 sleeps, in its steps or its dataset."""
    sleeps = {slow: SLOW_S if ctx.rank == 1 else 0.0}
    model = ctx.wrap(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = ctx.loader(Samples(sleeps.get("dataset", 0.0)), global_batch_size=2)
    for inputs in ctx.steps(loader, epochs=1):
        time.sleep(0.005 + sleeps.get("step", 0.0))
        descend(ctx, optimizer, model(inputs).square().mean())
        if ctx.rank == 0 and Path(until).exists():
            ctx.request_stop("the test has seen enough")


@pytest.mark.parametrize(
    "slow", ["step", "nowhere", pytest.param("dataset", marks=pytest.mark.extended)]
)
def test_the_slow_rank_is_named_while_it_trains(tmp_path: Path, slow: Where) -> None:
    """20 ms a step, within 30 s; equal ranks after as long aren't named."""
    storage, until = DirectoryStorage(tmp_path), tmp_path / "enough"

    def times() -> list[TimingLine]:
        return newest_lines(storage, "run")

    def has_seen_enough() -> bool:
        if slow != "nowhere":
            return awaited_rank(times()) != ""
        return len(times()) > 1 and all(line.num_steps > 300 for line in times())

    with ThreadPoolExecutor(1) as pool:
        config = config_for(tmp_path, None)
        training = pool.submit(train_on, 2, config, train, slow, str(until))
        try:
            wait_until(lambda: training.done() or has_seen_enough(), timeout_s=30.0, what="times")
            assert not training.done()
            first = times()
        finally:
            until.touch()
        training.result()
    if slow == "nowhere":
        assert awaited_rank(first) == awaited_rank(times()) == ""
    else:
        assert all("for rank 1 on" in awaited_rank(lines) for lines in (first, times()))
    cells = [row.split("|") for row in rank_table(times()).splitlines()[2:4]]
    compute, waiting = ([float(row[at].strip(" %")) for row in cells] for at in (6, 7))
    data = [float(row[5].strip(" %")) for row in cells]
    match slow:
        case "step":
            assert compute[1] > 2 * compute[0]
            assert waiting[0] > 50 > waiting[1]
        case "dataset":
            assert data[1] > 50 > data[0]
        case _:
            assert abs(compute[0] - compute[1]) < 10
    assert all("MB" in row[9] for row in cells)


def fit(ctx: RankContext) -> None:
    """Train the healthy workload, slowly."""
    healthy.fit(ctx, _Slow(*healthy.points(96)))


class _Slow(torch.utils.data.TensorDataset):
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
