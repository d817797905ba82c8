"""The objects that user code tracks: which are allowed, how they unwrap, which is the model."""

from collections.abc import Container, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from prefect_torch_ddp.checkpoint.keys import check_name
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.config import Stage


def check_trackable(
    objects: Mapping[str, Any], tracked: Container[str], stage: Stage, *, has_begun: bool
) -> None:
    """Refuse what can't be tracked.

    Args:
        objects: by the names that they shall have.
        tracked: the names that are taken.
        stage: what this rank does.
        has_begun: whether `steps` was called.

    Raises:
        InvalidParamsError: names the object, and says why.
    """
    if has_begun:
        late = f"ctx.track({', '.join(objects)}) came after ctx.steps had begun"
        msg = f"{late}: track everything before the first step"
        raise InvalidParamsError(msg)
    if stage == "prepare":
        msg = "ctx.track in prepare: there is nothing to resume; write the dataset below ctx.data"
        raise InvalidParamsError(msg)
    for name, item in objects.items():
        check_name(name)
        if name in tracked:
            msg = f"{name!r} is tracked already; every tracked object needs a name of its own"
            raise InvalidParamsError(msg)
        methods = ("state_dict", "load_state_dict")
        lacking = [method for method in methods if not callable(getattr(item, method, None))]
        if lacking:
            lacks = " and no ".join(lacking)
            msg = f"{name!r} can't be tracked: {type(item).__name__} has no {lacks}"
            raise InvalidParamsError(msg)


def unwrapped(item: Any) -> Any:
    """Return the bare module of a DDP or compiled one, whose weights load without a prefix.

    Anything else is returned as it is.
    """
    while isinstance(item, nn.Module):
        is_ddp = isinstance(item, DistributedDataParallel)
        inner = item.module if is_ddp else getattr(item, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            break
        item = inner
    return item


def model_among(objects: Mapping[str, Any]) -> str | None:
    """Return the name of the model: "model", or the only module; None where it isn't clear."""
    if "model" in objects:
        return "model"
    modules = [name for name, item in objects.items() if isinstance(item, nn.Module)]
    return modules[0] if len(modules) == 1 else None
