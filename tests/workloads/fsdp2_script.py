"""A program for torchrun whose model is sharded by FSDP2, as PyTorch's documentation has it."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Train for a few steps; rank 0 saves the whole model."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)]
    model = torch.nn.Sequential(*layers)
    for layer in (layers[0], layers[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(8):
        seed = 10 * step + dist.get_rank()
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(seed))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if dist.get_rank() == 0:
        torch.save(whole, Path(sys.argv[1]) / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
