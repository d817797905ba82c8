"""Makes a small storage as this version writes it; its workload stays with what it made.

`python -m tests.data.make_storage FOLDER` trains on two ranks, one of which fails once, evaluates
and publishes. What version 0.1 wrote is in `storage-0.1`, and is never made again: every later
version has to read it. A version with a newer format of a file adds a folder of its own, made in
a folder whose path, and on a host whose name, says nothing of the machine (`unshare -u`).
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext, Report
from prefect_torch_ddp.data import write_index
from prefect_torch_ddp.storage.protocol import Contents, ListedObject, ObjectPart
from tests.workloads import descend, score_linear

CLASSES = ["below", "above"]
NUM_SAMPLES = 50


@dataclass(frozen=True)
class Images:
    """A bucket of images, as far as an index needs one."""

    uri: str = "s3://bucket/images"

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        names = (f"{name}/{number}.png" for name in CLASSES for number in range(2))
        return (ListedObject(name, 100, "etag") for name in names if name.startswith(prefix))

    def list_level(self, prefix: str) -> Iterator[ListedObject | str]:
        return self.list_objects(prefix)

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        raise NotImplementedError


def prepare(ctx: RankContext) -> None:
    """Write points in the plane, labelled by the line they lie below or above, and an index."""
    generator = np.random.default_rng(0)
    for split, size in (("train", NUM_SAMPLES), ("test", 21)):
        points = generator.normal(size=(size, 2)).astype(np.float32)
        (ctx.data / split).mkdir()
        np.save(ctx.data / split / "points.npy", points)
        np.save(ctx.data / split / "labels.npy", (points.sum(1) > 0).astype(np.int64))
    write_index(Images(), ctx.data)


def train(ctx: RankContext) -> dict[str, Any]:
    """Train a linear classifier; rank 1 fails once if `options["fails_in_step"]` names a step."""
    torch.manual_seed(ctx.seed)
    model = ctx.wrap(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    ctx.track(model=model, optimizer=optimizer)
    loader = ctx.loader(_read(ctx, "train"), global_batch_size=10)
    for points, labels in ctx.steps(loader, epochs=ctx.options["epochs"]):
        is_due = ctx.step == ctx.options.get("fails_in_step") and ctx.attempt == 1
        if is_due and ctx.rank == 1:
            msg = "told to fail once"
            raise OSError(msg)
        descend(ctx, optimizer, cross_entropy(model(points), labels))
        if ctx.epoch_ended:
            ctx.report(val_loss=1.0 / ctx.epoch)
    ctx.save("notes.json", json.dumps({"steps": ctx.step}))
    print("trained")
    return {"steps": ctx.step}


def evaluate(ctx: RankContext) -> Report:
    """Score on the held-out points."""
    return score_linear(ctx, _read(ctx, "test"), CLASSES)


def _read(ctx: RankContext, split: str) -> TensorDataset:
    """Read points float32 [n, 2] and labels int64 [n]."""
    arrays = (np.load(ctx.data / split / f"{name}.npy") for name in ("points", "labels"))
    return TensorDataset(*map(torch.from_numpy, arrays))


def main(folder: str) -> None:
    """Make the storage in a folder that is not there yet."""
    from prefect_torch_ddp import CheckpointParams, TrainParams, train_flow

    path = Path(folder)
    path.mkdir(parents=True)
    policy = CheckpointParams(
        every_steps=4,
        every_s=None,
        keep_last=2,
        keep_best=1,
        best_metric="val_loss",
        best_mode="min",
    )
    params = TrainParams(
        workload="tests.data.make_storage",
        storage=str(path),
        world_size=2,
        seed=7,
        ledger=True,
        checkpoint=policy,
        options={"epochs": 3, "fails_in_step": 10},
    )
    print(train_flow(params).model_dump_json(indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
