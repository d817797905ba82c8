"""An attempt that counted as dead, and awakes when a newer one has trained to the end."""

from pathlib import Path

import pytest
import torch
from distributed import LocalCluster
from prefect import flow
from prefect.states import State
from prefect_dask import DaskTaskRunner
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext, ddp_task
from prefect_torch_ddp.records.run_record import RunRecord, list_run_records
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.extended,
    pytest.mark.usefixtures("prefect_api"),
]


def held_up(ctx: RankContext, folder: str, end: str) -> int:
    """Train four epochs of five steps; the first attempt is held up after step 8, until told."""
    model = ctx.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    x = torch.arange(20.0).unsqueeze(1)
    loader = ctx.loader(TensorDataset(x), global_batch_size=4)
    for (inputs,) in ctx.steps(loader, epochs=4):
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()
        if ctx.attempt == 1 and ctx.step == 8:
            (Path(folder) / "held up").touch()
            wait_until((Path(folder) / "may go on").exists)
            if end == "fails":
                msg = "its connection was lost"
                raise OSError(msg)
    return ctx.attempt


@pytest.mark.parametrize("end", ["goes on", "fails"])
def test_a_superseded_attempt_changes_neither_record_nor_report(
    dask_cluster: LocalCluster, tmp_path: Path, end: str
) -> None:
    """They stay those of the newer attempt, though the older one's end is said last."""
    storage = DirectoryStorage(tmp_path / "store")
    options = {"world_size": 1, "storage": storage.uri, "run_key": "k", "stop_grace_s": 1}
    train = ddp_task(**options, checkpoint={"every_steps": 5, "every_s": None})(held_up)

    def found() -> tuple[RunRecord, bytes]:
        (record,) = list_run_records(storage)
        return record, storage.read(f"runs/{record.run_id}/report.html")

    @flow(task_runner=DaskTaskRunner(address=dask_cluster.scheduler_address))
    def twice() -> State[int]:
        first = train.submit(str(tmp_path), end)
        wait_until((tmp_path / "held up").exists)
        assert train.submit(str(tmp_path), end).result() == 2
        wait_until(lambda: found()[0].state == "completed")
        before = found()
        (tmp_path / "may go on").touch()
        first.wait()
        assert found() == before
        return first.state

    state = twice(return_state=True).result(raise_on_failure=False)
    assert state.is_failed()
    if end == "goes on":
        assert "the newer attempt counts" in state.message
    (record,) = list_run_records(storage)
    assert [attempt.attempt for attempt in record.attempts] == [1, 2]
