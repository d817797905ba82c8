"""The doctor's look at a storage that fails: nothing is left there."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from prefect_torch_ddp.doctor.command import TRIAL_BYTES, Doctor, look_at_storage
from prefect_torch_ddp.doctor.on_worker import SHARE, fails_to_use
from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import StoredObject, trial_object


class Unreadable(DirectoryStorage):
    """Can't give back an object as large as the doctor's."""

    def read(self, key: str) -> bytes:
        if len(data := super().read(key)) >= TRIAL_BYTES:
            msg = f"can't read {self.uri}/{key}: the disk has bad blocks"
            raise StorageError(msg)
        return data


@dataclass(frozen=True)
class Failing(DirectoryStorage):
    """Can't do one thing."""

    fails: str = ""

    def read(self, key: str) -> bytes:
        self._try("read", key)
        return super().read(key)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        self._try("write", key)
        return super().write_if_absent(key, data)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        self._try("list", prefix)
        return super().list(prefix)

    def delete(self, key: str) -> None:
        self._try("delete", key)
        super().delete(key)

    def _try(self, operation: str, key: str) -> None:
        if operation == self.fails:
            msg = f"can't {operation} {self.uri}/{key}: the disk has bad blocks"
            raise StorageError(msg)


def test_what_was_written_to_try_the_storage_is_deleted(tmp_path: Path) -> None:
    """Also if it can't be read back, which is what the error says, without the object's name."""
    storage = Unreadable(tmp_path)
    with pytest.raises(StorageError, match=f"^can't read {storage.uri}/: the disk has bad blocks$"):
        Doctor(Console(), None, 1).storage(storage, None, [])
    assert not list(storage.list("probes/"))


def test_a_worker_that_does_not_see_it_is_told_of_without_its_name(tmp_path: Path) -> None:
    """The storage is what a reader knows; the object was deleted meanwhile."""
    with trial_object(DirectoryStorage(tmp_path / "mine")) as key:
        says = fails_to_use(DirectoryStorage(tmp_path / "another"), key)
    assert says == f"doesn't see what was written here to {tmp_path}/another: {SHARE}"


@pytest.mark.parametrize("operation", ["write", "read", "list", "delete"])
def test_what_a_check_of_a_storage_can_not_do_names_the_storage(
    tmp_path: Path, operation: str
) -> None:
    """And the operation, in place of an object of a random name."""
    storage = Failing(tmp_path, operation)
    with pytest.raises(StorageError) as error:
        storage.check_writable()
    assert str(error.value) == f"can't {operation} {tmp_path}/: the disk has bad blocks"
    assert (tmp_path / "probes").exists() == (operation == "delete")


def test_a_link_out_of_the_storage_is_named_by_its_folder(tmp_path: Path) -> None:
    """That folder is known to everybody who lists the storage."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store/probes").symlink_to(tmp_path)
    with pytest.raises(
        StorageError, match=r"^probes leads out of .*/store by a symbolic link, to "
    ):
        DirectoryStorage(tmp_path / "store").check_writable()


@pytest.mark.parametrize("given", [None, "mine"])
def test_without_a_storage_that_of_a_training_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """And the doctor says which one it is; workers of a given cluster may have another."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    console = Console(record=True, width=200)
    doctor = Doctor(console, None, 1)
    look_at_storage(doctor, given, None, ["tcp://10.0.0.1:4000"], is_cluster_given=True)
    said = console.export_text()
    usual = (
        "no --storage is given: checking ~/prefect-torch-ddp, where a training writes by default"
    )
    assert (usual in said) == (given is None)
    assert f"the storage {tmp_path / (given or 'prefect-torch-ddp')} honours" in said
    untried = "whether the workers can use ~/prefect-torch-ddp: give the storage of your runs"
    assert [untried in each for each in doctor.untried] == [True] * (given is None)
    assert doctor.problems == []
