"""What all integrations refuse in the same words."""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.context import RankContext


def refuse_options(refused: dict[str, bool]) -> None:
    """Raise InvalidParamsError if any of these is set; the error names each that is."""
    if found := [name for name, is_set in refused.items() if is_set]:
        msg = f"attach can't keep this training right: it uses {'; '.join(found)}"
        raise InvalidParamsError(msg)


def refuse_other_ranks(ctx: RankContext, library: str, files: str) -> None:
    """Raise InvalidParamsError if the newest commit is of another number of ranks or program.

    Args:
        ctx: this rank's context.
        library: whose trainer it is.
        files: a pattern of files of which each rank has committed one.
    """
    if ctx.committed is None:
        return
    size = len(list(ctx.committed.glob(files)))
    if not size:
        msg = f"the commit has no {files}, which attach writes: another program made it"
        raise InvalidParamsError(msg)
    if size != ctx.world_size:
        msg = (
            f"the commit is of {size} ranks and this gang has {ctx.world_size}: {library} "
            f"would give them other batches; continue on {size} ranks"
        )
        raise InvalidParamsError(msg)


def sizes_of(loaders: list[Any]) -> dict[str, list[Any]]:
    """Return, in words, what an epoch of each DataLoader consists of, to be kept in a commit."""
    counts = [
        f"{_num_in(getattr(loader, 'dataset', None))} samples in {_num_in(loader)} batches"
        for loader in loaders
    ]
    return {"sizes": counts, "batch_sizes": [batch_size_of(loader) for loader in loaders]}


def refuse_other_sizes(kept: dict[str, Any], loaders: list[Any]) -> None:
    """Raise InvalidParamsError if the epoch to be finished began with other sizes.

    Args:
        kept: includes what `sizes_of` returned then.
        loaders: the DataLoaders with which the epoch would be finished.
    """
    here = sizes_of(loaders)
    there = {name: kept[name] for name in here}
    if there != here:
        msg = (
            f"the commit is from the middle of an epoch of {_said(there)}, and here it has "
            f"{_said(here)}: some samples would be used twice or never. Finish the epoch with "
            "the former dataset and batch size, and change them between epochs"
        )
        raise InvalidParamsError(msg)


def batch_size_of(loader: Any) -> int | None:
    """Return how many samples a batch has; None if a batch_sampler of the user's decides."""
    for each in (loader, getattr(loader, "batch_sampler", None)):
        if isinstance(size := getattr(each, "batch_size", None), int):
            return size
    return None


def reason_against(path: Path) -> str | None:
    """Return why `torch.load(weights_only=True)` refuses a file, in a few words; None: it loads.

    Torch's own text has ten lines, most of which advise to load the file without the check.
    """
    try:
        torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except UnpicklingError as error:  # raised while the short one was handled
        return str(error.__context__ or error).partition(" was not an allowed global")[0]
    except RuntimeError as error:  # it isn't of the kind that torch.save writes today
        return str(error).partition("\n")[0]
    return None


def _said(sizes: dict[str, list[Any]]) -> str:
    return "; ".join(
        counts if batch_size is None else f"{counts} of {batch_size}"
        for counts, batch_size in zip(sizes["sizes"], sizes["batch_sizes"], strict=False)
    )


def _num_in(sized: Any) -> str:
    try:
        return str(len(sized))
    except (TypeError, NotImplementedError):
        return "an unknown number of"
