"""Whether all ranks begin a loop with the same dataset, batches and length; no rank waits."""

import json
from typing import Any

from prefect_torch_ddp.data.traits import differing
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.training.agreement import Agreement
from prefect_torch_ddp.rank.training.calls.plans import OverLoader, Plan


def describe_loop(plan: Plan) -> dict[str, Any]:
    """Return what is equal on all ranks if they train on one dataset; can be written as JSON."""
    here: dict[str, Any] = {"samples": 0, "traits": {}, "arguments": plan.describe()}
    if isinstance(plan, OverLoader):
        here |= {"samples": plan.batches.num_samples, "traits": plan.loader.traits}
    return here


def refuse_different(agreement: Agreement, rank: int, loop: int, plan: Plan) -> None:
    """Compare a loop with that of the rank that came to it first.

    So of any two ranks that differ one at least raises, before it has loaded a sample.

    Raises:
        InvalidParamsError: that rank has other samples, or other arguments.
    """
    if agreement.world_size == 1:
        return
    here = describe_loop(plan)
    text = json.dumps({"rank": rank, **here})
    there = json.loads(agreement.put_first(f"loop/{loop}", text))
    if why := _difference(rank, here, there):
        raise InvalidParamsError(why)


def refuse_other_order(agreement: Agreement, rank: int, loop: int, epoch: int, order: str) -> None:
    """Compare an epoch's order with that of the rank that came to the epoch first.

    Raises:
        InvalidParamsError: that rank has another one.
    """
    text = json.dumps({"rank": rank, "order": order})
    there = json.loads(agreement.put_first(f"order/{loop}/{epoch}", text))
    if there["order"] != order:
        what = f"rank {rank} has {order} and rank {there['rank']} has {there['order']}"
        msg = (
            f"ranks have different orders in epoch {epoch + 1}: {what}. The function order of "
            "ctx.loader may depend on the epoch only: seed what it draws, such as by "
            "torch.Generator().manual_seed(epoch)"
        )
        raise InvalidParamsError(msg)


def _difference(rank: int, here: dict[str, Any], there: dict[str, Any]) -> str | None:
    other, different = there["rank"], "ranks were given different datasets"
    whole = (
        "; ctx.loader shares one dataset out itself: give it the whole one, in the same order, on "
        "every rank"
    )
    own, theirs = here["arguments"], there["arguments"]
    if own.keys() != theirs.keys():
        what = f"rank {rank} with {', '.join(own)} and rank {other} with {', '.join(theirs)}"
        return f"ranks began ctx.steps differently: {what}; make the same calls on every rank"
    if here["samples"] != there["samples"]:
        sizes = f"rank {rank} has {here['samples']} samples and rank {other} has {there['samples']}"
        return f"{different}: {sizes}{whole}"
    # First, since another order may only say that something of the dataset differs.
    if (place := differing(here["traits"], there["traits"])) is not None:
        what = f"{place} of rank {rank} differs from that of rank {other}"
        return f"{different}: {what}{whole}"
    for name, value in own.items():
        if value != theirs[name]:
            what = f"rank {rank} has {name}={value} and rank {other} has {name}={theirs[name]}"
            how = "give ctx.loader and ctx.steps the same arguments on every rank"
            return f"ranks began ctx.steps differently: {what}; {how}"
    return None
