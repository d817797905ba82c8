"""Whether all ranks begin a loop with the same dataset, batches and length; no rank waits.

Also whether a resumed one has numbers that mean the same as before.
"""

import json
from collections.abc import Sequence
from typing import Any

from prefect_torch_ddp.data.fetching import lists_of
from prefect_torch_ddp.data.sampler import short_digest
from prefect_torch_ddp.data.traits import differing
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.training.agreement import Agreement
from prefect_torch_ddp.rank.training.calls.plans import OverLoader, Plan
from prefect_torch_ddp.rank.training.loop_progress import Position


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


def meaning_in(plan: Plan) -> dict[str, list[Any]] | None:
    """Return what a table's numbers mean in a call: the length and digest of each list, by name."""
    return {name: [len(each), _digest(each)] for name, each in _lists(plan).items()} or None


def refuse_other_meaning(position: Position, loop: int, plan: Plan) -> None:
    """Compare a call's table with that of the same call in the checkpoint that is resumed.

    Values that follow those of then change no code.

    Raises:
        InvalidParamsError: its numbers mean something else to the model.
    """
    if loop != position.loop or position.meaning is None:
        return
    for name, values in _lists(plan).items():
        length, digest = position.meaning.get(name, (0, _digest(())))
        if _digest(values[:length]) != digest:
            msg = (
                f"the table in call {loop + 1} of ctx.steps lists the {name} in another way than "
                "at the checkpoint that is resumed, and the model would take its numbers for "
                "others: give table() the list of then. New categories go to its end. A list that "
                "is made of a set has another order in each process: sort it"
            )
            raise InvalidParamsError(msg)


def _lists(plan: Plan) -> dict[str, Sequence[str]]:
    return lists_of(plan.loader.dataset) if isinstance(plan, OverLoader) else {}


def _digest(values: Sequence[str]) -> str:
    return short_digest(repr(tuple(values)).encode(errors="surrogatepass"))


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
