"""The drawing of seeded faults, and the check that the caller learns the truth about each."""

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
from distributed import Client

from prefect_torch_ddp import RankFailedError, run_gang
from tests.support import struck
from tests.support.gangs import alive
from tests.support.kill_points import SEED
from tests.support.struck import EXIT_CODE, WORDS, Fault, How, State
from tests.support.waiting import told_if_it_hangs, wait_until

HOWS: tuple[How, ...] = get_args(How)
STATES: tuple[State, ...] = get_args(State)
WORLD_SIZES = (2, 4)
MAX_DELAY_S = 0.03


def every_fault(seed: int) -> list[Fault]:
    """Draw the faults: each way to fail in each state, read both as the failing rank's state
    and as that of its peers.

    That is 8 x 5 x 2 world sizes x 2 readings; then 40 in which all ranks are in the same
    state, and 14 in DataLoader workers.
    """
    chance = random.Random(seed)
    kinds: list[tuple[How, State | None, State | None, int, bool]] = []
    for how, state, world_size in itertools.product(HOWS, STATES, WORLD_SIZES):
        kinds += [(how, state, None, world_size, False), (how, None, state, world_size, False)]
    kinds += [
        (how, state, state, chance.choice(WORLD_SIZES), False)
        for how, state in itertools.product(HOWS, STATES)
    ]
    kinds += [
        (how, "loader", None, size, True)
        for how, size in itertools.product(HOWS, WORLD_SIZES)
        if how != "return"
    ]
    return [
        _draw(chance, f"{seed}-{number:03d}", how, own, peers, world_size, in_worker=in_worker)
        for number, (how, own, peers, world_size, in_worker) in enumerate(kinds)
    ]


def _draw(  # noqa: PLR0917 - what is given of a fault; the rest is drawn
    chance: random.Random,
    name: str,
    how: How,
    own: State | None,
    peers: State | None,
    world_size: int,
    *,
    in_worker: bool,
) -> Fault:
    culprit = chance.randrange(world_size)
    states = [peers or chance.choice(STATES) for _ in range(world_size)]
    states[culprit] = own or chance.choice(STATES)
    by_signal = how.startswith("SIG")
    return Fault(
        name=f"{name}-{how}-{'worker-of-' if in_worker else ''}{culprit}-{'.'.join(states)}",
        how=how,
        culprit=culprit,
        states=tuple(states),
        step=chance.choice(struck.STRUCK_STEPS),
        delay_s=chance.choice([0.0, chance.uniform(0, MAX_DELAY_S)]),
        num_workers=2 if in_worker else chance.choice([0, 2]) if "loader" in states else 0,
        in_worker=in_worker,
        from_outside=by_signal and (states[culprit] == "collective" or chance.random() < 0.5),
        destroys_group=chance.random() < 0.5,
    )


def strike(client: Client, fault: Fault, folder: Path) -> None:
    """Run a gang that the fault strikes; assert what its caller learns, and that none of its
    processes remains."""
    killer = threading.Thread(target=_kill_from_outside, args=(fault, folder), daemon=True)
    if fault.from_outside:
        killer.start()
    size = len(fault.states)
    call = {"args": (fault, str(folder)), "world_size": size, "ranks_per_worker": size // 2}
    with told_if_it_hangs(), pytest.raises(RankFailedError) as caught:
        run_gang(client, struck.train, **call)
    pids = [int(path.read_text()) for path in folder.glob("pid-*")]
    left = [pid for pid in pids if psutil.pid_exists(pid)]
    assert len(pids) == size
    assert not left, f"ranks were left when the caller was told: {left}"
    _check(caught.value, fault)
    _wait_for_death([int(path.read_text()) for path in folder.glob("worker-*")])


def _kill_from_outside(fault: Fault, folder: Path) -> None:
    struck.wait_for_ranks(folder, "ready", len(fault.states))
    time.sleep(fault.delay_s)
    victim = folder / f"{'worker' if fault.in_worker else 'pid'}-{fault.culprit}"
    os.kill(int(victim.read_text()), signal.Signals[fault.how])


@dataclass(frozen=True)
class _Truth:
    kind: str
    cause: type[BaseException] | None
    text: str
    exit_code: int | None = None
    signal: int | None = None


def _truth(fault: Fault) -> _Truth:  # noqa: PLR0911 - one a fault
    if fault.in_worker and fault.how in ("SIGKILL", "SIGSEGV", "os_exit", "sys_exit"):
        return _Truth("exception", RuntimeError, "DataLoader worker")
    match fault.how:
        case "exception" | "slow_finally":
            return _Truth("exception", ValueError, WORDS)
        case "memory":
            return _Truth("exception", MemoryError, "MemoryError")
        case "SIGKILL" | "SIGSEGV":
            number = signal.Signals[fault.how]
            return _Truth("signal", None, f"was killed by {fault.how} ({number})", signal=number)
        case "os_exit":
            return _Truth("exit", None, f"left with exit code {EXIT_CODE}", exit_code=EXIT_CODE)
        case "sys_exit":
            return _Truth("exit", None, f"left by sys.exit({EXIT_CODE})", exit_code=EXIT_CODE)
        case "return":
            return _Truth("returned", None, "its function had already returned while rank")


def _check(error: RankFailedError, fault: Fault) -> None:
    truth, told = _truth(fault), error.failure
    said = f"{fault}\n{error}"
    found = error.rank, told.kind, error.exit_code, error.signal
    assert found == (fault.culprit, truth.kind, truth.exit_code, truth.signal), said
    assert (type(error.__cause__) if error.__cause__ else None) is truth.cause, said
    assert truth.cause is None or told.exception_type == f"builtins.{truth.cause.__name__}", said
    assert truth.text in told.summary, said
    assert str(error).startswith(f"rank {fault.culprit} on "), said
    assert all(other.rank != fault.culprit for other in error.collateral), said


def _wait_for_death(pids: Sequence[int]) -> None:
    """Wait for the DataLoader workers of ranks: killed with them, but nobody's to wait for."""
    wait_until(lambda: not alive(pids), what="the end of DataLoader workers")


FAULTS = every_fault(SEED)


def sample() -> list[Fault]:
    """Choose few, with every way to fail and every state of both readings among them."""
    shuffled = random.Random(SEED).sample(FAULTS, len(FAULTS))
    both = itertools.product(("own", "peers"), STATES)
    wanted: set[Any] = {*HOWS, *both, "worker", 2, 4}
    chosen = []
    while wanted:
        chosen.append(max(shuffled, key=lambda fault: len(wanted & _traits(fault))))
        wanted -= _traits(chosen[-1])
    return chosen


def _traits(fault: Fault) -> set[Any]:
    peers = {state for rank, state in enumerate(fault.states) if rank != fault.culprit}
    traits = {
        fault.how,
        ("own", fault.states[fault.culprit]),
        *(("peers", state) for state in peers),
        len(fault.states),
    }
    return traits | ({"worker"} if fault.in_worker else set())
