"""The digits as a plain DDP script for torchrun that notes when each step was done; see
bench_job. Arguments: the prepared folder, the file for the times."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

from prefect_torch_ddp.examples import digits


def train(data: Path, times_file: Path) -> None:
    """Train with only torch, as its tutorials do."""
    dist.init_process_group("gloo")
    rank, options = dist.get_rank(), digits.Options()
    torch.manual_seed(0)
    net = digits.DigitNet(options.dropout)
    model = DistributedDataParallel(net)
    train_set, val_set = (digits.images_of(data / split) for split in ("train", "val"))
    sampler: DistributedSampler[object] = DistributedSampler(train_set)
    loader = DataLoader(train_set, options.global_batch_size // 2, sampler=sampler)
    validation = DataLoader(val_set, 128, sampler=DistributedSampler(val_set, shuffle=False))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=options.weight_decay)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.lr, total_steps=options.epochs * len(loader)
    )
    times = [time.time()]
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if number == len(loader) - 1:
                _validate(net, validation)
            times.append(time.time())
    if rank == 0:
        torch.save(net.state_dict(), times_file.with_suffix(".pt"))
        times_file.write_text(json.dumps(times))
    dist.destroy_process_group()


@torch.no_grad()
def _validate(net: digits.DigitNet, validation: DataLoader[object]) -> None:
    net.eval()
    sums = torch.zeros(3)
    for inputs, targets in validation:
        logits = net(inputs)
        loss = cross_entropy(logits, targets, reduction="sum")
        sums += torch.tensor([(logits.argmax(1) == targets).sum(), loss, len(targets)])
    dist.all_reduce(sums)
    net.train()


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]))
