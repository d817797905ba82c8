"""Workers that leave in good order while a gang trains: all ranks save, and it moves."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from distributed import Client, Worker

from prefect_torch_ddp import run_gang
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.run import RunAttemptLog
from tests.integration.gang.test_cancel import saved_steps
from tests.support.gangs import RUN_WITH_CONTEXT, attempts_in, begun, own_cluster, workers_of
from tests.support.waiting import HANG_S
from tests.workloads import hanging
from tests.workloads.tiny import dask_worker_of

if TYPE_CHECKING:
    from prefect_torch_ddp.protocol.events import GangEvent

pytestmark = pytest.mark.extended


def worker_of(client: Client, rank_pid: int) -> str:
    """Return the address of the worker that a rank is on."""
    pid = dask_worker_of(rank_pid)
    (address,) = (each for each, worker in workers_of(client).items() if worker.pid == pid)
    return address


def _reach_lifetime(dask_worker: Worker) -> None:
    # What Dask's own timer does, of `dask worker --lifetime`.
    dask_worker.loop.add_callback(dask_worker.close_gracefully, reason="worker-lifetime-reached")


def test_a_worker_that_leaves_costs_no_restart(tmp_path: Path) -> None:
    """First rank 0's worker is retired, then the other's reaches its lifetime: all ranks stop after
    one step and save it, and the gang moves to the workers that are left, though it may not be
    restarted."""
    events: list[GangEvent] = []
    storage, folder = DirectoryStorage(tmp_path / "store"), tmp_path / "marks"
    folder.mkdir()
    only_at_a_stop = CheckpointParams(every_s=None, keep_last=9)

    def arguments(attempt: int) -> tuple[object, ...]:
        config = RankConfig("run", attempt, "task", storage, checkpoint=only_at_a_stop)
        return config, hanging.train_until_enough, (str(folder),)

    with own_cluster(4) as (_, client), ThreadPoolExecutor(1) as pool:
        gang = pool.submit(
            run_gang,
            client,
            RUN_WITH_CONTEXT,
            args=arguments,
            world_size=2,
            attempt_log=RunAttemptLog(storage, "run", knows_steps=True),
            on_event=events.append,
        )
        resumed_from = []
        for attempt, rank in ((1, 0), (2, 1)):
            pid, _ = begun(folder, attempt, rank)
            leaves = [worker_of(client, pid)]
            if attempt == 1:
                assert list(client.retire_workers(leaves)) == leaves
            else:
                client.run(_reach_lifetime, workers=leaves)
            _, first = begun(folder, attempt + 1, rank)
            resumed_from.append(first - 1)
            assert not psutil.pid_exists(pid)
        (folder / "enough").touch()
        last, _ = gang.result(HANG_S)
    assert attempts_in(events) == [(1, 2), (2, 2), (3, 2)]
    assert saved_steps(tmp_path) == [*resumed_from, last]
