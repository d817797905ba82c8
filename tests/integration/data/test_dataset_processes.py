"""Processes download a prepared dataset once a host, and one of two publishes it whole."""

import multiprocessing
import shutil
from pathlib import Path

import pytest

from prefect_torch_ddp.data.datasets.dataset_store import local_dataset
from tests.unit.data.datasets.test_dataset_store import FILES, content_of, publish, storage_of


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def _read_whole(folder: Path) -> None:
    assert content_of(local_dataset(storage_of("far", folder), "d")) == FILES


def _publish_own(kind: str, folder: Path, number: int) -> None:
    files = {f"{i}.txt": f"{number}".encode() for i in range(40)}
    publish(storage_of(kind, folder), files)


def _run_all(processes: list[multiprocessing.process.BaseProcess]) -> None:
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(processes)


def test_processes_of_one_host_download_once(tmp_path: Path) -> None:
    """Four ranks that ask at once read each file once and get it whole."""
    publish(storage_of("far", tmp_path), FILES)
    context = multiprocessing.get_context("fork")
    _run_all([context.Process(target=_read_whole, args=(tmp_path,)) for _ in range(4)])
    reads = (tmp_path / "reads").read_text().splitlines()
    read = sorted(key.split("/", 3)[3] for key in reads if "/files-" in key)
    assert read == sorted(FILES)
    staging = (tmp_path / "home").glob("*/datasets/.staging/*")
    assert not [path for path in staging if path.is_dir()]


@pytest.mark.parametrize("kind", ["directory", "far"])
def test_two_that_publish_at_once_leave_one_whole_dataset(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two different results of `prepare` never mix."""
    context = multiprocessing.get_context("fork")
    for round_ in range(5):
        folder = tmp_path / str(round_)
        folder.mkdir()
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "home"))
        calls = ((kind, folder, number) for number in range(2))
        _run_all([context.Process(target=_publish_own, args=arguments) for arguments in calls])
        found = content_of(local_dataset(storage_of(kind, folder), "d"))
        assert len(found) == 40
        assert len(set(found.values())) == 1
        shutil.rmtree(folder)
