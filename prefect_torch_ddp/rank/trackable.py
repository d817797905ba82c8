"""Owns the refusal of objects that can't be tracked. Pure."""

from collections.abc import Container, Mapping
from typing import Any

from prefect_torch_ddp.checkpoint.keys import check_name
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.config import Stage


def check_trackable(objects: Mapping[str, Any], tracked: Container[str], stage: Stage, *, has_begun: bool) -> None:
    """Refuse what can't be tracked.

    Args:
        objects: by the names that they shall have.
        tracked: the names that are taken.
        stage: what this rank does.
        has_begun: whether the first step has.

    Raises:
        InvalidParamsError: names the object, and says why.
    """
    if has_begun:
        msg = f"rank.track({', '.join(objects)}) came after rank.steps had begun: track everything before the first step"
        raise InvalidParamsError(msg)
    if stage == "prepare":
        msg = "rank.track in prepare: there is nothing to resume; write the dataset below rank.data"
        raise InvalidParamsError(msg)
    for name, item in objects.items():
        check_name(name)
        if name in tracked:
            msg = f"{name!r} is tracked already; every tracked object needs a name of its own"
            raise InvalidParamsError(msg)
        lacking = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(item, method, None))]
        if lacking:
            msg = f"{name!r} can't be tracked: {type(item).__name__} has no {' and no '.join(lacking)}"
            raise InvalidParamsError(msg)
