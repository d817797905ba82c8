"""The process that runs train_flow in bench_job: once on a cluster of the flow's own, or for each
line of arguments on one that it keeps."""

import json
import sys
import time

from prefect_torch_ddp import TrainParams, train_flow


def run(storage: str, times: str, address: str | None = None) -> None:
    """Run the flow; print when it was called and when it had returned."""
    params = {
        "workload": "tests.benchmarks.job_workload",
        "options": {"times": times},
        "storage": storage,
        "world_size": 2,
        "cluster": {"address": address},
        # By default that of the digits, which this workload only wraps.
        "preload": ["torchvision"],
    }
    called = time.time()
    train_flow(TrainParams.model_validate(params))
    print(json.dumps([called, time.time()]), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _, storage, times, *address = sys.argv
        run(storage, times, *address[:1])
    else:
        from prefect_torch_ddp.tasks.clusters.local_cluster import local_cluster

        with local_cluster(n_workers=2) as cluster:
            for line in sys.stdin:
                storage, times = json.loads(line)
                run(storage, times, cluster.scheduler_address)
