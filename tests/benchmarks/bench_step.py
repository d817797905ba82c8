"""What RankContext adds to a step, part by part."""

import json
from pathlib import Path

import pytest
from distributed import Client

from prefect_torch_ddp import run_gang
from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.clusters.local_cluster import local_cluster
from tests.benchmarks import paired_steps
from tests.benchmarks.beside import rounds, show
from tests.support.gangs import RUN_WITH_CONTEXT

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("on_cpus")]
NUM_EPOCHS = 20


def test_what_a_step_costs(tmp_path: Path) -> None:
    """Print the processor time of which docs/performance.md has the medians' differences."""
    found: dict[str, list[list[list[float]]]] = {part: [] for part in paired_steps.PARTS}
    storage = DirectoryStorage(tmp_path / "store")
    with local_cluster(n_workers=2) as cluster, Client(cluster) as client:
        for number in range(rounds(3)):
            for part in paired_steps.PARTS:
                attempt = claim_attempt(storage, run_id := f"{number}-{part}")
                saves = CheckpointParams(every_s=30)
                config = RankConfig(run_id, attempt, "task", storage, checkpoint=saves)
                place = tmp_path / "pairs.json"
                call = config, paired_steps.train, (part, NUM_EPOCHS, place)
                run_gang(client, RUN_WITH_CONTEXT, args=call, world_size=2)
                found[part] += json.loads(place.read_text())
    head = "part | torch alone: ms | added µs | standard error | ratio | added in all threads µs"
    show(head, [(part, *paired_steps.summary(pairs)) for part, pairs in found.items()])
