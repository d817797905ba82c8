"""Versions of what the processes of a gang share, and which differences break it."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from prefect_torch_ddp.errors import VersionConflictError
from prefect_torch_ddp.protocol.messages import WorkerIdentity

PACKAGES = ("prefect-torch-ddp", "torch", "numpy", "cloudpickle", "dask", "distributed", "prefect")


@dataclass(frozen=True)
class _Rule:
    num_parts: int
    """How many parts of the version have to be equal."""
    why: str
    includes_caller: bool = True
    """Whether the caller's counts as well; else the workers' among each other."""


RULES = {
    "python": _Rule(2, "what one has pickled by value the other can't run"),
    "prefect-torch-ddp": _Rule(9, "they would misread each other's messages"),
    "cloudpickle": _Rule(1, "what one has pickled by value the other can't read"),
    "numpy": _Rule(1, "arrays that one has pickled the other can't read"),
    "torch": _Rule(2, "their ranks might not understand each other", includes_caller=False),
}
"""By package; a package that one side lacks is left to the error of who imports it."""


@cache
def versions() -> Mapping[str, str]:
    """Return the versions in this process's environment, of Python and of PACKAGES, by name."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def conflicts(
    caller: Mapping[str, str], workers: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Return what differs so that a gang would break, in words, by the package's name. Pure.

    Args:
        caller: the caller's versions.
        workers: each worker's, by its address.
    """
    found = {}
    for package, rule in RULES.items():
        who = who_has(package, ({"here": caller} if rule.includes_caller else {}) | dict(workers))
        if len({tuple(each.split(".")[: rule.num_parts]) for each in who}) > 1:
            differs = f"{package} differs: {in_words(who)}"
            found[package] = f"{differs}; {rule.why}: install the same version"
    return found


def who_has(package: str, everybody: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Return who has each version of a package; who lacks it is left out."""
    who: dict[str, list[str]] = {}
    for name, has in everybody.items():
        if version_of := has.get(package):
            who.setdefault(version_of, []).append(name)
    return who


def in_words(who: Mapping[str, Sequence[str]]) -> str:
    """Say who has which version; only the first is named."""
    return ", ".join(f"{each} {_where(names)}" for each, names in sorted(who.items()))


def _where(names: Sequence[str]) -> str:
    if names[0] == "here":
        return "here" if len(names) == 1 else f"here and on {_where(names[1:])[3:]}"
    return f"on {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def refuse_conflicts(workers: Sequence[WorkerIdentity]) -> None:
    """Raise VersionConflictError if these workers and this process can't form a gang."""
    if found := conflicts(versions(), {worker.address: worker.versions for worker in workers}):
        raise VersionConflictError("\n".join(found.values()))
