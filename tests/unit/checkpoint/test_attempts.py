"""Shows that every attempt of a run is claimed once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prefect_torch_ddp.checkpoint.attempts import claim_attempt, newest_attempt
from prefect_torch_ddp.storage.directory import DirectoryStorage


def test_attempts_count_from_one_and_are_claimed_once(tmp_path: Path) -> None:
    """Racing callers get different ones."""
    storage = DirectoryStorage(tmp_path)
    assert newest_attempt(storage, "run") == 0
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: claim_attempt(storage, "run"), range(8)))
    assert sorted(claimed) == list(range(1, 9))
    assert newest_attempt(storage, "run") == 8
    assert (tmp_path / "runs/run/attempts/000008").exists()


def test_runs_whose_names_begin_alike_are_apart(tmp_path: Path) -> None:
    """`run` isn't `run2`."""
    storage = DirectoryStorage(tmp_path)
    claim_attempt(storage, "run2")
    assert claim_attempt(storage, "run") == 1
