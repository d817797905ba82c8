"""On real ranks, a share without a readable sample counts for nothing."""

from dataclasses import replace
from pathlib import Path

import torch
from torchvision.transforms.functional import pil_to_tensor

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.data.images.folder import S3ImageFolder
from prefect_torch_ddp.rank.stages import run_with_context
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.rank.training.test_steps import config_for
from tests.support.ranks import run_ranks
from tests.unit.data.images.test_folder import damaged_images


def gradients_of(ctx: RankContext, root: str) -> list[float]:
    """Train two epochs on images of one pixel's colour; return the size of each step's
    gradient."""
    dataset = S3ImageFolder(
        DirectoryStorage(Path(root)),
        lambda image: pil_to_tensor(image)[:, 0, 0] / 255,
        on_error="skip",
    )
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 3)
    model = ctx.wrap(net)
    sizes = []
    for batch in ctx.steps(ctx.loader(dataset, global_batch_size=3), epochs=2):
        net.zero_grad()
        for (colours, labels), weight in ctx.micro_batches(batch):
            (torch.nn.functional.cross_entropy(model(colours), labels) * weight).backward()
        sizes.append(sum(parameter.grad.abs().sum().item() for parameter in net.parameters()))
    return sizes


def test_the_gradient_of_a_share_that_is_skipped_is_zero(tmp_path):
    """An unreadable tail moves no weight, and all three ranks get through it together."""
    dataset, _, _ = damaged_images(tmp_path)
    values = run_ranks(
        run_with_context,
        3,
        replace(config_for(tmp_path / "runs"), seed=1),
        gradients_of,
        (dataset.root,),
    )
    assert values[0] == values[1] == values[2]
    assert [size == 0 for size in values[0]] == [False] * 5 + [True]
