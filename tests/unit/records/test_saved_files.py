"""What `ctx.save` wrote is read as the newest attempt left it; a file that isn't there is named."""

from pathlib import Path

import pytest

from prefect_torch_ddp import RankContext, read_result
from prefect_torch_ddp.errors import BadKeyError, ObjectNotFoundError
from prefect_torch_ddp.records.saved_files import evaluation_folder, write_result
from prefect_torch_ddp.storage.directory import DirectoryStorage


def test_of_files_the_newest_attempts_is_read(tmp_path: Path) -> None:
    """Also of one that only an older attempt saved; each attempt's stays under its own
    number."""
    for number in range(1, 12):
        with RankContext.local(storage=tmp_path) as ctx:
            ctx.save("plots/loss.txt", f"attempt {number}")
            if number == 2:
                ctx.save("once.bin", b"\x00")
    # What somebody else left there is no attempt's.
    (tmp_path / "runs/local/results/notes/plots").mkdir(parents=True)
    (tmp_path / "runs/local/results/notes/plots/loss.txt").write_text("not an attempt's")
    assert read_result(tmp_path, "local", "plots/loss.txt") == b"attempt 11"
    assert read_result(str(tmp_path), "local", "once.bin") == b"\x00"
    assert (tmp_path / "runs/local/results/000003/plots/loss.txt").read_text() == "attempt 3"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """With what is; a path that leads out is refused."""
    with RankContext.local(storage=tmp_path) as ctx:
        says = r"run local saved no loss\.txt in .*; its files are: "
        with pytest.raises(ObjectNotFoundError, match=f"{says}none"):
            read_result(tmp_path, "local", "loss.txt")
        ctx.save("plots/loss.txt", "1")
    with pytest.raises(ObjectNotFoundError, match=rf"{says}plots/loss\.txt"):
        read_result(tmp_path, "local", "loss.txt")
    with pytest.raises(BadKeyError):
        read_result(tmp_path, "local", "../../other/results/000001/loss.txt")


def test_a_file_that_only_an_evaluation_saved_is_named_with_its_step(tmp_path: Path) -> None:
    """The refusal named the run's own files, which the path isn't among."""
    with RankContext.local(storage=tmp_path) as ctx:
        ctx.save("own.txt", "1")
    storage = DirectoryStorage(tmp_path)
    for step in (20, 5):
        write_result(storage, "local", evaluation_folder(step), "plots/loss.txt", "1")
    says = "its files are: own.txt; evaluate_flow saved it: pass evaluated_step=5 or 20"
    with pytest.raises(ObjectNotFoundError, match=f"{says}$"):
        read_result(tmp_path, "local", "plots/loss.txt")
    with pytest.raises(ObjectNotFoundError, match=r"its files are: own\.txt$"):
        read_result(tmp_path, "local", "loss.txt")
