"""The types of the public names are a promise too, and mypy is the one who holds us to it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_public_names_are_typed_as_promised() -> None:
    """A ddp_task is called with its function's own parameters after the rank, and gives its
    value; mistakes are refused."""
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--warn-unused-ignores",
        "tests/typing/api.py",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.stdout.strip() == "Success: no issues found in 1 source file", (
        done.stdout + done.stderr
    )
