"""dask-pytorch-ddp: `dispatch.run` on a local Dask cluster.

Its README sends files to the client by `DaskResultsHandler`: records of the loss, and the pickled
weights every 100 steps. It says nothing of failures, and `dispatch.run` has no retries. The loop
around it and the snapshot on a local disk are a user's own; each attempt has another cluster, since
`client.restart` may fail by a TimeoutError after a kill.
"""

import json
import uuid
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from dask_pytorch_ddp import dispatch
from dask_pytorch_ddp.results import DaskResultsHandler
from distributed import Client, LocalCluster
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.benchmarks.peers.training import (
    BATCH_SIZE,
    EPOCHS,
    FOLDER,
    LR,
    NUM_RANKS,
    REPORT_EVERY,
    SAVE_EVERY,
    Observed,
    make_data,
    make_model,
)


def fit(handler: Any) -> None:
    """Train on one rank."""
    rank = dist.get_rank()
    observed = Observed(rank)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    data = make_data()
    sampler: DistributedSampler[object] = DistributedSampler(data)
    loader = DataLoader(data, BATCH_SIZE, sampler=sampler)
    snapshot, step = FOLDER / "snapshot.pt", 0
    if snapshot.exists():
        saved = torch.load(snapshot)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    for epoch in range(step // len(loader), EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in islice(loader, step % len(loader), None):
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % REPORT_EVERY == 0 and rank == 0:
                with observed.reporting():
                    record = json.dumps({"loss": loss.item(), "step": step})
                    handler.submit_result(f"losses/{step}.json", record)
            observed.step(step)
            if step % SAVE_EVERY == 0 and rank == 0:
                parts = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**parts, "step": step}, FOLDER / "snapshot.new")
                (FOLDER / "snapshot.new").replace(snapshot)


def main() -> None:
    """Train on one cluster after the other until a training ends without an error."""
    while True:
        try:
            with (
                LocalCluster(n_workers=NUM_RANKS, threads_per_worker=1) as cluster,
                Client(cluster) as client,
            ):
                handler = DaskResultsHandler(uuid.uuid4().hex)
                futures = dispatch.run(client, fit, handler=handler, backend="gloo")
                handler.process_results(str(FOLDER / "results"), futures)
                return
        except Exception as error:  # noqa: BLE001 - of a rank, or of the cluster
            print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
