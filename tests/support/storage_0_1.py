"""The small storage that version 0.1 wrote; see `tests/data/make_storage.py`."""

import shutil
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "data/storage-0.1"
RUN_ID = "festive-wrasse-d78d8d672701"
DATASET_ID = "58f78fcf18f83a05"


def copied(to: Path) -> Path:
    """Copy it to a folder that isn't there yet, and return that."""
    return Path(shutil.copytree(FOLDER, to))
