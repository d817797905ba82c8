"""The process that runs train_flow in bench_job: once on a cluster of the flow's own, or for each
line of arguments on one that it keeps.

With heartbeats, Prefect's flow ends when their thread does, which looks once a second if it is to.
"""

import json
import sys
import time

from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from prefect_torch_ddp import TrainParams, train_flow


def run(storage: str, times: str, heartbeats: str, address: str | None = None) -> None:
    """Run the flow; print when it was called and when it had returned.

    Args:
        storage: a folder.
        times: the file for the times of steps.
        heartbeats: "beats" or "none".
        address: of the cluster; None for one of its own.
    """
    params = {
        "workload": "tests.benchmarks.job_workload",
        "options": {"times": times},
        "storage": storage,
        "world_size": 2,
        "cluster": {"address": address},
        # By default that of the digits, which this workload only wraps.
        "preload": ["torchvision"],
    }
    off = {} if heartbeats == "beats" else {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    called = time.time()
    with temporary_settings(updates=off):
        train_flow(TrainParams.model_validate(params))
    print(json.dumps([called, time.time()]), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(*sys.argv[1:])
    else:
        from prefect_torch_ddp.tasks.clusters.local_cluster import local_cluster

        with local_cluster(n_workers=2) as cluster:
            for line in sys.stdin:
                storage, times, heartbeats = json.loads(line)
                run(storage, times, heartbeats, cluster.scheduler_address)
