"""Elastic determinism: virtual ranks, which give the same bits on any number of ranks."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import register_optimizer_step_pre_hook

from prefect_torch_ddp.checkpoint.shard import Shard
from prefect_torch_ddp.checkpoint.state.replicas import Replicas
from prefect_torch_ddp.data.sampler import (
    BatchShare,
    GlobalBatches,
    RankShares,
    VirtualShare,
    VirtualShares,
)
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.distributed import current_device
from prefect_torch_ddp.rank.generators import seed_shared
from prefect_torch_ddp.rank.heartbeat_writer import HeartbeatWriter
from prefect_torch_ddp.rank.strategies.ddp import require_group
from prefect_torch_ddp.rank.strategies.micro_batches import count_rows, cut, pieces
from prefect_torch_ddp.rank.strategies.replicated import dealt_out, whole
from prefect_torch_ddp.rank.strategies.tree import (
    Flat,
    FlatGradients,
    TreeSum,
    add_in_place,
    total_over_ranks,
)

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


class VirtualRanks:
    """The virtual ranks of this rank: each computes the same on any rank, summed in one order.

    Each has its share of the global batch, its own random numbers for each step, and its
    gradient, which the ranks add up in one fixed tree over all virtual ranks.
    """

    def __init__(
        self, config: RankConfig, info: RankInfo, heartbeat: HeartbeatWriter | None = None
    ) -> None:
        """Make torch compute the same in every run; `close` undoes that."""
        self._heartbeat = heartbeat or HeartbeatWriter()
        self._shares = RankShares.of_rank(info.rank, info.world_size, config.virtual_ranks)
        self._info = info
        self._world_size = info.world_size
        self._seed = config.seed
        self._step = 0
        self._num_seeded = 0
        """Of the step under way: its loops over micro-batches that have begun."""
        self._given: WeakSet[nn.Module] = WeakSet()
        self._wrapped: list[ref[nn.Module]] = []
        self._models: list[nn.Module] = []
        """Those that are trained in the loop under way."""
        self._owes = False
        """Whether the step's gradients are still to be summed."""
        self._is_in_loop = False
        self._settings = _compute_alike()
        if info.world_size > 1:
            hook: Any = self._check_step
            self._settings.callback(register_optimizer_step_pre_hook(hook).remove)

    def close(self) -> None:
        """Give torch its settings back."""
        self._settings.close()

    def wrap(
        self, model: nn.Module, device: torch.device, _ddp_kwargs: dict[str, Any]
    ) -> nn.Module:
        """Move a model to the device; all ranks get rank 0's weights.

        It becomes no DDP, which sums in its own order.
        """
        self._given.add(model)
        model = model.to(device)
        if self._world_size > 1:
            require_group(self._world_size)
            for value in (*model.parameters(), *model.buffers()):
                _broadcast(value.detach())
        if any(parameter.requires_grad for parameter in model.parameters()):
            self._wrapped.append(ref(model))
            self._models.append(model)
        return model

    def begin_loop(self, _batches: GlobalBatches | None) -> None:
        """Sum, from now on, the gradients of the models that every rank still has.

        Who trains one after the other, such as in a cross-validation, has the earlier ones freed.
        """
        self._is_in_loop = True
        models = [model() for model in self._wrapped]
        held = torch.tensor([model is not None for model in models], dtype=torch.int32)
        if self._world_size > 1 and models:
            device = torch.device("cpu") if dist.get_backend() == "gloo" else current_device()
            dist.all_reduce(held := held.to(device), op=dist.ReduceOp.MIN)
        chosen = zip(models, held.tolist(), strict=True)
        self._models = [model for model, is_held in chosen if model is not None and is_held]

    def leave_loop(self) -> None:
        """Hold no model beyond its loop."""
        self._is_in_loop = False
        self._num_seeded = 0
        self._models = []

    def begin_step(self, step: int, _share: BatchShare | None) -> None:
        """Have all ranks draw the same numbers until the first micro-batch."""
        self._step, self._num_seeded = step, 0
        self._owes = bool(self._models)
        seed_shared(self._seed, step)

    def end_step(self, step: int) -> None:
        """Refuse a step that didn't go through `ctx.micro_batches` to its end."""
        if self._owes:
            msg = (
                f"step {step} was taken without going through all of ctx.micro_batches(batch), "
                "which sums the gradients under determinism='elastic'; call backward on the "
                "weighted loss of each micro-batch, on every rank"
            )
            raise InvalidParamsError(msg)

    def take_replicas(self) -> Replicas:
        """Return the wrapped models; no passes, since a step that doesn't sum once is refused."""
        return Replicas(list(self._given))

    def micro_batches(self, batch: Any, max_samples: int | None) -> Iterator[tuple[Any, float]]:
        """Yield (micro-batch, weight) for each own virtual rank, then sum all gradients."""
        if not isinstance(batch, VirtualShares):
            as_given = "pass the batch as ctx.steps gave it, before any change"
            msg = f"ctx.micro_batches got a {type(batch).__name__}; {as_given}"
            raise InvalidParamsError(msg)
        self._owes = True
        # The first loop of a step draws as if there were no second one.
        number: tuple[int, ...] = (self._num_seeded,) if self._num_seeded else ()
        self._num_seeded += self._is_in_loop
        _refuse_running_statistics(self._models)
        buffers = _saved_buffers(self._models)
        gradients = FlatGradients(self._parameters())
        tree: TreeSum[Flat] = TreeSum(self._shares.num_shares, add_in_place)
        shares = {share.virtual_rank: share for share in batch.shares}
        for virtual_rank in self._shares.own:
            share = shares.get(virtual_rank)
            if share is not None:
                seed_shared(self._seed, self._step, virtual_rank, *number)
                yield from _of_one(share, batch.num_global, max_samples)
                _refuse_changed(buffers, _saved_buffers(self._models))
            taken = gradients.take()
            if share is not None and not share.num_samples:
                for flat in taken:
                    flat.zero_()  # a stand-in's counts for nothing, nan or not
            tree.push(range(virtual_rank, virtual_rank + 1), taken)
        handed_ns = time.monotonic_ns()
        gradients.put(total_over_ranks(tree, self._world_size))
        if self._world_size > 1 and dist.get_backend() == "gloo":  # others return before the sum
            self._heartbeat.waited(handed_ns)
        # What the rest of the step draws is the same on all ranks.
        seed_shared(self._seed, self._step, self._shares.num_shares, *number)
        self._owes = False

    def tracked(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Return the models without DDP; refuse what isn't whole on each rank."""
        return whole(objects)

    def shares(self, objects: Mapping[str, Any]) -> dict[Shard, Any]:
        """Deal out what each rank holds whole."""
        return dealt_out(objects, self._info)

    def _check_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse a step outside a loop on gradients of a wrapped model, which nobody has summed."""
        if self._is_in_loop or torch.compiler.is_compiling():
            return
        models = [model for held in self._wrapped if (model := held()) is not None]
        wrapped = {id(parameter) for model in models for parameter in model.parameters()}
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            # Whoever has an optimizer make its state sets gradients to zeros.
            if id(parameter) in wrapped and parameter.grad is not None and parameter.grad.any():
                msg = (
                    "an optimizer is about to step outside ctx.steps on gradients of a model given "
                    "to ctx.wrap; with determinism='elastic' the ranks sum gradients only in "
                    "ctx.micro_batches. Loop over ctx.steps(...) and, in it, over "
                    "ctx.micro_batches(batch), or leave out determinism='elastic'"
                )
                raise InvalidParamsError(msg)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return all that get gradients, once each, in an order that is the same on all ranks."""
        found = {
            id(parameter): (f"{name} of model {position + 1}" if position else name, parameter)
            for position, model in enumerate(self._models)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        return dict(found.values())


def _of_one(
    share: VirtualShare, num_global: int, max_samples: int | None
) -> Iterator[tuple[Any, float]]:
    num_rows = count_rows(share.batch, max(share.num_samples, 1))
    for piece in pieces(num_rows, max_samples):
        weight = len(piece) / num_global if share.num_samples else 1.0
        yield cut(share.batch, piece), weight


def _refuse_running_statistics(models: list[nn.Module]) -> None:
    # Torch's own kernels change them without counting up a buffer's version.
    names = [
        f"{name} ({type(module).__name__})"
        for model in models
        for name, module in model.named_modules()
        if isinstance(module, nn.SyncBatchNorm)
        or (isinstance(module, _NormBase) and module.training and module.track_running_stats)
    ]
    if names:
        msg = (
            f"{', '.join(names)}: running statistics depend on which samples a process sees one "
            "after the other, so determinism='elastic' refuses them; use GroupNorm or LayerNorm, "
            "or BatchNorm with track_running_stats=False, or keep the layers in eval()"
        )
        raise InvalidParamsError(msg)


def _saved_buffers(models: list[nn.Module]) -> dict[str, tuple[int, int]]:
    """Return what shows whether a buffer that is saved has changed."""
    return {
        f"{prefix}.{name}".lstrip(".")
        + f" ({type(module).__name__})"
        + (f" of model {position + 1}" if position else ""): (
            id(buffer),
            buffer._version,  # noqa: SLF001 - torch has no other
        )
        for position, model in enumerate(models)
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set  # noqa: SLF001 - caches, in no checkpoint
    }


def _refuse_changed(before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]]) -> None:
    changed = [name for name, mark in now.items() if before.get(name) != mark]
    if changed:
        msg = (
            f"the buffers {', '.join(changed)} change in the forward pass, and how often a "
            "process does that depends on the number of ranks, so determinism='elastic' refuses "
            "them; change them after ctx.micro_batches, or use a layer without such a buffer"
        )
        raise InvalidParamsError(msg)


def _broadcast(value: torch.Tensor) -> None:
    carried = value.cpu() if dist.get_backend() == "gloo" else value
    carried = carried.contiguous()
    dist.broadcast(carried, src=0)
    if dist.get_rank() != 0:
        value.copy_(carried)


def _compute_alike() -> ExitStack:
    """Have torch choose the same algorithms in every process; return what takes that back."""
    undo = ExitStack()
    undo.callback(torch.set_num_threads, torch.get_num_threads())
    undo.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
    undo.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    if _CUBLAS not in os.environ:
        undo.callback(os.environ.pop, _CUBLAS, None)
        os.environ[_CUBLAS] = ":4096:8"  # else cuBLAS, asked to be deterministic, refuses to work
    # On a CPU the threads share out a sum, and their number follows from the ranks of a host.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.benchmark = False
    return undo
