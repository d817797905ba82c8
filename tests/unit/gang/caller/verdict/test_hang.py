"""The hang rule and its message: pure functions of what the agents saw."""

import dataclasses
import pickle
from typing import Any

import pytest

from prefect_torch_ddp import GangHungError
from prefect_torch_ddp.gang.caller.placement import Placement
from prefect_torch_ddp.gang.caller.verdict import hang
from prefect_torch_ddp.gang.caller.verdict.hang import HangWatch, describe, summarize
from prefect_torch_ddp.gang.caller.verdict.stall import excuse_for, find_stall, missing_by
from prefect_torch_ddp.protocol.events import RankStack
from prefect_torch_ddp.protocol.heartbeat import Heartbeat, Phase
from prefect_torch_ddp.protocol.messages import RankHeartbeat
from prefect_torch_ddp.protocol.rank import GangShape, RankPlace

LIMIT_S = 10.0
HOSTS = {0: "a", 1: "b", 2: "c"}
WAITING = (Phase.LOADING, Phase.EPOCH_END, Phase.SAVING, Phase.SETUP)


def rank(
    number: int, phase: Phase = Phase.STEP, *, step: int = 5, seq: int = 0, **seen: Any
) -> RankHeartbeat:
    """Describe a rank that has been silent and idle for 11 s, a bit more than the limit, unless
    told otherwise."""
    heartbeat = Heartbeat(step=step, seq=seq, phase=phase, armed=seen.pop("armed", True))
    seen.setdefault("silent_s", 11.0)
    return RankHeartbeat(number, heartbeat, idle_s=seen.pop("idle_s", seen["silent_s"]), **seen)


def missing(*ranks: RankHeartbeat, from_start: bool = False) -> list[int] | None:
    """Return who is missing in a gang that hangs; None if it doesn't hang."""
    stall = find_stall(ranks, LIMIT_S, from_start=from_start)
    return [one.rank for one in stall.behind] if stall is not None and stall.is_hung else None


@pytest.mark.parametrize(
    ("gang", "expected"),
    [
        ([rank(0, seq=8), rank(1, seq=7), rank(2, seq=8)], [0, 1, 2]),  # not by what was counted
        ([rank(0, step=6, seq=1), rank(1, step=5, seq=9)], [1]),  # whatever they are: by step
        *(
            ([rank(0, phase), rank(1, Phase.STEP)], [1])  # behind the step, and inside of it
            for phase in (Phase.STEP_END, Phase.SAVING, Phase.LOADING)
        ),
        ([rank(0, silent_s=1.0), rank(1, silent_s=60.0)], None),  # progress of any is the gang's
        ([rank(0, Phase.LOADING, stopped="process 7")], [0]),  # what is stopped doesn't load
        ([rank(0, Phase.RETURNED, step=9), rank(1, Phase.STEP, step=9)], [1]),
        ([rank(0, Phase.RETURNED)], None),
    ],
)
def test_the_rank_that_has_come_least_far_is_missing(
    gang: list[RankHeartbeat], expected: list[int] | None
) -> None:
    """By its step, and whether it is still inside the step's body."""
    assert missing(*gang) == expected


@pytest.mark.parametrize(
    ("phase", "silent_s", "idle_s", "is_hung"),
    [
        (Phase.STEP, 9.9, 9.9, False),
        (Phase.STEP, 10.0, 10.0, True),
        (Phase.STEP, 99.0, 5.0, False),
        (Phase.STEP, 100.0, 0.0, True),
        (Phase.STEP_END, 10.0, 10.0, True),
        (Phase.FUNCTION, 10.0, 10.0, True),
        *((phase, 99.0, 99.0, False) for phase in (*WAITING, Phase.RESTORING)),
        *((phase, 100.0, 100.0, True) for phase in (*WAITING, Phase.COMPILING)),
        *((phase, 1e6, 0.0, False) for phase in (*WAITING, Phase.COMPILING)),
    ],
)
def test_limits(phase: Phase, silent_s: float, idle_s: float, is_hung: bool) -> None:
    """In a step the limit holds for an idle rank, and ten times it for one that works;
    elsewhere only idle ranks are limited."""
    behind = rank(1, phase, step=3, silent_s=silent_s, idle_s=idle_s)
    assert (missing(rank(0, step=4, silent_s=silent_s), behind) == [1]) is is_hung


def test_nobody_is_watched_before_the_first_sign_of_progress() -> None:
    """Loading torch, key-value store, building a model: none of it counts, unless a plain
    function's caller asked for it."""
    waiting = (
        rank(0, Phase.SETUP, step=0, armed=False, silent_s=1e6),
        rank(1, Phase.FUNCTION, step=0, armed=False, silent_s=1e6),
    )
    assert missing(*waiting) is None
    assert missing(*waiting, from_start=True) == [1]
    assert missing(rank(0, Phase.STARTING, silent_s=1e6), waiting[1], from_start=True) is None


STACK_OF_MISSING = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f00 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1 in _call_impl
  File "/home/me/train.py", line 34 in forward
  File "/home/me/train.py", line 50 in train
