"""A rank fails: one error names the right rank, nothing remains, and the next gang works."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed import Client

from prefect_torch_ddp import RankFailedError, run_gang
from prefect_torch_ddp.frames import users_traceback
from tests.support.gangs import RUN_WITH_CONTEXT
from tests.workloads import failing, hanging

OWN_WORDS = "ValueError: the user's own words"


@pytest.mark.parametrize(
    ("how", "says", "fields"),
    [
        ("raise", OWN_WORDS, {"cause": ValueError}),
        ("slow_finally", OWN_WORDS, {"cause": ValueError}),
        ("slow_after_leaving", OWN_WORDS, {"cause": ValueError}),
        ("collective_in_finally", "the user's own words", {}),
        ("raise_timeout", "TimeoutError: the user's own timeout", {"cause": TimeoutError}),
        ("raise_awkward", "AwkwardError: won't unpickle \\(3\\)", {"cause": None}),
        ("memory", "MemoryError", {"cause": MemoryError}),
        ("interrupt", "KeyboardInterrupt", {"cause": None}),
        ("sys_exit", r"left by sys.exit\(3\)", {"exit_code": 3, "cause": None}),
        ("sys_exit_0", r"left by sys.exit\(0\)", {"exit_code": 0, "cause": None}),
        ("sys_exit_none", r"left by sys.exit\(None\)", {"exit_code": 0, "cause": None}),
        ("os_exit", "left with exit code 3 before its function returned", {"exit_code": 3}),
        ("return", "its function had already returned while rank 0 waited for it", {}),
        ("SIGKILL", r"killed by SIGKILL \(9\)", {"signal": 9}),
        ("SIGSEGV", r"killed by SIGSEGV \(11\)", {"signal": 11}),
    ],
)
def test_the_right_rank_is_blamed(
    dask_client: Client, how: str, says: str, fields: dict[str, object]
) -> None:
    """Rank 1 fails while rank 0 waits; the error names rank, host, attempt and cause."""
    with pytest.raises(RankFailedError, match=says) as caught:
        run_gang(dask_client, failing.only_on, args=(1, how), world_size=2, attempt=2)
    error = caught.value
    assert (error.rank, error.attempt, error.host) == (1, 2, "127.0.0.1")
    assert not isinstance(error, TimeoutError)
    assert str(error).startswith("rank 1 on 127.0.0.1 failed in attempt 2: ")
    assert (error.exit_code, error.signal) == (fields.get("exit_code"), fields.get("signal"))
    if "cause" in fields:
        expected = fields["cause"]
        assert error.__cause__ is None if expected is None else type(error.__cause__) is expected
    if how.startswith("SIG"):
        assert error.failure.stderr_tail[-1] == "last words"
    assert error.__context__ in {None, error.__cause__}, "it comes of nothing else"
    shown = [line for line in users_traceback(error).splitlines() if line.startswith('  File "')]
    assert shown[0].endswith(", in test_the_right_rank_is_blamed")
    assert not any("/prefect_torch_ddp/gang/" in line for line in shown)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert type(again.__cause__) is type(error.__cause__)


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
        ("usage", r"(?s)left by sys.exit\(2\).*last lines on stderr.*required: --lr"),
        ("abort", "killed by SIGABRT"),
        ("recursion", "RecursionError"),
        ("c_stack", "killed by SIGSEGV"),
        ("fatal", "killed by SIGABRT"),
        ("no_files", "rank 1 "),
        ("bad_handler", "rank 1 "),
    ],
)
def test_odd_failures_are_told(dask_client: Client, how: str, says: str) -> None:
    """Rank 1 is named even if its exception fails when it is shown or pickled."""
    with pytest.raises(RankFailedError, match=says) as caught:
        run_gang(dask_client, failing.fail_oddly, args=(how,), world_size=2)
    assert caught.value.rank == 1
    assert len(str(caught.value)) < 100_000
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


NO_MODULE = "No module named 'no_such_module'\nnot tried again: a failure by ModuleNotFoundError"


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (failing.unpicklable_value, "rank 1 returned a value of type _thread.lock that can't be"),
        (failing.initialise_again, 'process_group="user"'),
        ("no_such_module:fn", NO_MODULE),
    ],
    ids=["a value that doesn't pickle", "a second initialisation", "a missing module"],
)
def test_what_can_not_work_is_named(
    dask_client: Client, fn: Callable[[], object] | str, says: str
) -> None:
    """The error names the rank's value, the option or the module, and no restart is used."""
    with pytest.raises(RankFailedError, match=says) as caught:
        run_gang(dask_client, fn, world_size=2, max_restarts=1)
    assert caught.value.attempt == (2 if fn is failing.initialise_again else 1)


def test_a_collective_waits_as_long_as_the_option_says(dask_client: Client) -> None:
    """The error is torch's own, and says which option it was."""
    says = "rank 0 on .* failed(?s:.)*did not come(?s:.)*collective_timeout_s"
    with pytest.raises(RankFailedError, match=says):
        run_gang(dask_client, hanging.plain_hang, args=(1,), world_size=2, collective_timeout_s=3.0)


@pytest.mark.parametrize("leaver", [0, pytest.param(1, marks=pytest.mark.extended)])
def test_early_return_of_a_rank_that_tracks(
    dask_client: Client, tmp_path: Path, leaver: int
) -> None:
    """The error names the rank that left, even if a checkpoint waits for its peers."""
    args = hanging.config_in(tmp_path), failing.leave_early, (leaver,)
    says = re.escape("its function had already returned")
    with pytest.raises(RankFailedError, match=says) as caught:
        run_gang(dask_client, RUN_WITH_CONTEXT, args=args, world_size=2)
    assert caught.value.rank == leaver
    assert f"while rank {1 - leaver} waited for it in a collective" in str(caught.value)
