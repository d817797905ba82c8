"""A workload whose prepare packs images into shards, which its ranks read in place: a
directory's, or a bucket's."""

import torch
from torch.nn.functional import cross_entropy
from torchvision.transforms.functional import pil_to_tensor

from prefect_torch_ddp import RankContext, Report
from prefect_torch_ddp.data.images.folder import S3ImageFolder
from prefect_torch_ddp.data.images.packed import PackedObjects
from prefect_torch_ddp.data.images.tar_shards import pack_shards
from prefect_torch_ddp.rank.evaluation import ClassificationMeter
from tests.workloads.tiny import fail_if_told


def prepare(ctx: RankContext) -> None:
    """Pack the raw images."""
    pack_shards(ctx.source, ctx.data, shard_bytes=30_000)


def read(ctx: RankContext) -> S3ImageFolder:
    """Read them where they lie."""
    return S3ImageFolder(
        PackedObjects(ctx.data_storage), lambda image: pil_to_tensor(image)[:, 0, 0] / 255
    )


def train(ctx: RankContext) -> dict[str, int]:
    """Train on all of them."""
    torch.manual_seed(ctx.seed)
    dataset = read(ctx)
    model = ctx.wrap(torch.nn.Linear(3, len(dataset.classes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    loader = ctx.loader(dataset, global_batch_size=6, num_workers=1)
    for colours, labels in ctx.steps(loader, epochs=2):
        fail_if_told(ctx)
        loss = cross_entropy(model(colours), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss)
    return {"steps": ctx.step}


def evaluate(ctx: RankContext) -> Report:
    """Score on all of them."""
    dataset = read(ctx)
    model = torch.nn.Linear(3, len(dataset.classes))
    ctx.track(model=model)
    meter = ClassificationMeter(dataset.classes)
    with torch.no_grad():
        for colours, labels in ctx.loader(dataset, global_batch_size=8, shuffle=False):
            meter.update(model(colours), labels)
    return meter.report()