"""
STACK_OF_WAITING = """Current thread 0x00007f00 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce
  File "/home/me/train.py", line 52 in train
"""
STACK_OF_ONE_AWAITING_DATA = """Current thread 0x00007f00 (most recent call first):
  File "/v/prefect_torch_ddp/data/datasets/dataset_store.py", line 9 in wait_for_turn
  File "/v/prefect_torch_ddp/data/datasets/dataset_store.py", line 8 in staged
  File "/home/me/train.py", line 9 in train
"""
STACK_OF_DECODING = """Current thread 0x00007f00 (most recent call first):
  File "/lib/python3.11/threading.py", line 9 in wait
  File "/v/prefect_torch_ddp/data/tables/local_copy.py", line 8 in _make
  File "/home/me/train.py", line 9 in train
"""


IN_DEBUGGER = STACK_OF_MISSING.replace("torch/nn/modules/module", "debugpy/server/api")
AT_WORK = (Phase.SETUP, Phase.EPOCH_END, Phase.SAVING)


@pytest.mark.parametrize(
    ("ahead", "stacks", "missing", "why"),
    [
        *(
            pytest.param(
                rank(0, phase, step=6),
                {0: STACK_OF_MISSING, 1: STACK_OF_WAITING},
                [0],
                "the others wait for rank 0, which may still be working",
                id=f"it waits for one that is ahead: {phase.name}",
            )
            for phase in AT_WORK
        ),
        pytest.param(
            rank(0, Phase.STEP, step=6),
            {0: STACK_OF_MISSING, 1: STACK_OF_WAITING},
            [0],
            "",
            id="the one ahead is idle in its step",
        ),
        pytest.param(
            rank(0, Phase.SETUP, step=6),
            {0: STACK_OF_MISSING, 1: STACK_OF_MISSING},
            [1],
            "",
            id="it waits for nobody",
        ),
        pytest.param(
            rank(0, Phase.SETUP, step=6), {0: STACK_OF_MISSING}, [1], "", id="it says nothing"
        ),
        pytest.param(
            rank(0, Phase.SETUP, step=6),
            {0: STACK_OF_WAITING, 1: STACK_OF_WAITING},
            [1],
            "",
            id="all wait in collectives",
        ),
        pytest.param(
            rank(0, Phase.STEP_END),
            {0: STACK_OF_WAITING, 1: IN_DEBUGGER},
            [1],
            "rank 1 is in a debugger",
            id="the one behind is in a debugger",
        ),
    ],
)
def test_what_excuses_a_silence(
    ahead: RankHeartbeat, stacks: dict[int, str], missing: list[int], why: str
) -> None:
    """A lagging rank may wait for one ahead that loads, saves or validates, up to that one's
    limit."""
    stall = find_stall((ahead, rank(1)), LIMIT_S, from_start=False)
    assert stall is not None
    answers = {number: RankStack(number, text) for number, text in stacks.items()}
    assert excuse_for(stall, answers, LIMIT_S) == why
    assert [each.rank for each in missing_by(stall, stacks).behind] == missing


@pytest.mark.parametrize(
    ("first", "is_stopped", "other", "is_excused"),
    [
        (STACK_OF_ONE_AWAITING_DATA, False, STACK_OF_ONE_AWAITING_DATA, True),
        (STACK_OF_ONE_AWAITING_DATA, False, STACK_OF_WAITING, True),
        (STACK_OF_ONE_AWAITING_DATA, False, STACK_OF_MISSING, False),
        (STACK_OF_ONE_AWAITING_DATA, True, STACK_OF_WAITING, False),
        (STACK_OF_DECODING, False, STACK_OF_WAITING, False),
    ],
    ids=["both", "the other waits for it", "the other hangs", "stopped", "an idle one decodes"],
)
def test_who_waits_for_a_dataset_of_another_process_is_excused(
    first: str, is_stopped: bool, other: str, is_excused: bool
) -> None:
    """Unless a rank that doesn't wait may hold the lock, and hang."""
    one = rank(0, stopped="process 7" if is_stopped else "")
    stall = find_stall((one, rank(1)), LIMIT_S, from_start=False)
    assert stall is not None
    answers = {0: RankStack(0, first), 1: RankStack(1, other)}
    why = "rank 0 waits until a dataset is on its host's disk" if is_excused else ""
    assert excuse_for(stall, answers, LIMIT_S) == why


def test_a_rank_that_decodes_for_long_is_excused_while_it_works() -> None:
    """In the body of a step too, where other work has a limit."""
    one = rank(0, silent_s=200.0, idle_s=0.0)
    stall = find_stall((one, rank(1, silent_s=200.0)), LIMIT_S, from_start=False)
    assert stall is not None
    assert stall.is_hung
    answers = {0: RankStack(0, STACK_OF_DECODING), 1: RankStack(1, STACK_OF_ONE_AWAITING_DATA)}
    assert "waits until a dataset" in excuse_for(stall, answers, LIMIT_S)


