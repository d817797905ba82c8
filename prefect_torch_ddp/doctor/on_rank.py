"""What the doctor's gang does: each rank says what it has, once all of them have met."""

import torch
import torch.distributed as dist


def meet() -> tuple[str, list[str]]:
    """Add ones up over all ranks; return the backend and the CUDA devices that this one sees.

    Raises:
        RuntimeError: the sum is wrong.
    """
    backend = dist.get_backend()
    on_cuda = "nccl" in backend
    ones = torch.ones(1, device="cuda" if on_cuda else "cpu")
    dist.all_reduce(ones)
    if ones.item() != dist.get_world_size():
        msg = f"the ranks' sum is {ones.item():g} instead of {dist.get_world_size()}"
        raise RuntimeError(msg)
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return backend, names
