"""The example workloads' optimizers and schedules on a resume, which may have other options."""

import copy
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from prefect_torch_ddp import InvalidParamsError, RankContext


def renew_options(optimizer: Optimizer) -> None:
    """Give an optimizer the options again that it was made with, such as `lr` and `weight_decay`.

    On a resume, `ctx.track` restores the options that the checkpoint has. Without this call, those
    of this run would have no effect, though its record shows them. Call it after `ctx.track`, and
    before you make a schedule. It is for an optimizer whose groups all have the same options.

    Args:
        optimizer: was made with the run's options.

    Raises:
        InvalidParamsError: an option, such as `weight_decay`, differs between the groups; or the
            optimizer doesn't keep what it was made with.
    """
    if "lr" not in optimizer.defaults:
        msg = (
            f"{type(optimizer).__name__} has no default lr that renew_options could give its "
            "groups; instead of calling it, set the options of each group after ctx.track"
        )
        raise InvalidParamsError(msg)
    first, *others = optimizer.param_groups
    own = {"params", "param_names"}
    names = {name for each in others for name in each.keys() | first.keys()} - own
    for name in sorted(names):
        values = [each.get(name) for each in optimizer.param_groups]
        if any(value != values[0] for value in values):
            msg = (
                f"{name} of the optimizer's groups is {values}, and renew_options would give all "
                "groups the same; instead of calling it, set the options of each group after "
                "ctx.track"
            )
            raise InvalidParamsError(msg)
    for group in optimizer.param_groups:
        # Copies: a schedule writes into a rate that is a tensor.
        group.update(copy.deepcopy(optimizer.defaults))
        # A schedule that continues computes its rates from `initial_lr`.
        group["initial_lr"] = copy.deepcopy(optimizer.defaults["lr"])


def one_cycle(
    ctx: RankContext,
    optimizer: Optimizer,
    max_lr: float,
    *,
    epochs: int,
    num_batches: int,
    **options: Any,
) -> OneCycleLR:
    """Return one cycle over all epochs, at the step of the checkpoint.

    Call it after `ctx.track`, and don't track what it returns: the state of a `OneCycleLR` has its
    length, and a training that is resumed for more epochs needs a longer one.

    Args:
        ctx: has the step.
        optimizer: is restored already.
        max_lr: the highest learning rate.
        epochs: of the whole training.
        num_batches: of an epoch; step the scheduler after each of them.
        **options: other arguments of `OneCycleLR`.
    """
    total = num_steps(ctx, optimizer, epochs=epochs, num_batches=num_batches)
    # Its options, which the checkpoint may have from another schedule, and then its place.
    scheduler = OneCycleLR(optimizer, max_lr, total_steps=total, **options)
    if ctx.step == 0:
        return scheduler
    return OneCycleLR(optimizer, max_lr, total_steps=total, last_epoch=ctx.step - 1, **options)


def num_steps(ctx: RankContext, optimizer: Optimizer, *, epochs: int, num_batches: int) -> int:
    """Return how many steps a training will have made at its end; `ctx.step` of them are done.

    `epochs * num_batches` would be wrong after a resume with another `global_batch_size`: earlier
    epochs had more or fewer steps. A schedule of that length could be over before it continues, and
    the new epochs would learn nothing.

    The number is kept in the optimizer, and so in each checkpoint: from the step of a checkpoint
    within an epoch nobody could tell how many steps that epoch has had, and a restart would
    continue with a schedule of another length.

    Args:
        ctx: has the step and the epoch; call `ctx.track` before.
        optimizer: is tracked.
        epochs: of the whole training.
        num_batches: of an epoch from now on.
    """
    planned: list[int] = optimizer.param_groups[0].get("planned", [])
    if planned[:2] != [epochs, num_batches]:
        num_done = ctx.epoch if ctx.epoch_ended else max(ctx.epoch - 1, 0)
        left = max(epochs - num_done, 0) * num_batches
        if not ctx.epoch_ended:
            left -= _num_within(ctx.step, num_done, num_batches, planned)
        planned = [epochs, num_batches, ctx.step + max(left, 0)]
        for group in optimizer.param_groups:
            group["planned"] = planned
    return planned[2]


def _num_within(step: int, num_done: int, num_batches: int, planned: list[int]) -> int:
    """Return how many of an epoch's batches are done, if it goes on after `num_done` epochs.

    With another batch size it is rather too few than too many: a schedule may be a little longer
    than the training, but never shorter.
    """
    if not planned:  # a checkpoint from before there were plans: of the same batch size, if it fits
        within = step - num_done * num_batches
        return within if 0 <= within < num_batches else 0
    old_epochs, old_num, old_total = planned
    within = min(max((old_epochs - num_done) * old_num - (old_total - step), 0), old_num)
    if old_num == num_batches:
        return within
    # The loader goes on at `within * old size // new size`. The sizes aren't known, but each of the
    # n batches of a dataset, its tail left out or not, has more than 1 / (n + 1) of it, and less
    # than 1 / (n - 1).
    return within * (num_batches - 1) // (old_num + 1)
