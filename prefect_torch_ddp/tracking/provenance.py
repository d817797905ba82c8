"""The versions of a workload's code: its commit, and those of what it imports."""

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from prefect_torch_ddp.gang.versions import versions
from prefect_torch_ddp.tracking.imports import imported_packages

GIT_TIMEOUT_S = 5.0
OTHER_NAMES = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}
"""Distributions that aren't named as their module; asking every installed one takes a second."""


def git_commit(folder: Path) -> tuple[str | None, bool]:
    """Return the commit that is checked out in a folder, and whether files differ from it.

    None without git or a commit; files that git doesn't know don't count.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(  # noqa: S603
            command, cwd=folder, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None, False
    commit, _, dirty = done.stdout.strip().partition("-")
    return commit or None, bool(dirty)


def versions_for(source: Path | None, module: str) -> dict[str, str]:
    """Return the versions of Python, of what we stand on, and of what a module imports.

    Args:
        source: the module's file; None if there is none.
        module: its name. Other modules of its own are followed, those of a distribution not.
    """
    found = dict(versions())
    for name in sorted(imported_packages(source, module)) if source else ():
        if distribution := _distribution_of(name):
            found[distribution] = version(distribution)
    return found


@cache
def _distribution_of(module: str) -> str | None:
    for name in (OTHER_NAMES.get(module, module), module):
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return name
    return next(iter(_installed().get(module, ())), None)


_installed = cache(packages_distributions)
