"""The run record: which code ran, and in which environment."""

import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# torch's version is read from its metadata: importing it takes seconds, for this line alone.
PACKAGES = ("torch", "prefect", "dask", "distributed")
GIT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class RunRecord:
    """Which code ran, and in which environment."""

    code_version: str
    """Of this package."""
    git_commit: str | None
    """Of the working directory, with `-dirty` where files differ from it; None outside of git."""
    versions: Mapping[str, str]
    """By name: Python, then packages."""


def read_run_record(folder: Path | None = None) -> RunRecord:
    """Read the record of this process."""
    versions = {name: _version(name) for name in PACKAGES}
    return RunRecord(
        _version("prefect-torch-ddp"),
        git_commit(folder or Path.cwd()),
        {"python": platform.python_version(), **versions},
    )


def git_commit(folder: Path) -> str | None:
    """Return the commit that is checked out in a folder, or None without git or a commit."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(  # noqa: S603
            command, cwd=folder, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
