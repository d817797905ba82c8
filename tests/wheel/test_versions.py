"""The README's examples after `pip install` of the wheel, at both ends of what pyproject allows.

Each installation takes minutes and gigabytes, so only `make wheel` runs
these. PTD_PYTHON chooses the interpreter.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.integration.test_wheel import (
    EXAMPLES,
    INSTALL_S,
    LIMIT_S,
    PROJECT,
    ROOT,
    check_examples,
    pip,
)

pytestmark = pytest.mark.timeout(2 * INSTALL_S + len(EXAMPLES) * LIMIT_S)


def lowest() -> list[str]:
    """Return the floors of what the package itself requires, as constraints."""
    floors = [
        (each.name, floor.version)
        for each in map(Requirement, PROJECT["dependencies"])
        for floor in each.specifier
        if floor.operator == ">="
    ]
    return [f"{name}=={version}" for name, version in floors]


@pytest.mark.parametrize("versions", ["lowest", "newest"])
def test_the_examples_run(versions: str, tmp_path: Path) -> None:
    """In an empty environment with the extras, by a Prefect server of those versions; the extra
    cuda, which pins Dask, can be installed."""
    python, given = tmp_path / "env/bin/python", tmp_path / "constraints.txt"
    interpreter = os.environ.get("PTD_PYTHON", sys.executable)
    subprocess.run([interpreter, "-m", "venv", tmp_path / "env"], check=True)
    given.write_text("\n".join(lowest() if versions == "lowest" else []))
    pip(python, "install", "--constraint", str(given), f"{ROOT}[analysis,aws,jobqueue]")
    pip(python, "check")
    pip(python, "install", "--dry-run", f"{ROOT}[cuda]")
    pip(python, "install", "--dry-run", f"{ROOT}[all]")
    print(versions, interpreter)
    check_examples(python, tmp_path, 2 * LIMIT_S)
