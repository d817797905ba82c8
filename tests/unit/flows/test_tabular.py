"""The tabular workload, trained on a few trips."""

from pathlib import Path

import pytest

from flows import tabular
from flows.generated import trips
from prefect_torch_ddp import RankContext

NUM_TRIPS = 41


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Write trips as `prepare` leaves them, none of which is held out."""
    rows = trips(0, 0).dropna()
    rows = rows[(rows["distance"] > 0) & (rows["fare"] > 0)][:NUM_TRIPS]
    folder = tmp_path / "data"
    folder.mkdir()
    rows.assign(is_test=False).to_parquet(folder / "part-000000.parquet")
    return folder


@pytest.mark.parametrize(
    ("global_batch_size", "num_steps"),
    [(NUM_TRIPS - 1, 1), (10, 4), (NUM_TRIPS, 1), (100, 1)],
    ids=["a tail of one", "four full", "whole", "more than there are"],
)
def test_an_epoch_of_any_batch_size_is_trained(
    global_batch_size: int, num_steps: int, data: Path
) -> None:
    """A single trip that is left at an epoch's end can't be normalised: the tail is left out."""
    options = {"global_batch_size": global_batch_size, "epochs": 2}
    with RankContext.local(data=data, options=options) as ctx:
        assert tabular.train(ctx) == {"num_trips": NUM_TRIPS}
        assert ctx.step == 2 * num_steps
