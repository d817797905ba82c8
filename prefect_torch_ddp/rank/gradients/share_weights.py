"""Owns how gradients are averaged over the ranks: each rank's counts by its share of the global
batch.
"""

from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.loop.state import TrainingState


def wrap_model(
    model: nn.Module,
    state: TrainingState,
    device: torch.device,
    world_size: int,
    ddp_kwargs: dict[str, Any],
) -> nn.Module:
    """Move a model to the device, and where there are several ranks make it a
    DistributedDataParallel.

    Raises:
        InvalidParamsError: there are several ranks and the process group isn't up.
    """
    if state.virtual is not None:
        return state.virtual.wrap(model, device)
    model = model.to(device)
    if world_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    if not dist.is_initialized():
        msg = (
            f"ctx.wrap on {world_size} ranks needs the process group; call init_process_group first"
        )
        raise InvalidParamsError(msg)
    if device.type == "cuda":
        ddp_kwargs = {"device_ids": [device], **ddp_kwargs}
    ddp = DistributedDataParallel(model, **ddp_kwargs)
    ddp.register_comm_hook((state, ddp.process_group), _sum_by_share)
    _settle_buckets(ddp)
    state.wrapped.append(ddp)
    return ddp


def unwrapped(item: Any) -> Any:
    """Return the bare module of a DDP or compiled one, whose weights load without a prefix;
    anything else as it is.
    """
    while isinstance(item, nn.Module):
        inner = (
            item.module
            if isinstance(item, DistributedDataParallel)
            else getattr(item, "_orig_mod", None)
        )
        if not isinstance(inner, nn.Module):
            break
        item = inner
    return item


def _sum_by_share(
    context: tuple[TrainingState, Any], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket of gradients over the ranks, each scaled by its share; a DDP communication
    hook.
    """
    state, group = context
    gradients = bucket.buffer()
    share = state.share
    if share is None:
        gradients.div_(dist.get_world_size(group))  # outside of `steps`: the plain mean over ranks
    elif share.num_local == share.num_skipped:
        gradients.zero_()  # not times 0: the stand-in's gradient may be nan
    else:
        gradients.mul_(share.num_local / share.num_global)
    future = dist.all_reduce(gradients, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def _settle_buckets(ddp: DistributedDataParallel) -> None:
    """Have DDP lay out its buckets now, by a backward pass of zeros.

    It would do so after the first real step, by which the order of summation changes (ring
    all-reduce, three ranks or more). A resumed training would then differ in the last bit from
    one that was never interrupted.
    """
    parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
    has_hooks = any(
        getattr(p, "_post_accumulate_grad_hooks", None) or getattr(p, "_backward_hooks", None)
        for p in parameters
    )
    has_sparse = any(getattr(module, "sparse", False) for module in ddp.module.modules())
    if ddp.find_unused_parameters or ddp.static_graph or has_hooks or has_sparse:
        return  # DDP doesn't rebuild, or learns from the first pass, or the pass would have effects
    device = parameters[0].device

    def zeros(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        # A chain: its backward pass reaches the last parameter first, much as a real one does.
        return reduce(
            lambda total, parameter: total + _zero(parameter).to(device),
            parameters,
            torch.zeros((), device=device),
        )

    ddp._run_ddp_forward = zeros  # type: ignore[method-assign]
    try:
        with torch.enable_grad():
            ddp().backward()
    finally:
        del ddp._run_ddp_forward
    for parameter in parameters:
        parameter.grad = None


def _zero(parameter: torch.Tensor) -> torch.Tensor:
    values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    return values.sum() * 0
