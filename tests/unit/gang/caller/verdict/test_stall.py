"""What stacks prove of ranks, and what they don't."""

import pytest

from prefect_torch_ddp.gang.caller.verdict.stall import (
    BUSY_BYTES,
    BUSY_CPU_S,
    is_absent,
    is_debugged,
    is_in_collective,
    main_thread,
    wait_in_vain,
)
from prefect_torch_ddp.protocol.events import RankStack

TORCH = "/v/lib/python3.11/site-packages/torch"
CALLER = '  File "/home/me/train.py", line 52 in train\n'
WRAPPER = f'  File "{TORCH}/distributed/c10d_logger.py", line 81 in wrapper\n'


def stack(*frames: str) -> str:
    """Write the stack of a main thread, the innermost call first."""
    return "Current thread 0x00007f00 (most recent call first):\n" + "".join(frames) + CALLER


IN_COLLECTIVE = {
    "all_reduce": stack(
        f'  File "{TORCH}/distributed/distributed_c10d.py", line 9 in all_reduce\n'
    ),
    "recv": stack(f'  File "{TORCH}/distributed/distributed_c10d.py", line 9 in recv\n', WRAPPER),
    "backward": stack(f'  File "{TORCH}/autograd/graph.py", line 9 in _engine_run_backward\n'),
}
ELSEWHERE = {
    "user code": stack(),
    "asleep": stack('  File "/usr/lib/python3.11/threading.py", line 324 in wait\n'),
    "a file": stack(f'  File "{TORCH}/distributed/checkpoint/filesystem.py", line 9 in write\n'),
    "within a hook": stack('  File "/home/me/hook.py", line 3 in hook\n', WRAPPER),
    "no answer": "it did not answer: it is stopped\n",
    "nothing": "",
}


@pytest.mark.parametrize("text", IN_COLLECTIVE.values(), ids=IN_COLLECTIVE)
def test_a_wait_for_other_ranks_is_known_by_its_innermost_call(text: str) -> None:
    """A collective, a message from another rank, or the end of a backward pass."""
    assert is_in_collective(text)


@pytest.mark.parametrize("text", ELSEWHERE.values(), ids=ELSEWHERE)
def test_whatever_else_a_rank_does_is_no_wait(text: str) -> None:
    """Also if torch.distributed has called it, or nothing is known."""
    assert not is_in_collective(text)


def seen(text: str, cpu_s: float = 1.0, io_bytes: int = 0, **more: bool) -> RankStack:
    """Make what a rank answered."""
    return RankStack(0, text, cpu_s, io_bytes, **more)


WAITS = seen(IN_COLLECTIVE["all_reduce"])
MOVED = seen(IN_COLLECTIVE["all_reduce"].replace("line 52", "line 53"))
WORKED = seen(IN_COLLECTIVE["all_reduce"], 1.0 + BUSY_CPU_S)
SENT = seen(WAITS.text, io_bytes=BUSY_BYTES + len(WAITS.text))
ANSWERED = seen(WAITS.text, io_bytes=len(WAITS.text))
TRACED = seen(WAITS.text, is_traced=True)


@pytest.mark.parametrize(
    ("running", "before", "after", "proven"),
    [
        pytest.param([0], {0: WAITS}, {0: WAITS}, True, id="the only one left waits"),
        pytest.param([0, 1], {0: WAITS, 1: WAITS}, {0: WAITS, 1: WAITS}, True, id="all wait"),
        pytest.param([0], {0: WAITS}, {0: MOVED}, False, id="it has moved"),
        pytest.param([0], {0: WAITS}, {0: WORKED}, False, id="it has worked"),
        pytest.param([0], {0: WAITS}, {0: SENT}, False, id="it sends something large"),
        pytest.param([0], {0: WAITS}, {0: ANSWERED}, True, id="it sent no more than its answer"),
        pytest.param([0], {0: WAITS}, {0: TRACED}, False, id="a debugger holds it"),
        pytest.param([0], {0: WAITS}, {}, False, id="no second answer"),
        pytest.param([0], {}, {0: WAITS}, False, id="no first answer"),
        pytest.param([], {}, {}, False, id="nobody runs"),
        pytest.param(
            [0, 1],
            {0: WAITS, 1: seen(ELSEWHERE["asleep"])},
            {0: WAITS, 1: seen(ELSEWHERE["asleep"])},
            False,
            id="one sleeps and may come",
        ),
        pytest.param(
            [0], {0: WAITS, 1: MOVED}, {0: WAITS, 1: WAITS}, True, id="one that ended counts not"
        ),
    ],
)
def test_only_two_equal_looks_at_idle_ranks_prove_that_nobody_comes(
    running: list[int], before: dict[int, RankStack], after: dict[int, RankStack], proven: bool
) -> None:
    """All that still run have to be in a collective, in the same place, without any work."""
    assert wait_in_vain(running, before, after) is proven


@pytest.mark.parametrize(
    "path",
    ["/usr/lib/python3.11/pdb.py", "/usr/lib/python3.11/bdb.py", "/v/debugpy/server/api.py"],
)
def test_a_debugger_is_seen(path: str) -> None:
    """A debugger is seen in any thread, but `my_pdb.py` or a folder of proteins is none."""
    assert is_debugged(f'Thread 0x1 (most recent call first):\n  File "{path}", line 3 in x\n')
    for mine in ("/home/me/my_pdb.py", "/srv/datasets/pdb/parse.py", "/home/me/pdb.py"):
        assert not is_debugged(f'  File "{mine}", line 3 in x\n')


def test_a_rank_whose_main_thread_was_left_out_proves_nothing() -> None:
    """With over 100 threads faulthandler leaves the main one out, and no other counts as main."""
    (helper,) = ['Thread 0x1 (most recent call first):\n  File "/home/me/x.py", line 3 in x\n']
    text = 100 * helper + "...\n"
    assert main_thread(text) == []
    assert not is_in_collective(text)
    assert not is_absent(text)
    deep = (
        stack(*(f'  File "/home/me/x.py", line {line} in x\n' for line in range(100))) + "  ...\n"
    )
    assert len(main_thread(deep)) == 101
