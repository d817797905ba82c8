"""Elastic determinism on Dask workers that die and come: the number of ranks changes, no bit
does."""

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Client

from prefect_torch_ddp import InvalidParamsError, run_gang
from prefect_torch_ddp.gang import run as launch
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.run import RunAttemptLog
from tests.integration.gang.dying_workers import Workers, dying_workers
from tests.integration.gang.test_restarts import attempts_in
from tests.integration.gang.test_resumed_restarts import RUN_WITH_CONTEXT
from tests.workloads import restarting

if TYPE_CHECKING:
    from prefect_torch_ddp.protocol.events import GangEvent

pytestmark = pytest.mark.timeout(180)


def train(
    client: Client, folder: Path, plan: dict[int, dict[str, Any]], **options: Any
) -> list[dict[str, Any]]:
    """Run the elastic training with four virtual ranks, a checkpoint at each step, as the tasks
    do."""
    storage = DirectoryStorage(folder / "store")

    def arguments(attempt: int) -> tuple[Any, ...]:
        policy = CheckpointParams(every_steps=1, every_s=None)
        config = RankConfig(
            "run",
            attempt,
            "task",
            storage,
            checkpoint=policy,
            determinism="elastic",
            virtual_ranks=4,
        )
        return config, "tests.workloads.elastic:fit", (str(folder), plan)

    attempt_log = RunAttemptLog(storage, "run", knows_steps=True)
    return run_gang(
        client,
        RUN_WITH_CONTEXT,
        args=arguments,
        attempt_log=attempt_log,
        world_size_divides=4,
        **options,
    )


def test_four_then_two_then_one_then_four_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three workers left hold two ranks, as three don't divide four; at the end the SHA-256 is
    that of one undisturbed rank."""
    monkeypatch.setattr(launch, "FULL_SIZE_S", 3.0)
    plan = {
        1: {"step": 3, "how": "wait"},
        2: {"step": 5, "how": "wait"},
        3: {"step": 7, "how": "wait"},
    }
    events: list[GangEvent] = []

    def script(workers: Workers) -> None:
        workers.waiting(1, 4)
        workers.extra[0].kill()
        pids = workers.waiting(2, 2)
        for worker in workers.extra[1:]:
            worker.kill()
        os.kill(pids[0], signal.SIGKILL)  # those workers may hold none of the two ranks
        workers.come_again_to_the_last(3)

    with dying_workers(tmp_path, script) as (client, over):
        values = train(
            client,
            tmp_path,
            plan,
            world_size=4,
            min_world_size=1,
            max_restarts=3,
            on_event=events.append,
        )
        over()
        assert attempts_in(events) == [(1, 4), (2, 2), (3, 1), (4, 4)]
        undisturbed = tmp_path / "undisturbed"
        undisturbed.mkdir()
        assert values == train(client, undisturbed, {}, world_size=1) * 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"world_size": 2, "world_size_divides": 3}, "world_size is 2 and has to divide 3"),
        ({"world_size_divides": 0}, "world_size_divides is 0"),
        (
            {"world_size_divides": 2, "min_world_size": 3},
            "min_world_size is 3, and the number of ranks has to divide 2",
        ),
    ],
)
def test_sizes_that_cannot_divide_are_refused(
    dask_client: Client, options: dict[str, int], says: str
) -> None:
    """Each names the value and what to give."""
    with pytest.raises(InvalidParamsError, match=says):
        run_gang(dask_client, restarting.fail_everywhere, **options)
