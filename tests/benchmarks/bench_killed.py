"""What a training keeps whose rank is killed every 30 s, by its checkpoints' intervals."""

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from prefect_torch_ddp import run_gang
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tracking.attempt_log import RunAttemptLog
from tests.benchmarks import killed
from tests.benchmarks.beside import rounds, show
from tests.support.gangs import RUN_WITH_CONTEXT

pytestmark = pytest.mark.timeout(3600)
ROUNDS = rounds(3)
LASTS_S = 100.0
KILL_EVERY_S = 30.0
KINDS: dict[str, tuple[CheckpointParams, float | None]] = {
    "undisturbed, no checkpoint": (CheckpointParams(every_s=None), None),
    "undisturbed, by default": (CheckpointParams(), None),
    "killed every 30 s, by default": (CheckpointParams(), KILL_EVERY_S),
    "killed every 30 s, every_s=60": (CheckpointParams(every_s=60), KILL_EVERY_S),
}


def steps_of(client: Client, folder: Path, kind: str) -> int:
    """Train for `LASTS_S` and return the steps that were kept."""
    storage, (policy, kill_every_s) = DirectoryStorage(folder), KINDS[kind]
    began = time.time()

    def arguments(attempt: int) -> tuple[Any, ...]:
        config = RankConfig("run", attempt, "task", storage, checkpoint=policy)
        return config, killed.train, (began, LASTS_S, kill_every_s)

    log = RunAttemptLog(storage, "run", knows_steps=True)
    options: Any = {"world_size": 2, "max_restarts": 9, "attempt_log": log}
    num_steps: int = min(run_gang(client, RUN_WITH_CONTEXT, args=arguments, **options))
    return num_steps


def test_a_rank_is_killed_every_30_s(client: Client, tmp_path: Path) -> None:
    """Print the table of docs/performance.md; the steps are kept within the same wall time."""
    seen: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for number in range(ROUNDS):
        for i, (kind, steps) in enumerate(seen.items()):
            steps.append(steps_of(client, tmp_path / f"{number}-{i}", kind))
    whole = seen["undisturbed, by default"]
    rows = []
    for kind, steps in seen.items():
        ratio = statistics.median(kept / of for kept, of in zip(steps, whole, strict=True))
        rows.append((kind, f"{statistics.median(steps):,.0f}", f"{ratio:.3f}"))
    show(f"training of {LASTS_S:g} s | steps kept | times undisturbed, by default", rows)
