"""The process of bench_programs in which a Trainer trains in a `ddp_task`: a flow with its local
cluster."""

import json
import sys
from pathlib import Path
from typing import Any

from prefect import flow
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import CheckpointParams, ddp_task
from prefect_torch_ddp.tasks.clusters.local_cluster import local_cluster
from tests.benchmarks import steady, trainer_steps


def main(program: str, turns: steady.Turns) -> None:
    """Train, with a checkpoint at the end of each block."""
    every = trainer_steps.Blocks(turns).size
    fit: Any = ddp_task(
        world_size=2,
        storage=str(Path(turns.folder, "store")),
        checkpoint=CheckpointParams(every_s=None, every_steps=every),
    )(trainer_steps.run)
    with local_cluster(n_workers=2) as cluster:
        runner: Any = DaskTaskRunner(address=cluster.scheduler_address)

        @flow(task_runner=runner)
        def train() -> None:
            fit.submit(program, turns).result()

        train()


if __name__ == "__main__":
    main(sys.argv[1], steady.Turns(**json.loads(sys.argv[2])))
