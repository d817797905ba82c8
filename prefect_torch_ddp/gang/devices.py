"""Owns the decision which of its worker's visible CUDA devices a rank takes. Pure."""

from collections import Counter
from collections.abc import Sequence


def visible_names(cuda_visible_devices: str | None) -> tuple[str, ...] | None:
    """Return the names in a CUDA_VISIBLE_DEVICES: numbers, or UUIDs of GPUs or MIG instances; None where it isn't set.

    CUDA itself stops reading at the first name that is no device.
    """
    if cuda_visible_devices is None:
        return None
    names: list[str] = []
    for part in cuda_visible_devices.split(","):
        name = part.strip()
        if not name or name.startswith("-") or name in ("NoDevFiles", "void", "none"):
            break
        names.append(name)
    return tuple(names)


def share_out(visible: Sequence[tuple[str, ...] | None]) -> tuple[int | None, ...]:
    """Give each rank of a host, in order, the device that the fewest ranks before it have; the first in its list of those.

    One rule for all ways of sharing GPUs out: lists that are rotated (dask-cuda), that are the same everywhere, or that each
    hold a worker's own devices.

    Args:
        visible: for each rank the names that its worker sees.

    Returns:
        For each rank the position in its list; None where the list isn't known or is empty.
    """
    used: Counter[str] = Counter()
    positions: list[int | None] = []
    for names in visible:
        if not names:
            positions.append(None)
            continue
        position = min(range(len(names)), key=lambda index: (used[names[index]], index))
        used[names[position]] += 1
        positions.append(position)
    return tuple(positions)
