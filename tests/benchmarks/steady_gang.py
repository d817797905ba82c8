"""The process in which a gang trains for bench_throughput: the caller with its local
cluster, as a flow run has it."""

import json
import sys
from pathlib import Path

import torch
from distributed import Client

from prefect_torch_ddp import run_gang
from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.clusters.local_cluster import local_cluster
from tests.benchmarks import steady
from tests.support.gangs import RUN_WITH_CONTEXT
from tests.workloads import plain


def main(kind: str, turns: steady.Turns) -> None:
    """Train as a plain function or, by the kind "context", as a workload does; no checkpoint
    falls due."""
    size = 2 if turns.device == "cpu" else torch.cuda.device_count()
    with local_cluster(n_workers=size) as cluster, Client(cluster) as client:
        run_gang(client, plain.sum_of_ones, world_size=size)
        if kind == "plain":
            run_gang(client, steady.plain, args=(turns,), world_size=size)
            return
        storage, on_demand = (
            DirectoryStorage(Path(turns.folder, "store")),
            CheckpointParams(every_s=None),
        )
        attempt = claim_attempt(storage, "bench")
        config = RankConfig("bench", attempt, "task", storage, checkpoint=on_demand)
        args = config, steady.with_context, (turns,)
        run_gang(client, RUN_WITH_CONTEXT, args=args, world_size=size)


if __name__ == "__main__":
    main(sys.argv[1], steady.Turns(**json.loads(sys.argv[2])))
