"""Owns a workload whose prepare packs images into shards, which its ranks read in place: a directory's, or a bucket's."""

import torch
from torch.nn.functional import cross_entropy
from torchvision.transforms.functional import pil_to_tensor

from prefect_torch_ddp import RankContext, Report
from prefect_torch_ddp.data.images.folder import S3ImageFolder
from prefect_torch_ddp.data.images.packed import PackedObjects
from prefect_torch_ddp.data.images.tar_shards import pack_shards
from prefect_torch_ddp.rank.evaluation import ClassificationMeter
from tests.workloads.tiny import fail_if_told


def prepare(rank: RankContext) -> None:
    """Pack the raw images."""
    pack_shards(rank.source, rank.data, shard_bytes=30_000)


def read(rank: RankContext) -> S3ImageFolder:
    """Read them where they lie."""
    return S3ImageFolder(PackedObjects(rank.data_storage), lambda image: pil_to_tensor(image)[:, 0, 0] / 255)


def train(rank: RankContext) -> dict[str, int]:
    """Train on all of them."""
    torch.manual_seed(rank.seed)
    dataset = read(rank)
    model = rank.wrap(torch.nn.Linear(3, len(dataset.classes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank.track(model=model, optimizer=optimizer)
    loader = rank.loader(dataset, global_batch_size=6, num_workers=1)
    for colours, labels in rank.steps(loader, epochs=2):
        fail_if_told(rank)
        loss = cross_entropy(model(colours), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rank.report(loss=loss)
    return {"steps": rank.step}


def evaluate(rank: RankContext) -> Report:
    """Score on all of them."""
    dataset = read(rank)
    model = torch.nn.Linear(3, len(dataset.classes))
    rank.track(model=model)
    meter = ClassificationMeter(dataset.classes)
    with torch.no_grad():
        for colours, labels in rank.loader(dataset, global_batch_size=8, shuffle=False):
            meter.update(model(colours), labels)
    return meter.report()
