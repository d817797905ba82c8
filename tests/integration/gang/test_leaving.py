"""Workers that leave in good order while a gang trains: all ranks save, and it moves."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from distributed import Client

from prefect_torch_ddp import run_gang
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.protocol.events import GangEvent
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.run import RunAttemptLog
from tests.integration.gang.test_cancel import saved_steps
from tests.support.gangs import RUN_WITH_CONTEXT, attempts_in, own_cluster, workers_of
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import hanging
from tests.workloads.tiny import dask_worker_of

pytestmark = pytest.mark.extended


def begun(folder: Path, attempt: int, rank: int) -> tuple[int, int]:
    """Wait until a rank trains; return its pid, and the first step of its attempt."""
    wait_until(lambda: any(folder.glob(f"{attempt}-{rank}-from-*[0-9]")), HANG_S)
    (mark,) = folder.glob(f"{attempt}-{rank}-from-*[0-9]")
    return int(mark.read_text()), int(mark.name.rpartition("-")[2])


def retire_worker_of(client: Client, rank_pid: int) -> None:
    """Retire the worker that a rank is on."""
    pid = dask_worker_of(rank_pid)
    (address,) = (each for each, worker in workers_of(client).items() if worker.pid == pid)
    assert list(client.retire_workers([address])) == [address]


def test_a_retired_worker_costs_no_restart(tmp_path: Path) -> None:
    """First rank 0's worker, then the other's: all ranks stop after one step and save it, and the
    gang moves to the workers that are left, though it may not be restarted."""
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
            retire_worker_of(client, pid)
            _, first = begun(folder, attempt + 1, rank)
            resumed_from.append(first - 1)
            assert not psutil.pid_exists(pid)
        (folder / "enough").touch()
        last, _ = gang.result(HANG_S)
    assert attempts_in(events) == [(1, 2), (2, 2), (3, 2)]
    assert saved_steps(tmp_path) == [*resumed_from, last]
