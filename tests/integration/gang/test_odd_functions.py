"""Functions that behave oddly: their values and lines arrive, and what they leave is gone."""

import logging
import pickle
from typing import Any

import pytest
from distributed import Client

from prefect_torch_ddp import RankFailedError, run_gang
from tests.workloads import failing, plain


def test_rank_0_may_return_first(dask_client: Client) -> None:
    """Rank 0 serves the store: its peers may use it, and make groups without it, after its
    function returned."""
    assert run_gang(dask_client, plain.meet_after_rank_0_returned, world_size=2) == [0, 1]


@pytest.mark.parametrize("launcher", ["auto", "exec"])
def test_lines_of_a_rank_that_is_killed_with_the_gang_arrive(
    dask_client: Client, caplog: pytest.LogCaptureFixture, launcher: str
) -> None:
    """What a rank had printed before the gang was stopped is passed on, all of it."""
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


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("mute", "_MuteError"),
        ("endless", "_EndlessError"),
        ("angry", "_AngryError"),
        ("huge", "ValueError: xxx"),
        ("group", "ExceptionGroup: several"),
        ("chain", "ValueError: link 999"),
        ("generator_exit", "GeneratorExit"),
        ("exit_text", r"left by sys.exit\('a text'\)"),
        ("abort", "killed by SIGABRT"),
        ("recursion", "RecursionError"),
        ("c_stack", "killed by SIGSEGV"),
        ("fatal", "killed by SIGABRT"),
        ("no_files", "rank 1 "),
        ("bad_handler", "rank 1 "),
    ],
)
def test_odd_failures_are_told(dask_client: Client, how: str, says: str) -> None:
    """Whatever its exception does when it is shown or pickled, rank 1 is named."""
    with pytest.raises(RankFailedError, match=says) as caught:
        run_gang(dask_client, failing.fail_oddly, args=(how,), world_size=2)
    assert caught.value.rank == 1
    assert len(str(caught.value)) < 100_000
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    "hows",
    [
        ("closes_stdout", "no_death_signal"),
        ("thread", "handlers", "folder", "logs_much"),
        ("faulthandler", "other_group", "holds_stdout"),
        ("leaves_a_writer",),
    ],
    ids=", ".join,
)
def test_odd_functions_end_well(
    dask_client: Client, caplog: pytest.LogCaptureFixture, hows: tuple[str, ...]
) -> None:
    """What a function left in its process holds up neither its value nor the next gang: endless
    output is neither waited for nor collected, and its writer is gone, or tests/support/leaks.py
    fails this. A record too long for a datagram is cut."""
    with caplog.at_level(logging.INFO, logger="prefect_torch_ddp.ranks"):
        for _ in range(2):
            assert run_gang(dask_client, plain.end_well_oddly, args=hows, world_size=2) == [9, 9]
    assert ("] user.code: \U0001f600" in caplog.text) == ("logs_much" in hows)
