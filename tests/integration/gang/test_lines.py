"""Equal lines of ranks are merged, floods are limited, and the storage has all lines."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from prefect_torch_ddp import DirectoryStorage, RankFailedError, run_gang
from prefect_torch_ddp.gang.caller import lines
from prefect_torch_ddp.gang.caller.lines import rank_text
from prefect_torch_ddp.gang.restarts import CallAttemptLog
from prefect_torch_ddp.gang.worker.rank_process import LAST_LINES, MOST_LINES
from prefect_torch_ddp.protocol.events import GangEvent, LogLine
from prefect_torch_ddp.records.rank_log import LogFolder
from tests.support.gangs import by_rank, said_by_ranks
from tests.support.waiting import HANG_S
from tests.workloads import failing, plain

NUM_LINES = 20_000
WARNING = "[rank 1] user.code: half of it\nis done"


def flood(client: Client, attempt_log: CallAttemptLog) -> list[str]:
    """Have two ranks of one worker print; return the log of the second one."""
    said: list[str] = []

    def listen(event: GangEvent) -> None:
        if isinstance(event, LogLine):
            said.append(rank_text(event))

    call = {"args": (NUM_LINES,), "world_size": 2, "ranks_per_worker": 2}
    call |= {"process_group": "none", "attempt_log": attempt_log, "on_event": listen}
    run_gang(client, plain.flood, **call)
    return [line for line in by_rank(said) if line.startswith("[rank 1]")]


@pytest.mark.extended
def test_a_flood_is_limited_in_the_log_and_whole_in_the_storage(
    dask_client: Client, tmp_path: Path
) -> None:
    """The log has the beginning, the end, and the number of lines left out."""
    folder = LogFolder(DirectoryStorage(tmp_path), "run")
    printed = [f"rank 1 prints line {number}" for number in range(NUM_LINES)]
    for attempt_log in (CallAttemptLog(7, logs=folder), CallAttemptLog(7)):
        said = flood(dask_client, attempt_log)
        # A record has a way of its own, on which it may overtake prints that nobody has read yet.
        prints = [line for line in said if line != WARNING]
        at_once = MOST_LINES - 1  # or one more, if the record was left out
        assert prints[:at_once] == [f"[rank 1] {line}" for line in printed[:at_once]]
        assert said[-LAST_LINES:] == [f"[rank 1] {line}" for line in printed[-LAST_LINES:]]
        where = rf"; all of them in {tmp_path}/runs/run/logs/rank-00001/000007-\*\.txt"
        note = rf"\[rank 1\] ([\d,]+) lines left out{where if attempt_log.logs else ''}"
        notes = [match for line in said if (match := re.fullmatch(note, line))]
        num_left_out = sum(int(match[1].replace(",", "")) for match in notes)
        assert len(said) - len(notes) + num_left_out == NUM_LINES + 1
    (part,) = (tmp_path / "runs/run/logs/rank-00001").iterdir()
    kept = [line.split(" ", 1) for line in part.read_text().splitlines()]
    assert [line[1] for line in kept if line[1].startswith("rank 1 ")] == printed
    logged = next(i for i, line in enumerate(kept) if line[1] == "WARNING user.code: half of it")
    assert kept[logged + 1] == ["is", "done"]


def test_what_all_ranks_say_is_said_once_and_not_after_a_failure(
    dask_client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A line waits for equal lines of other ranks, but not beyond the gang's failure."""
    monkeypatch.setattr(lines, "MERGE_S", 2 * HANG_S)
    call = {"world_size": 4, "ranks_per_worker": 2}
    with caplog.at_level(logging.INFO, "prefect_torch_ddp.ranks"):
        run_gang(dask_client, plain.say_the_same_and_fail, args=(-1,), **call)
    both = ["all log this", "all say this"]
    assert sorted(said_by_ranks(caplog)) == [f"[ranks 0-3] {text}" for text in both]
    caplog.clear()
    log = CallAttemptLog(logs=LogFolder(DirectoryStorage(tmp_path), "run"))
    with caplog.at_level(logging.INFO, "prefect_torch_ddp.ranks"), pytest.raises(RankFailedError):
        run_gang(dask_client, plain.say_the_same_and_fail, args=(1,), **call, attempt_log=log)
    said = [f"[rank {rank}] {text}" for rank in range(4) for text in both]
    assert sorted(by_rank(said_by_ranks(caplog))) == sorted([*said, "[rank 1] my last words"])
    (part,) = (tmp_path / "runs/run/logs/rank-00001").iterdir()
    assert "ERROR Traceback" in part.read_text()
    # Behind or before the last print: prints and records come by ways of their own.
    assert part.read_text().count("\nValueError: a bug\n") == 1


@pytest.mark.extended
@pytest.mark.parametrize("launcher", ["auto", "exec"])
def test_lines_of_a_rank_that_is_killed_with_the_gang_arrive(
    dask_client: Client, caplog: pytest.LogCaptureFixture, launcher: str
) -> None:
    """All lines that a rank printed before the gang was stopped arrive."""
    call: dict[str, Any] = {"args": (200,), "world_size": 2, "launcher": launcher}
    for _ in range(4 if launcher == "auto" else 2):
        caplog.clear()
        with (
            caplog.at_level(logging.INFO, logger="prefect_torch_ddp.ranks"),
            pytest.raises(RankFailedError, match="all at once"),
        ):
            run_gang(dask_client, failing.print_then_fail_together, **call)
        lines = [message for message in caplog.messages if "line " in message]
        assert lines == [f"[rank 0] line {number}" for number in range(200)]
