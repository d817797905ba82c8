"""The key-value store in which a gang's ranks agree on checkpoints, without a collective."""

import itertools
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

POLL_S = 0.01
MAX_POLL_S = 0.2
ABSENT_S = 60.0
"""How long rank 0 waits, in the midst of a training, for a rank that hasn't begun the same
checkpoint; a step apart is usual."""

_num_rank_stores = itertools.count()


class KeyValueStore:
    """Texts by key, in a torch store that all ranks of a gang reach."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def set(self, key: str, text: str) -> None:
        """Set a value."""
        self._store.set(key, text)

    def get(self, key: str) -> str | None:
        """Return a value, None where there is none yet; doesn't wait."""
        return self._store.get(key).decode() if self._store.check([key]) else None


def open_rank_store(world_size: int) -> KeyValueStore:
    """Return the store of this process's gang; every rank has to open it equally often.

    Raises:
        RuntimeError: there are several ranks and the process group isn't up.
    """
    if world_size == 1:
        return KeyValueStore(dist.HashStore())
    if not dist.is_initialized():
        msg = (
            "ctx.track on several ranks needs the process group; call init_process_group before it"
        )
        raise RuntimeError(msg)
    # Torch has no public way to it.
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
    prefix = f"prefect-torch-ddp-checkpoints-{next(_num_rank_stores)}"
    # A connection of its own: the process group's is held by those who wait for it.
    return KeyValueStore(dist.PrefixStore(prefix, store.clone()))


def set_gone(rank_store: KeyValueStore, rank: int) -> None:
    """Put down that this rank sets nothing any more."""
    rank_store.set(f"gone/{rank}", "")


def wait_for(
    rank_store: KeyValueStore, key: str, rank: int, is_over: Callable[[], bool] = lambda: False
) -> str | None:
    """Wait for a value that a rank sets; None where it won't: it is gone, or `is_over`.

    A rank that dies ends the whole gang, so there is no time limit.
    """
    pause_s = POLL_S
    while True:
        no_more = rank_store.get(f"gone/{rank}") is not None or is_over()
        # Asked after that: what was set before the end counts.
        if (text := rank_store.get(key)) is not None or no_more:
            return text
        threading.Event().wait(pause_s)
        pause_s = min(1.5 * pause_s, MAX_POLL_S)


Turn = tuple[int, int]
"""What grows with every checkpoint, and is the same on all ranks."""


def set_begun(rank_store: KeyValueStore, rank: int, turn: Turn) -> None:
    """Put down that a rank takes part in a checkpoint."""
    rank_store.set(f"begun/{rank}", json.dumps(turn))


def set_report(rank_store: KeyValueStore, rank: int, turn: Turn, report: dict[str, Any]) -> None:
    """Put down what a rank wrote of a checkpoint, as plain JSON values."""
    rank_store.set(_report_key(rank, turn), json.dumps(report))


def wait_for_report(
    rank_store: KeyValueStore, rank: int, turn: Turn, *, is_last: bool
) -> dict[str, Any] | None:
    """Return what a rank wrote of a checkpoint; None where it takes no part in it."""
    began_s = time.monotonic()

    def is_over() -> bool:
        # The rank is past this checkpoint, or at its end, or doesn't come: perhaps rank 0 was
        # alone in asking for it.
        begun = tuple(json.loads(rank_store.get(f"begun/{rank}") or "[]"))
        has_ended = rank_store.get(f"ended/{rank}") is not None and not is_last
        is_late = time.monotonic() - began_s > ABSENT_S
        return begun > turn or (begun < turn and (has_ended or is_late))

    text = wait_for(rank_store, _report_key(rank, turn), rank, is_over)
    report: dict[str, Any] | None = None if text is None else json.loads(text)
    return report


def _report_key(rank: int, turn: Turn) -> str:
    return f"written/{turn[0]}/{turn[1]}/{rank}"
