"""Owns elastic determinism: the same bits for every number of ranks, as all follows from
virtual ranks, whose number is fixed.

Owns taking the gradients of parameters as flat tensors, and putting flat sums back in their
place.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from prefect_torch_ddp.data.sampler import RankShares, VirtualShare, VirtualShares
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.rank.generators import seed_shared
from prefect_torch_ddp.rank.gradients.micro_batches import count_rows, cut, pieces
from prefect_torch_ddp.rank.gradients.tree import Flat, TreeSum, add_in_place, total_over_ranks
from prefect_torch_ddp.rank.loop.state import Place

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


class VirtualRanks:
    """The virtual ranks that this rank stands for: what each computes is the same on any rank,
    and summed in one order.

    Each has its share of the global batch, random numbers of its own for each step, and its
    gradient, which the ranks add up in one fixed tree over all virtual ranks.
    """

    def __init__(self, config: RankConfig, place: Place) -> None:
        """Have torch compute alike in every run; `close` takes that back.

        Raises:
            InvalidParamsError: the number of ranks doesn't divide that of the virtual ones.
        """
        assert config.virtual_ranks is not None  # else the config would have been refused
        self._shares = RankShares.of_rank(place.rank, place.world_size, config.virtual_ranks)
        self._place = place
        self._seed = config.seed
        self._step = 0
        self._models: list[nn.Module] = []
        self._spare: list[Flat] = []
        self._owes = False
        self._settings = _compute_alike()

    def close(self) -> None:
        """Give torch its settings back."""
        self._settings.close()

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Move a model to the device and give all ranks the weights of rank 0; no DDP, which
        sums in an order of its own.

        Raises:
            InvalidParamsError: there are several ranks and the process group isn't up.
        """
        model = model.to(device)
        if self._place.world_size > 1:
            if not dist.is_initialized():
                msg = f"ctx.wrap on {self._place.world_size} ranks needs the process group; call init_process_group first"
                raise InvalidParamsError(msg)
            for value in (*model.parameters(), *model.buffers()):
                _broadcast(value.detach())
        if any(parameter.requires_grad for parameter in model.parameters()):
            self._models.append(model)
        return model

    def begin_step(self, step: int) -> None:
        """Have all ranks draw alike until the first micro-batch."""
        self._step = step
        self._owes = bool(self._models)
        seed_shared(self._seed, step)

    def end_step(self) -> None:
        """Refuse a step whose gradients weren't summed.

        Raises:
            InvalidParamsError: `ctx.micro_batches` wasn't gone through to its end.
        """
        if self._owes:
            msg = (
                f"step {self._step} was taken without going through all of ctx.micro_batches(batch), which sums the gradients "
                "under determinism='elastic'; call backward on the weighted loss of each micro-batch, on every rank"
            )
            raise InvalidParamsError(msg)

    def micro_batches(self, batch: Any, max_samples: int | None) -> Iterator[tuple[Any, float]]:
        """Yield (micro-batch, weight) for each virtual rank of this rank, in order; then sum
        the gradients over all of them.

        Raises:
            InvalidParamsError: the batch isn't one of `steps`, or can't be cut, or a buffer of
                a model depends on it.
        """
        if not isinstance(batch, VirtualShares):
            msg = f"ctx.micro_batches got a {type(batch).__name__}; pass the batch as ctx.steps gave it, before any change"
            raise InvalidParamsError(msg)
        self._owes = True
        self._refuse_running_statistics()
        buffers = self._buffers()
        gradients = FlatGradients(self._parameters(), self._spare)
        tree: TreeSum[Flat] = TreeSum(self._shares.num_shares, self._add)
        shares = {share.virtual_rank: share for share in batch.shares}
        for virtual_rank in self._shares.own:
            if virtual_rank in shares:
                yield from self._of_one(shares[virtual_rank], batch.num_global, max_samples)
                self._refuse_changed(buffers)
            taken = gradients.take()
            if virtual_rank in shares and not shares[virtual_rank].num_samples:
                taken = [
                    flat.zero_() for flat in taken
                ]  # a stand-in's counts for nothing, nan or not
            tree.push(range(virtual_rank, virtual_rank + 1), taken)
        gradients.put(total_over_ranks(tree, self._place.world_size))
        if self._place.world_size > 1:
            self._spare += [flat for _, flat in tree.branches]
        seed_shared(
            self._seed, self._step, self._shares.num_shares
        )  # what the rest of the step draws is the same on all ranks
        self._owes = False

    def _add(self, left: Flat, right: Flat) -> Flat:
        self._spare.append(right)
        return add_in_place(left, right)

    def _of_one(
        self, share: VirtualShare, num_global: int, max_samples: int | None
    ) -> Iterator[tuple[Any, float]]:
        num_rows = count_rows(share.batch, max(share.num_samples, 1))
        seed_shared(self._seed, self._step, share.virtual_rank)
        for piece in pieces(num_rows, max_samples):
            weight = len(piece) / num_global if share.num_samples else 1.0
            yield cut(share.batch, piece), weight

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return all that get gradients, once each, in an order that is the same on all
        ranks.
        """
        found = {
            id(parameter): (f"{position}.{name}" if position else name, parameter)
            for position, model in enumerate(self._models)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        return dict(found.values())

    def _refuse_running_statistics(self) -> None:
        names = [
            f"{name} ({type(module).__name__})"
            for model in self._models
            for name, module in model.named_modules()
            if isinstance(module, nn.SyncBatchNorm)
            or (isinstance(module, _NormBase) and module.training and module.track_running_stats)
        ]
        if names:
            msg = (
                f"{', '.join(names)}: running statistics depend on which samples a process sees one after the other, so "
                "determinism='elastic' refuses them; use GroupNorm or LayerNorm, or BatchNorm with track_running_stats=False, or "
                "keep the layers in eval()"
            )
            raise InvalidParamsError(msg)

    def _buffers(self) -> dict[str, tuple[int, int]]:
        """Return what shows whether a buffer that is saved has changed."""
        return {
            f"{prefix}.{name}".lstrip(".") + f" ({type(module).__name__})": (
                id(buffer),
                buffer._version,
            )
            for model in self._models
            for prefix, module in model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        }

    def _refuse_changed(self, before: dict[str, tuple[int, int]]) -> None:
        changed = [name for name, mark in self._buffers().items() if before.get(name) != mark]
        if changed:
            msg = (
                f"the buffers {', '.join(changed)} change in the forward pass, and how often a process does that depends on the "
                "number of ranks, so determinism='elastic' refuses them; change them after ctx.micro_batches, or use a layer "
                "without such a buffer"
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
    # On a CPU the threads share out a sum, and their number follows from how many ranks a host
    # has.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.benchmark = False
    return undo


class FlatGradients:
    """The gradients of some parameters as one flat tensor for each dtype and device, with marks
    of which parameters have one.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], spare: list[Flat]) -> None:
        """Begin without gradients; those that there are come back with the sum, which is added
        to them.

        Args:
            parameters: by name.
            spare: flat tensors of earlier steps to write to, since memory that is new to the
                process costs more than the copy.
        """
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._before = {id(parameter): parameter.grad for parameter in parameters.values()}
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for parameter in parameters.values():
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
            parameter.grad = None
        self._kinds = list(kinds.values())
        self._spare = spare
        sizes = [sum(_real(parameter).numel() + 1 for parameter in kind) for kind in self._kinds]
        if any([len(flat) for flat in flats] != sizes for flats in spare):
            spare.clear()  # other parameters are trained now

    def take(self) -> Flat:
        """Return the gradients and leave none; zeros for a parameter that has none."""
        taken = []
        spare = self._spare.pop() if self._spare else [None] * len(self._kinds)
        for parameters, out in zip(self._kinds, spare, strict=True):
            marks = _real(parameters[0]).new_tensor(
                [float(parameter.grad is not None) for parameter in parameters]
            )
            taken.append(
                torch.cat([*(self._flat(parameter) for parameter in parameters), marks], out=out)
            )
            for parameter in parameters:
                parameter.grad = None
        return taken

    def put(self, total: Flat) -> None:
        """Give each parameter its part of the sum, of which it is a view; none to one that had
        no gradient anywhere.
        """
        for parameters, flat in zip(self._kinds, total, strict=True):
            *parts, marks = torch.split(
                flat, [*(_real(parameter).numel() for parameter in parameters), len(parameters)]
            )
            for parameter, part, mark in zip(parameters, parts, marks.tolist(), strict=True):
                before = self._before[id(parameter)]
                parameter.grad = before
                if mark:
                    gradient = _like(parameter, part)
                    parameter.grad = gradient if before is None else before + gradient

    def _flat(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None:
            return torch.zeros_like(_real(parameter), requires_grad=False).flatten()
        if gradient.layout != torch.strided:
            msg = (
                f"the gradient of {self._names[id(parameter)]} is sparse, which determinism='elastic' can't add up in its order; "
                "use sparse=False"
            )
            raise InvalidParamsError(msg)
        return _real(gradient).reshape(-1)


def _like(parameter: torch.nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """Return a flat part in the parameter's shape and layout."""
    real = part.view(_real(parameter).shape)
    shaped = torch.view_as_complex(real) if parameter.is_complex() else real
    if parameter.is_contiguous():
        return shaped
    return torch.empty_like(parameter, requires_grad=False).copy_(shaped)


def _real(values: torch.Tensor) -> torch.Tensor:
    values = values.detach()
    return torch.view_as_real(values) if values.is_complex() else values
