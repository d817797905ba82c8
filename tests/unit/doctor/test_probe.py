"""The doctor's look at a storage that fails: nothing is left there."""

from pathlib import Path

import pytest
from rich.console import Console

from prefect_torch_ddp.doctor.command import TRIAL_BYTES, Doctor
from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.storage.directory import DirectoryStorage


class Unreadable(DirectoryStorage):
    """Can't give back an object as large as the doctor's."""

    def read(self, key: str) -> bytes:
        if len(data := super().read(key)) >= TRIAL_BYTES:
            msg = "the disk has bad blocks"
            raise StorageError(msg)
        return data


def test_what_was_written_to_try_the_storage_is_deleted(tmp_path: Path) -> None:
    """Also if it can't be read back, which is what the error says."""
    storage = Unreadable(tmp_path)
    with pytest.raises(StorageError, match="bad blocks"):
        Doctor(Console(), None, 1).storage(storage, None, [])
    assert not list(storage.list("probes/"))
