"""Whether all ranks begin a loop with the same dataset, batches and epochs; no rank waits."""

import json
from typing import TYPE_CHECKING, Any

from prefect_torch_ddp.data.traits import differing
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.training.agreement import Agreement

if TYPE_CHECKING:
    from prefect_torch_ddp.data.loader import RankLoader


def describe_loop(loader: "RankLoader", epochs: float) -> dict[str, Any]:
    """Return what is equal on all ranks where they train on one dataset; can be written as JSON."""
    batches = loader.batches
    return {
        "samples": batches.num_samples,
        "traits": loader.traits,
        "arguments": {
            "global_batch_size": batches.global_batch_size,
            "order": loader.order,
            "drop_last": batches.drop_last,
            "epochs": epochs,
        },
    }


def refuse_different(
    agreement: Agreement, rank: int, loop: int, loader: "RankLoader", epochs: float
) -> None:
    """Compare a loop with that of the rank that came to it first.

    So of any two ranks that differ one at least raises, before it has loaded a sample.

    Raises:
        InvalidParamsError: that rank has other samples, or other arguments.
    """
    if agreement.world_size == 1:
        return
    here = describe_loop(loader, epochs)
    text = json.dumps({"rank": rank, **here})
    there = json.loads(agreement.put_first(f"loop/{loop}", text))
    if why := _difference(rank, here, there):
        raise InvalidParamsError(why)


def _difference(rank: int, here: dict[str, Any], there: dict[str, Any]) -> str | None:
    other, different = there["rank"], "ranks were given different datasets"
    whole = (
        "; ctx.loader shares one dataset out itself: give it the whole one, in the same order, on "
        "every rank"
    )
    if here["samples"] != there["samples"]:
        sizes = f"rank {rank} has {here['samples']} samples and rank {other} has {there['samples']}"
        return f"{different}: {sizes}{whole}"
    arguments = there["arguments"]
    for name, value in here["arguments"].items():
        if value != arguments[name]:
            what = f"rank {rank} has {name}={value} and rank {other} has {name}={arguments[name]}"
            how = "give ctx.loader and ctx.steps the same arguments on every rank"
            return f"ranks began ctx.steps differently: {what}; {how}"
    if (place := differing(here["traits"], there["traits"])) is not None:
        what = f"{place} of rank {rank} differs from that of rank {other}"
        return f"{different}: {what}{whole}"
    return None
