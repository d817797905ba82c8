"""A gang without progress is ended with the name of the missing rank; a healthy one isn't."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from prefect_torch_ddp import GangHungError, RankFailedError, run_gang
from prefect_torch_ddp.protocol.events import GangEvent, LogLine, RankStack
from tests.support.gangs import RUN_WITH_CONTEXT, own_cluster
from tests.workloads import hanging, plain


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Connect to a separate cluster: two workers of one thread."""
    with own_cluster(2) as (_, client):
        yield client


def run_hanging(
    client: Client, folder: Path, how: str, *, timeout_s: float = 3.0, **options: Any
) -> tuple[GangHungError, dict[int, str]]:
    """Run a training that hangs; return the error and the stacks that came as events."""
    events: list[GangEvent] = []
    options.setdefault("world_size", 2)
    with pytest.raises(GangHungError) as caught:
        run_gang(
            client,
            RUN_WITH_CONTEXT,
            args=(hanging.config_in(folder), hanging.train, (how, 1)),
            progress_timeout_s=timeout_s,
            on_event=events.append,
            **options,
        )
    return caught.value, {
        event.rank: event.text for event in events if isinstance(event, RankStack)
    }


def line_of(text: str) -> int:
    """Return the number of the line of the workload that holds this text."""
    lines = Path(hanging.__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.extended
def test_a_rank_asleep_is_named_with_its_line(client: Client, tmp_path: Path) -> None:
    """The error has rank, host, step, file, line and function of a rank that sleeps."""
    call = {"world_size": 3, "ranks_per_worker": 2, "attempt": 3}
    error, stacks = run_hanging(client, tmp_path, "sleep", **call)
    assert (error.ranks, error.hosts, error.attempt) == ((1,), ("127.0.0.1",), 3)
    assert error.hang.step == 3
    at = f"hanging.py:{line_of('time.sleep(LONG_S)')} in hang"
    assert "rank 1 on 127.0.0.1 did not arrive: for " in str(error)
    assert error.hang.summary.endswith(
        f"s it has been in step 3 at {at}, while ranks 0, 2 are waiting in a collective of step 3"
    )
    assert sorted(stacks) == sorted(error.stacks) == [0, 1, 2]
    assert "in all_reduce" in stacks[0]
    assert "in hang" in stacks[1]
    assert run_gang(client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("how", "says", "options"),
    [
        ("busy", "in work", {"timeout_s": 1.0}),  # as long as it works it gets ten times the limit
        ("hold_the_lock", "in hang", {"timeout_s": 2.0}),  # C code keeps the interpreter's lock
        ("sleep", "in hang", {"launcher": "exec"}),  # a fresh process can be asked too
        ("stop", "(ddp-rank-1) of rank 1 is stopped (SIGSTOP)", {}),
        ("data_worker", "of rank 1 is stopped (SIGSTOP)", {}),
    ],
)
def test_a_rank_that_is_not_asleep_is_named_too(
    client: Client, tmp_path: Path, how: str, says: str, options: dict[str, Any]
) -> None:
    """The stack of a rank in an endless loop or C code arrives, and a stopped process is named."""
    error, stacks = run_hanging(client, tmp_path, how, **options)
    assert error.ranks == (1,)
    assert "rank 1 on 127.0.0.1 did not arrive" in error.hang.summary
    assert says in error.hang.summary
    # It had fetched ahead, or not yet.
    batch = re.search("it has been waiting for the batch of step [23] at", error.hang.summary)
    assert bool(batch) == (how == "data_worker")
    assert sorted(stacks) == [0, 1]
    assert ("did not answer" in stacks[1]) == (how == "stop")


def test_one_collective_more(client: Client, tmp_path: Path) -> None:
    """The error says that collectives don't match, or which rank had left."""
    args = hanging.config_in(tmp_path), hanging.train, ("one_collective_more", 1)
    says = "wait in different collectives|had already returned"
    with pytest.raises((GangHungError, RankFailedError), match=says):
        run_gang(client, RUN_WITH_CONTEXT, args=args, world_size=2, progress_timeout_s=3.0)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("what", "timeout_s"),
    [
        pytest.param("loading_asleep", 1.0, marks=pytest.mark.more),
        ("loading_at_work", 1.0),
        ("saving", 1.0),
        ("validating_asleep", 1.0),
        pytest.param("validating_at_work", 2.0, marks=pytest.mark.more),
        ("compiling", 1.0),
    ],
)
def test_what_may_take_long_is_no_hang(
    client: Client, tmp_path: Path, what: str, timeout_s: float
) -> None:
    """Rank 0 may take four times the limit to load, save, validate or compile."""
    events: list[GangEvent] = []
    args = hanging.config_in(tmp_path), hanging.slow_but_fine, (what, 4 * timeout_s)
    options = {"progress_timeout_s": timeout_s, "on_event": events.append}
    values = run_gang(client, RUN_WITH_CONTEXT, args=args, world_size=2, **options)
    assert values == [hanging.NUM_STEPS] * 2
    # It was seen, and judged right: else this test would show nothing.
    lines = [event.text for event in events if isinstance(event, LogLine)]
    assert any("which may be normal" in line and "rank 0" in line for line in lines), lines


def test_a_slow_restore_is_no_hang(client: Client, tmp_path: Path) -> None:
    """A resumed training whose load_state_dict takes four times the limit makes its steps."""
    for what, seconds in (("saving", 0.0), ("restoring", 4.0)):
        args = hanging.config_in(tmp_path), hanging.slow_but_fine, (what, seconds)
        call = {"args": args, "world_size": 2, "progress_timeout_s": 1.0}
        assert run_gang(client, RUN_WITH_CONTEXT, **call) == [hanging.NUM_STEPS] * 2


@pytest.mark.parametrize(
    ("args", "limit_s"),
    [
        ((2.0,), None),  # without a limit nobody watches
        ((9.0, 8), 3.0),  # report_progress() now and then: three limits of sleep in all
    ],
)
def test_a_plain_function_may_sleep(
    client: Client, args: tuple[float, ...], limit_s: float | None
) -> None:
    """A function that isn't watched, or that reports, isn't ended."""
    call = {"args": args, "world_size": 2, "progress_timeout_s": limit_s}
    assert run_gang(client, hanging.plain_sleep, **call) == ["slept"] * 2


def test_a_plain_function_that_opted_in_is_watched(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """With a limit, progress counts from the start, and all stacks go to the log."""
    says = r"rank 0 on .* did not arrive: .* in its function at hanging.py:\d+ in plain_hang"
    call = {"args": (0,), "world_size": 2, "progress_timeout_s": 3.0}
    with (
        caplog.at_level(logging.INFO, "prefect_torch_ddp.ranks"),
        pytest.raises(GangHungError, match=says),
    ):
        run_gang(client, hanging.plain_hang, **call)
    for rank in (0, 1):
        assert f"[rank {rank}] is at, the innermost call first:" in caplog.text
