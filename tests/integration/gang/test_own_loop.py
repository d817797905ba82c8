"""A training in a loop of its own, without ctx.steps: what it resumes from is the newest
checkpoint that it asked for."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from prefect_torch_ddp import run_gang
from prefect_torch_ddp.checkpoint.keys import checkpoints_prefix, manifest_key
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.checkpoint.restore import find_resumable
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.records.metrics import read_all_records
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.report.curves import MetricCurves
from prefect_torch_ddp.tasks.run import RunAttemptLog
from tests.support.killing_storage import Kill, KillingStorage
from tests.support.killing_wire import KillingWire, WireKill
from tests.support.records import read_records
from tests.support.s3_server import S3Server
from tests.workloads import killed
from tests.workloads.killed import NUM_ROUNDS, Plan

pytestmark = pytest.mark.extended


MODEL, MANIFEST = r"model\.pt$", r"manifest\.json$"


@dataclass(frozen=True)
class Ended:
    """What a training left when it had ended."""

    values: list[dict[str, Any]]
    storage: Storage


def run(
    client: Client, storage: Storage, folder: Path, *kills: Kill, num_kills: int | None = None
) -> Ended:
    """Train on two ranks; a restart follows each kill."""
    num_kills = len(kills) if num_kills is None else num_kills

    def arguments(attempt: int) -> tuple[Any, ...]:
        mine = tuple(kill for kill in kills if kill.attempt == attempt)
        where = KillingStorage(storage, mine, str(folder))
        config = RankConfig(
            "run", attempt, "task", where, checkpoint=CheckpointParams(every_s=None)
        )
        return config, killed.train_in_own_loop, (Plan(str(folder), kills),)

    attempt_log = RunAttemptLog(storage, "run", knows_steps=False)
    entry = "prefect_torch_ddp.rank.stages:run_with_context"
    values = run_gang(
        client, entry, args=arguments, attempt_log=attempt_log, world_size=2, max_restarts=num_kills
    )
    carried_out = sorted(path.name for path in folder.glob("killed-*"))
    assert carried_out == [f"killed-{attempt}" for attempt in range(1, num_kills + 1)]
    return Ended(values, storage)


@pytest.fixture(scope="module")
def calm() -> Callable[[Client, Path], Ended]:
    """Return a function that runs the undisturbed training, once."""
    made: list[Ended] = []

    def undisturbed(client: Client, folder: Path) -> Ended:
        if not made:
            made.append(run(client, DirectoryStorage(folder / "store"), folder))
        return made[0]

    return undisturbed


def check(ended: Ended, undisturbed: Ended) -> None:
    """The same bits, the same checkpoints and nothing else of any other, each record once."""
    assert [value["sha256"] for value in ended.values] == [
        value["sha256"] for value in undisturbed.values
    ]
    manifests = list_manifests(ended.storage, "run")
    assert [manifest.step for manifest in manifests] == [3, 4]
    kept = {item.key for manifest in manifests for item in manifest.objects}
    kept |= {manifest_key("run", manifest.step, manifest.attempt) for manifest in manifests}
    assert {found.key for found in ended.storage.list(checkpoints_prefix("run"))} == kept
    newest = find_resumable(ended.storage, "run")
    assert newest is not None
    assert newest[1]["progress"] == {"num_rounds": NUM_ROUNDS}
    records = read_records(ended.storage, "run")
    assert [record.step for record in records if record.rank == 1] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    ours, expected = (
        MetricCurves(read_all_records(each.storage, "run")).curves for each in (ended, undisturbed)
    )
    assert ours == expected


KILLS = {
    "in a round": (Kill(1, "backward", rank=1, step=6),),
    "behind a round": (Kill(1, "end", rank=0, step=7),),
    "mid-save": (Kill(1, "write", key=MODEL, moment="torn", nth=3),),
    "mid-save on rank 1": (Kill(1, "write", rank=1, key=r"\.pt$", moment="after", nth=4),),
    "before the commit": (Kill(1, "write_if_absent", key=MANIFEST, nth=3),),
    "within the commit": (Kill(1, "write_if_absent", key=MANIFEST, moment="within", nth=2),),
    "behind the commit": (Kill(1, "write_if_absent", key=MANIFEST, moment="after", nth=2),),
    "at the last commit": (Kill(1, "write_if_absent", key=MANIFEST, moment="after", nth=5),),
    "in the clean-up": (Kill(1, "delete", moment="after", nth=2),),
    "twice": (
        Kill(1, "begin", rank=0, step=6),
        Kill(2, "write_if_absent", key=MANIFEST, moment="after"),
    ),
}


@pytest.mark.parametrize("name", KILLS)
def test_on_a_directory(
    dask_client: Client,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    calm: Callable[[Client, Path], Ended],
    name: str,
) -> None:
    """Wherever it is killed, it ends as if it had not been: also its data and its dropout,
    which the global generators draw."""
    undisturbed = calm(dask_client, tmp_path_factory.mktemp("undisturbed"))
    check(
        run(dask_client, DirectoryStorage(tmp_path / "store"), tmp_path, *KILLS[name]), undisturbed
    )


@pytest.mark.parametrize(
    "name", ["behind a round", "before the commit", "behind the commit", "the answer is not heard"]
)
def test_on_s3(  # noqa: PLR0917 - fixtures
    dask_client: Client,
    open_s3_server: S3Server,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    calm: Callable[[Client, Path], Ended],
    name: str,
) -> None:
    """The same on a real server, also where the commit is done and nobody heard of it."""
    undisturbed = calm(dask_client, tmp_path_factory.mktemp("undisturbed"))
    storage = open_s3_server.storage()
    if name in KILLS:
        check(run(dask_client, storage, tmp_path, *KILLS[name]), undisturbed)
        return
    kill = WireKill(1, "PUT", r"manifest\.json", "after", nth=2)
    with KillingWire(storage.endpoint_url, (kill,), tmp_path) as wire:
        ended = run(
            dask_client, replace(storage, endpoint_url=wire.endpoint_url), tmp_path, num_kills=1
        )
    check(replace(ended, storage=storage), undisturbed)
