"""DDP's average of gradients, with each rank's weight by its share of the global batch."""

import copy
import copyreg
import time
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any, Self
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from prefect_torch_ddp.checkpoint.shard import Shard
from prefect_torch_ddp.checkpoint.state.replicas import Replicas
from prefect_torch_ddp.data.sampler import BatchShare, GlobalBatches
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.config import RankInfo
from prefect_torch_ddp.rank.heartbeat_writer import HeartbeatWriter
from prefect_torch_ddp.rank.strategies.held import HeldHook
from prefect_torch_ddp.rank.strategies.micro_batches import count_rows, cut, pieces
from prefect_torch_ddp.rank.strategies.replicated import dealt_out, whole
from prefect_torch_ddp.rank.strategies.sums import Probe, SumWatch


def require_group(world_size: int) -> None:
    """Refuse to wrap a model before the ranks are connected."""
    if not dist.is_initialized():
        needs = f"ctx.wrap on {world_size} ranks needs the process group"
        msg = f"{needs}; call init_process_group first"
        raise InvalidParamsError(msg)


class ShareWeights:
    """The wrapped models of a training, and the share that their gradients count by."""

    def __init__(self, info: RankInfo, heartbeat: HeartbeatWriter | None = None) -> None:
        """Begin outside of a step, without a model; the heartbeat gets the time of waiting."""
        self._info = info
        self._world_size = info.world_size
        self.heartbeat = heartbeat or HeartbeatWriter()
        self._given: WeakSet[nn.Module] = WeakSet()
        self._models: WeakSet[DistributedDataParallel] = WeakSet()
        self._share: BatchShare | None = None
        self._uneven: list[int] = []
        self._owes = False
        """Whether the step made micro-batches whose gradients the ranks haven't summed yet."""
        self.sums = SumWatch()

    def wrap(self, model: nn.Module, device: torch.device, ddp_kwargs: dict[str, Any]) -> nn.Module:
        """Move a model to the device, and if there are several ranks make it a DDP."""
        self._given.add(model)
        model = model.to(device)
        trains = any(parameter.requires_grad for parameter in model.parameters())
        if self._world_size == 1:
            return model
        if not trains:
            self.sums.take(model, None)
            return model
        require_group(self._world_size)
        _refuse_subgroup(ddp_kwargs)
        if device.type == "cuda":
            ddp_kwargs = {"device_ids": [device], **ddp_kwargs}
        ddp = ShareDDP(model, **ddp_kwargs)
        self.take(ddp)
        _settle_buckets(ddp)
        self.sums.take(model, ddp)
        return ddp

    def take(self, ddp: "ShareDDP") -> None:
        """Count a model's gradients by share; talks to no other rank."""
        ddp.share_weights = self
        state = self, ddp.process_group, ref(ddp)
        DistributedDataParallel.register_comm_hook(ddp, state, _sum_by_share)
        self._models.add(ddp)

    def begin_loop(self, batches: GlobalBatches | None) -> None:
        """Refuse layers that talk to other ranks if these hold unequal shares of a batch."""
        ends = () if batches is None else (0, batches.num_batches - 1)
        sizes = [] if batches is None else sorted({batches.num_global(end) for end in ends})
        self._uneven = sizes if any(size % self._world_size for size in sizes) else []
        self._refuse_coupled()

    def _refuse_coupled(self) -> None:
        names = [
            name
            for model in self._models
            for name, module in model.module.named_modules()
            if isinstance(module, nn.SyncBatchNorm) and module.training
        ]
        if names and self._uneven:
            sizes = " and ".join(map(str, self._uneven))
            msg = (
                f"SyncBatchNorm ({', '.join(names)}) needs equal shares of each global batch on "
                f"all ranks, and {sizes} samples on {self._world_size} "
                "ranks have none: the gradient wouldn't be the global batch's. Choose a "
                "global_batch_size that the number of ranks divides, with drop_last=True, or use "
                "BatchNorm, GroupNorm or LayerNorm"
            )
            raise InvalidParamsError(msg)

    def begin_step(self, step: int, share: BatchShare | None) -> None:
        """Count gradients by this share from now on; None: the same on all ranks."""
        self._share = share
        self._owes = False
        self.sums.passes.begin_step(step)

    def end_step(self, step: int) -> None:
        """Refuse a step whose micro-batches were left before the ranks summed their gradients.

        And at the first step's end, since `model.train()` may stand in its body, see `begin_loop`.
        """
        self.sums.passes.end_step()
        if self._uneven:
            self._refuse_coupled()
            self._uneven = []
        if self._owes and self._models:
            msg = (
                f"step {step} left ctx.micro_batches before the last micro-batch, in which the "
                "ranks sum their gradients; go through all of them, on every rank"
            )
            raise InvalidParamsError(msg)

    def leave_loop(self) -> None:
        """Average plainly again: a loop has ended, in whatever way."""
        self._share = None
        self.sums.passes.end_step()

    def take_replicas(self) -> Replicas:
        """Return the wrapped models, and how many passes the steps since the last call summed."""
        return Replicas(list(self._given), self.sums.passes.take())

    def micro_batches(self, batch: Any, max_samples: int | None) -> Iterator[tuple[Any, float]]:
        """Yield (micro-batch, weight); ranks communicate only in the last backward pass."""
        share = self._share
        # A stand-in is one sample, whose gradient the ranks don't count.
        expected = None if share is None else max(share.num_local - share.num_skipped, 1)
        num_rows = count_rows(batch, expected)
        parts = pieces(num_rows, max_samples)
        if len(parts) > 1:
            for model in self._models:
                refuse_unsynced(model)
        synced = [(model, model.require_backward_grad_sync) for model in self._models]
        try:
            for part in parts:
                is_last = part is parts[-1]
                self._owes = not is_last
                for model, syncs in synced:
                    # What `no_sync` sets: as a context it would end here, before the user's
                    # backward pass.
                    model.require_backward_grad_sync = is_last and syncs
                yield cut(batch, part), len(part) / num_rows
        finally:
            for model, syncs in synced:
                model.require_backward_grad_sync = syncs

    def scale(self, gradients: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Scale this rank's gradients, so that the sum over the ranks is the global batch's."""
        weight = self.weight
        if weight is None:
            gradients.div_(dist.get_world_size(group))
        elif weight:
            gradients.mul_(weight)
        else:
            gradients.zero_()  # not times 0: the stand-in's gradient may be nan

    @property
    def weight(self) -> float | None:
        """What this rank's gradients count in the sum over the ranks; None: all count the same."""
        share = self._share
        if share is None or share.num_local == share.num_skipped:
            return None if share is None else 0.0
        return share.num_local / share.num_global

    def tracked(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Return the models without DDP; refuse what isn't whole on each rank."""
        return whole(objects)

    def shares(self, objects: Mapping[str, Any]) -> dict[Shard, Any]:
        """Deal out what each rank holds whole."""
        return dealt_out(objects, self._info)

    def close(self) -> None:
        """Watch optimizers no more."""
        self.sums.close()


class ShareDDP(DistributedDataParallel):
    """A DDP whose copies count by share as well; pickled, it is a plain DDP.

    Copying involves no other rank, as with plain DDP: a single rank may do it. The same holds for
    a forward pass, so any single rank may evaluate. Plain DDP would broadcast the buffers in it,
    also in `eval()`. Here a backward pass that sums gradients ends with that, and every rank
    evaluates with rank 0's running statistics.
    """

    share_weights: ShareWeights
    unsummed: frozenset[float | None] = frozenset()
    """The weights of this rank's gradients in passes within `no_sync` that aren't summed yet."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """See DDP; refuse to sum this pass with others that count by another share."""
        if self.unsummed and self.require_backward_grad_sync and torch.is_grad_enabled():
            self._refuse_mixed()
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _refuse_mixed(self) -> None:
        weight = self.share_weights.weight
        gradients = (parameter.grad for parameter in self.module.parameters())
        if not any(each is not None and bool(each.any()) for each in gradients):
            self.unsummed = frozenset()  # they were set to zero
        elif self.unsummed != {weight}:
            msg = (
                "gradients of an earlier step, made within no_sync, would be summed with those of "
                "this one, in which this rank has another share of the global batch: they would "
                "count by the wrong share. Accumulate within a step, by ctx.micro_batches; or "
                "give all ranks equal shares: drop_last=True, and a global_batch_size that the "
                "number of ranks divides"
            )
            raise InvalidParamsError(msg)

    def will_sync_module_buffers(self) -> bool:
        """Whether a forward pass does: only within `join`, which counts on it."""
        syncs: bool = super().will_sync_module_buffers()  # type: ignore[no-untyped-call]
        return syncs and self._join_config.enable

    def sync_buffers(self) -> None:
        """Take rank 0's buffers; every rank must call it."""
        if not (self.broadcast_buffers and self.modules_buffers):
            return
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        if self.modules_buffers:  # else the model has none any more
            self._sync_buffers()  # type: ignore[no-untyped-call]

    def register_comm_hook(self, state: object, hook: object) -> None:  # noqa: ARG002 - refused
        """Refuse another hook than the one that sums by share."""
        msg = (
            "register_comm_hook can't be called on what ctx.wrap returns, whose own hook sums "
            "gradients by each rank's share of the global batch; for another hook use torch's "
            "DistributedDataParallel, and give all ranks equal shares: drop_last=True, and a "
            "global_batch_size that the number of ranks divides"
        )
        raise InvalidParamsError(msg)

    def no_sync(self) -> Any:
        """Not sum the gradients of the passes within, as under plain DDP."""
        refuse_unsynced(self)
        self.share_weights.sums.leave_to_user(self.module)
        self.unsummed |= {self.share_weights.weight}
        return super().no_sync()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a copy registers again: the hook, whose process group can't be copied."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        del state["share_weights"]
        state.pop("unsummed", None)
        return {**state, "_comm_hooks": []}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with its own weights."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        state = copy.deepcopy(self.__getstate__(), memo)
        copied.__setstate__(state)  # type: ignore[no-untyped-call]
        self.share_weights.take(copied)
        return copied

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        """Be loaded without this package."""
        make_empty = copyreg._reconstructor  # type: ignore[attr-defined]  # noqa: SLF001
        return make_empty, (DistributedDataParallel, object, None), self.__getstate__()

    def _get_name(self) -> str:
        return DistributedDataParallel.__name__


def _sum_by_share(
    context: tuple[ShareWeights, dist.ProcessGroup, "ref[ShareDDP]"], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket of gradients over the ranks; a DDP communication hook."""
    weights, group, ddp_ref = context
    gradients = bucket.buffer()
    ddp = ddp_ref()
    if bucket.is_last() and ddp is not None:
        ddp.unsummed = frozenset()
        joins = ddp._join_config.enable  # noqa: SLF001
        weights.sums.summed(ddp.module, counts=not joins)
        if not joins:
            # Not before the whole pass has ended: it may still read buffers.
            engine = torch.autograd.Variable._execution_engine  # noqa: SLF001
            engine.queue_callback(ddp.sync_buffers)
    weights.scale(gradients, group)
    # With the last bucket this rank's own work is done. What a GPU computes isn't done by then.
    handed_ns = time.monotonic_ns() if bucket.is_last() and gradients.device.type == "cpu" else None
    future = dist.all_reduce(gradients, group=group, async_op=True).get_future()

    def summed(done: torch.futures.Future[Any]) -> torch.Tensor:
        if handed_ns is not None:
            weights.heartbeat.waited(handed_ns)
        total: torch.Tensor = done.value()[0]
        return total

    return future.then(summed)


def _refuse_subgroup(ddp_kwargs: Mapping[str, Any]) -> None:
    """Refuse a group of some of the ranks: shares are of a batch that all of them hold."""
    group, mesh, num_all = (
        ddp_kwargs.get("process_group"),
        ddp_kwargs.get("device_mesh"),
        dist.get_world_size(),
    )
    sizes = [] if group is None else [dist.get_world_size(group)]
    sizes += [] if mesh is None else [mesh.size()]
    if any(size != num_all for size in sizes):
        msg = (
            "ctx.wrap got a process group of other ranks than all: gradients count by each rank's "
            "share of a global batch that all ranks hold. Leave process_group out; or for a model "
            "of some of the ranks use torch's DistributedDataParallel, which averages over them"
        )
        raise InvalidParamsError(msg)


def refuse_unsynced(model: DistributedDataParallel) -> None:
    """Refuse a static graph whose first pass isn't summed, at which torch's assertion fails."""
    # Torch has no public way to it; it is set in the first backward pass.
    if model.static_graph and not getattr(model, "_static_graph_delay_allreduce_enqueued", True):
        msg = (
            "static_graph=True learns the graph from the first backward pass, which the ranks "
            "have to sum: it can't be one within no_sync, or of the first of several micro-batches"
            "; leave static_graph out, or take the first step without them"
        )
        raise InvalidParamsError(msg)


def _settle_buckets(ddp: DistributedDataParallel) -> None:
    """Have DDP lay out its buckets now, by a backward pass of zeros.

    It would do so after the first real step, by which the order of summation changes (ring
    all-reduce, three ranks or more). A resumed training would then differ in the last bit from
    one that was never interrupted.
    """
    parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
    has_hooks = any(
        not isinstance(hook, Probe | HeldHook)
        for parameter in parameters
        for hook in _hooks_of(parameter)
    )
    has_sparse = any(getattr(module, "sparse", False) for module in ddp.module.modules())
    if ddp.find_unused_parameters or ddp.static_graph or has_hooks or has_sparse:
        return  # DDP doesn't rebuild, or learns from the first pass, or the pass would have effects
    zero = torch.zeros((), device=parameters[0].device)

    def zeros(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        # A chain: its backward pass reaches the last parameter first, much as a real one does.
        return reduce(lambda total, one: total + _zero(one).to(zero.device), parameters, zero)

    ddp._run_ddp_forward = zeros  # type: ignore[method-assign]  # noqa: SLF001
    try:
        with torch.enable_grad():
            # With an input: a DDP of a device moves its inputs there, and fails if it has none.
            ddp(zero).backward()
        # The next forward pass would do this, with all ranks; it may be one rank's own.
        ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()  # noqa: SLF001
    finally:
        del ddp._run_ddp_forward  # noqa: SLF001
    for parameter in parameters:
        parameter.grad = None


def _hooks_of(parameter: torch.Tensor) -> Iterator[Any]:
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        yield from (getattr(parameter, kind, None) or {}).values()


def _zero(parameter: torch.Tensor) -> torch.Tensor:
    values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    return values.sum() * 0
