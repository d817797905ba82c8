"""Which file of a run's results is read where several attempts saved one of that name."""

from pathlib import Path

import pytest

from prefect_torch_ddp import RankContext, read_result
from prefect_torch_ddp.errors import BadKeyError, ObjectNotFoundError


def test_the_newest_attempt_that_saved_it(tmp_path: Path) -> None:
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


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    """With what is; a path that leads out is refused."""
    with RankContext.local(storage=tmp_path) as ctx:
        with pytest.raises(
            ObjectNotFoundError, match=r"run local saved no loss\.txt in .*; its files are: none"
        ):
            read_result(tmp_path, "local", "loss.txt")
        ctx.save("plots/loss.txt", "1")
    with pytest.raises(
        ObjectNotFoundError,
        match=r"run local saved no loss\.txt in .*; its files are: plots/loss\.txt",
    ):
        read_result(tmp_path, "local", "loss.txt")
    with pytest.raises(BadKeyError):
        read_result(tmp_path, "local", "../../other/results/000001/loss.txt")