def test_a_traced_rank_is_in_a_debugger() -> None:
    """One that holds the process from outside, so that no stack shows it."""
    stall = find_stall((rank(0), rank(1)), LIMIT_S, from_start=False)
    assert stall is not None
    held = {1: RankStack(1, "it did not answer: a debugger holds it\n", is_traced=True)}
    assert excuse_for(stall, held, LIMIT_S) == "rank 1 is in a debugger"


def watch_of_two() -> HangWatch:
    """Watch ranks 0 and 1 with the limit."""
    places = tuple(RankPlace(number, 0, number, f"tcp://{number}", "a") for number in range(2))
    return HangWatch(LIMIT_S, Placement(places, GangShape(2, 2, (1, 1))), from_start=False)


@pytest.mark.parametrize("uses_gpu", [False, True], ids=["on CPUs", "one on a GPU"])
def test_stacks_prove_nothing_of_a_rank_on_a_gpu(uses_gpu: bool) -> None:
    """Its threads may all wait while the GPU is at work."""
    watch = watch_of_two()
    on_gpu = dataclasses.replace(rank(0), heartbeat=Heartbeat(phase=Phase.SETUP, uses_gpu=uses_gpu))
    watch.take([on_gpu, rank(1)], [].append)
    assert watch.suspects_vain_wait is not uses_gpu


def test_a_gang_that_moves_while_its_stacks_are_asked_for_is_no_hang() -> None:
    """A look takes seconds; a step that ended meanwhile was long, no more."""
    watch = watch_of_two()
    for _ in range(2):
        watch.take([rank(0), rank(1)], [].append)
    assert watch.has_found
    moved = dataclasses.replace(rank(1), heartbeat=Heartbeat(moved_ns=7, phase=Phase.STEP))
    watch.take([moved], [].append)
    assert watch.excuse() == ""
    assert not watch.has_found


def test_an_excuse_holds_for_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the gang is looked at again: its person may have left the debugger, and it hangs now."""
    now_s = 1000.0
    monkeypatch.setattr(hang.time, "monotonic", lambda: now_s)
    watch = watch_of_two()

    def hear() -> bool:
        return watch.take([rank(0), rank(1)], [].append)

    assert [hear(), hear()] == [False, True], "seen twice"
    watch.looks.add(RankStack(1, "", is_traced=True))
    assert watch.excuse() == "no progress, but rank 1 is in a debugger: the gang keeps running"
    assert not hear()
    now_s += LIMIT_S
    assert hear(), "the limit has passed"
    assert watch.excuse() == "", "it is said once"
    now_s += LIMIT_S
    assert hear()
    watch.looks.add(RankStack(1, STACK_OF_MISSING))
    assert watch.excuse() == ""
    assert watch.has_found


def test_the_text_says_who_waits_for_whom() -> None:
    """With stacks or without: a rank that can't answer is named all the same. If all wait in a
    collective, the way out is named."""

    def told(*gang: RankHeartbeat, stack: str = "") -> str:
        stall = find_stall(gang, LIMIT_S, from_start=False)
        assert stall is not None
        return summarize(stall, HOSTS, {0: stack, 1: stack})

    late = "rank 1 on b did not arrive: for 11 s it has been in step 5, while rank 0 is"
    stopped = rank(1, stopped="process 7 (ddp-rank-1)")
    says = "at the end of step 5; process 7 (ddp-rank-1) of rank 1 is stopped (SIGSTOP)"
    assert told(rank(0, Phase.STEP_END), stopped) == f"{late} {says}"
    assert told(rank(0, Phase.RETURNED), rank(1)) == f"{late} done with its function"
    both_wait = told(rank(0, seq=4), rank(1, seq=3), stack=STACK_OF_WAITING)
    at = "for 11 s it has been in step 5 at train.py:52 in train"
    assert both_wait.startswith(f"rank 0 on a waits for a rank that does not come: {at}")
    assert both_wait.endswith("stop all ranks together: ctx.request_stop(...)")


def test_the_error_says_where() -> None:
    """The user's innermost line, not torch's; the error survives pickle with its fields."""
    stall = find_stall((rank(0, seq=2), rank(1, seq=1), rank(2, seq=2)), LIMIT_S, from_start=False)
    assert stall is not None
    stacks = {0: STACK_OF_WAITING, 1: STACK_OF_MISSING, 2: STACK_OF_WAITING}
    found = describe(missing_by(stall, stacks), HOSTS, stacks)
    assert found.summary == (
        "rank 1 on b did not arrive: for 11 s it has been in step 5 at train.py:34 in forward, "
        "while ranks 0, 2 are waiting in a collective of step 5"
    )
    error = pickle.loads(pickle.dumps(GangHungError(found, attempt=3)))
    assert (error.ranks, error.hosts, error.attempt, error.hang.step) == ((1,), ("b",), 3, 5)
    assert error.stacks[0] == STACK_OF_WAITING
    assert str(error).startswith(f"the gang hung in attempt 3: {found.summary}\n")
    assert 'File "/home/me/train.py", line 34 in forward' in str(error)
    assert "threading.py" not in str(error)
    # The stacks are in the log just before it.
    assert error.in_brief() == str(error).splitlines()[0]
