"""The versions of a workload's code: its commit, and those of what it imports."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import resolve_name
from modulefinder import ModuleFinder
from pathlib import Path
from types import CodeType

from prefect_torch_ddp.gang.versions import versions

GIT_TIMEOUT_S = 5.0
MAX_MODULES = 200
OUR_MODULE = "prefect_torch_ddp"
OTHER_NAMES = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}
"""Distributions that aren't named as their module; to ask all that are installed takes a second."""


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
        source: the module's file; None where there is none.
        module: its name. Other modules of its own are followed, those of a distribution not.
    """
    names = {name.partition(".")[0] for name in _imports(source, module)} if source else set()
    names -= {*sys.stdlib_module_names, OUR_MODULE, module.partition(".")[0]}
    found = dict(versions())
    for distribution in filter(None, map(_distribution_of, sorted(names))):
        found[distribution] = _version(distribution) or "not installed"
    return found


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@lru_cache(maxsize=256)
def _distribution_of(module: str) -> str | None:
    for name in (OTHER_NAMES.get(module), module):
        if name and _version(name):
            return name
    return next(iter(_installed().get(module, ())), None)


@lru_cache(maxsize=1)
def _installed() -> Mapping[str, list[str]]:
    return packages_distributions()


def _imports(source: Path, module: str) -> set[str]:
    """Return the dotted names that a module imports anywhere, and its own modules with it."""
    is_package = source.name == "__init__.py"
    root = source.parents[module.count(".") + is_package]
    is_installed = {"site-packages", "dist-packages"} & set(source.parts)
    own = module.partition(".")[0]
    waiting, seen, names = [(source, module)], {source}, set[str]()
    while waiting and len(seen) < MAX_MODULES:
        path, name = waiting.pop()
        for imported in _imported_by(path, name):
            names.add(imported)
            top = imported.partition(".")[0]
            if top == OUR_MODULE or (is_installed and top != own):
                continue
            stem = root.joinpath(*imported.split("."))
            for found in (stem.with_suffix(".py"), stem / "__init__.py"):
                if found not in seen and found.is_file():
                    seen.add(found)
                    waiting.append((found, imported))
    local = {each.relative_to(root).parts[0].removesuffix(".py") for each in seen}
    return {name for name in names if name.partition(".")[0] not in local}


def _imported_by(path: Path, module: str) -> Iterator[str]:
    try:
        # Not ast.parse: in Python 3.11 two at once, in two threads, may fail by SystemError.
        waiting = [compile(path.read_bytes(), str(path), "exec", dont_inherit=True)]
    except (OSError, SyntaxError, ValueError):
        return
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    while waiting:
        code = waiting.pop()
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
        for kind, found in ModuleFinder().scan_opcodes(code):
            if kind == "store":
                continue
            level, names, name = found if kind == "relative_import" else (0, *found)
            try:
                base = resolve_name("." * level + name, package)
            except ImportError:
                continue
            yield base
            yield from (f"{base}.{each}" for each in names or () if each != "*")
