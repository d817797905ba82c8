"""The objects that user code tracks: which are allowed, and what changes in them."""

import logging
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from prefect_torch_ddp.checkpoint.state.serial import group_sizes
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.config import Stage
from prefect_torch_ddp.rank.strategies.held import GradientWatch

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_]{1,100}")


def check_trackable(
    objects: Mapping[str, Any], tracked: Container[str], stage: Stage, *, has_begun: bool
) -> None:
    """Refuse what can't be tracked, by its name; `tracked` are taken, `steps` may have begun."""
    if has_begun:
        late = f"ctx.track({', '.join(objects)}) came after ctx.steps had begun"
        msg = f"{late}: track everything before the first step"
        raise InvalidParamsError(msg)
    if stage == "prepare":
        msg = "ctx.track in prepare: there is nothing to resume; write the dataset below ctx.data"
        raise InvalidParamsError(msg)
    for name, item in objects.items():
        methods = ("state_dict", "load_state_dict")
        lacking = [method for method in methods if not callable(getattr(item, method, None))]
        if not _NAME.fullmatch(name):  # it becomes part of a key
            msg = f"{name!r} can't name a tracked object: use letters, digits and underscores"
        elif name in tracked:
            msg = f"{name!r} is tracked already; every tracked object needs its own name"
        elif lacking:
            lacks = " and no ".join(lacking)
            msg = (
                f"{name!r} can't be tracked: {type(item).__name__} has no {lacks}; plain values "
                "of your own belong in ctx.state(best=0.0)"
            )
        else:
            continue
        raise InvalidParamsError(msg)


class TrackedWatch:
    """Warns of what a training does with tracked objects that its checkpoints can't restore."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._group_sizes: dict[str, list[int]] = {}
        self._gradients = GradientWatch()

    def take(self, objects: Mapping[str, Any]) -> None:
        """Watch these from now on."""
        self._warn_of_groups(objects)
        self._gradients.take(objects)

    def see_save(self, objects: Mapping[str, Any], number: int) -> None:
        """Look at all of them when a checkpoint of this number is written."""
        self._warn_of_groups(objects)
        self._gradients.hold(objects, number)

    def _warn_of_groups(self, objects: Mapping[str, Any]) -> None:
        """Note how many parameters each group of each optimizer has; warn if they were others.

        A checkpoint with more of them doesn't fit an optimizer as it is at the start.
        """
        for name, item in objects.items():
            now = group_sizes(item)
            before, self._group_sizes[name] = self._group_sizes.get(name, now), now
            if before != now:
                text = (
                    "the tracked optimizer %r has %s, and had %s when it was tracked: its "
                    "checkpoints from here on can't be resumed unless all are there before "
                    "ctx.track, with lr=0 for those that come later"
                )
                logger.warning(text, name, _spelled_sizes(now), _spelled_sizes(before))


def _spelled_sizes(sizes: Sequence[int]) -> str:
    groups = "group" if len(sizes) == 1 else "groups"
    return f"{len(sizes)} parameter {groups} of {', '.join(map(str, sizes))} parameters"
