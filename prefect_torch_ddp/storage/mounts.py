"""Owns the question whether a file may be mapped into memory: a mapping whose server fails ends the process by SIGBUS."""

import os
from pathlib import Path

_LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
"""File systems of this machine: a file that is open or mapped stays readable after its name is gone."""


def is_local(folder: Path) -> bool:
    """Tell whether a folder is known to be on a file system of this machine; where nothing is known (not Linux), it isn't."""
    device = folder.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    # proc(5): mount id, parent id, device, root, mount point, options, any number of tags, "-", file system, ...
    kinds = {rest.split()[0] for mount, _, rest in (line.partition(" - ") for line in lines) if mount.split()[2] == name}
    return bool(kinds) and kinds <= _LOCAL
