"""The peers' environments: each has its own packages, and the torch of the project's .venv."""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests.yardsticks import ROOT

HOME = ROOT / ".peers"
"""Ignored by git: environments, and what the last runs left."""
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "ray": ("ray[train]==2.60.0",),
    "lightning": ("lightning==2.6.6",),
    "accelerate": ("accelerate==1.15.0", "tensorboard"),
    "dask_pytorch_ddp": ("dask-pytorch-ddp==0.2.2", "dask[distributed]==2025.3.1"),
}
"""What is installed into an environment. dask-pytorch-ddp imports `distributed.pubsub`, which Dask
2025.4 removed."""
SHARED = ("torch", "numpy")
"""Taken from the project's environment, with what they require."""


def python_of(environment: str | None) -> Path:
    """Return the interpreter of an environment that was made; None is the project's own."""
    return HOME / environment / "bin" / "python" if environment else Path(sys.executable)


def make(environment: str) -> None:
    """Install a peer, unless its environment has these packages already."""
    home, packages = HOME / environment, PACKAGES[environment]
    stamp = home / "installed"
    if stamp.exists() and stamp.read_text() == "\n".join(packages):
        return
    print(f"installing {' '.join(packages)}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
    (own,) = home.glob("lib/python*/site-packages")
    # pip counts as installed what it finds there, so that no second torch is downloaded.
    (own / "shared.pth").write_text(f"{_shared()}\n")
    install = [str(python_of(environment)), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "--disable-pip-version-check", *packages], check=True)
    stamp.write_text("\n".join(packages))


def version_of(environment: str | None, package: str) -> str:
    """Return the version of a package that an environment has."""
    code = f"import importlib.metadata as found; print(found.version({package!r}))"
    command = [str(python_of(environment)), "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _shared() -> Path:
    """Return a folder of links to the project's torch, and to nothing else that it has."""
    folder = HOME / "shared"
    folder.mkdir(parents=True, exist_ok=True)
    for name in _with_requirements(SHARED, set()):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or () if ".." not in file.parts}:
            link = folder / top
            if not link.is_symlink():
                link.symlink_to(Path(str(found.locate_file(top))))
    return folder


def _with_requirements(required: Iterable[str], seen: set[str]) -> Iterator[str]:
    for requirement in map(Requirement, required):
        try:
            needed = distribution(requirement.name).requires or ()
        except PackageNotFoundError:  # for another platform
            continue
        yield requirement.name
        for extra in {"", *requirement.extras}:
            for text in needed:
                marker = Requirement(text).marker
                if text not in seen and (not marker or marker.evaluate({"extra": extra})):
                    seen.add(text)
                    yield from _with_requirements([text], seen)
