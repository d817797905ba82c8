"""How ranks come to a checkpoint without a collective: a key-value store."""

import errno
import itertools
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Self

import torch.distributed as dist

from prefect_torch_ddp.errors import InvalidParamsError

POLL_S = 0.01
MAX_POLL_S = 0.2
ABSENT_S = 300.0
"""How long rank 0's training waits for a rank that hasn't begun the same checkpoint."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

_num_rank_stores = itertools.count()


class WriteFailure(NamedTuple):
    """Why a rank couldn't write everything."""

    text: str
    is_full: bool
    """Whether the disk has no room, or the quota none; of a bucket that isn't known."""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Return what rank 0 is told of an error."""
        cause: BaseException | None = error
        while cause is not None and getattr(cause, "errno", None) not in NO_ROOM:
            cause = cause.__cause__
        return cls(str(error), is_full=cause is not None)


class KeyValueStore:
    """Texts by key, in a torch store that all ranks of a gang reach."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def set(self, key: str, text: str) -> None:
        """Set a value."""
        self._store.set(key, text)

    def get(self, key: str) -> str | None:
        """Return a value, None if there is none yet; doesn't wait."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def drop(self, key: str) -> None:
        """Forget a value."""
        self._store.delete_key(key)

    def wait_for(
        self, key: str, rank: int, is_over: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Wait for a value that a rank sets; None if it won't: it set `gone`, or `is_over`.

        A rank that dies ends the whole gang, so there is no time limit.
        """
        pause_s = POLL_S
        while True:
            no_more = self.get(f"gone/{rank}") is not None or is_over()
            # Asked after that: what was set before the end counts.
            if (text := self.get(key)) is not None or no_more:
                return text
            threading.Event().wait(pause_s)
            pause_s = min(1.5 * pause_s, MAX_POLL_S)


def open_rank_store(world_size: int) -> KeyValueStore:
    """Return the store of this process's gang; every rank has to open it equally often.

    Raises:
        RuntimeError: there are several ranks and the process group isn't up.
    """
    if world_size == 1:
        return KeyValueStore(dist.HashStore())
    if not dist.is_initialized():
        msg = "ctx.track on several ranks needs the process group; call init_process_group first"
        raise RuntimeError(msg)
    # Torch has no public way to it.
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
    prefix = f"prefect-torch-ddp-checkpoints-{next(_num_rank_stores)}"
    # Its own connection: the process group's is held by those who wait for it.
    return KeyValueStore(dist.PrefixStore(prefix, store.clone()))


def tell_rank_0(rank_store: KeyValueStore, rank: int, turn: int, text: str) -> None:
    """Tell rank 0 what this rank wrote of a checkpoint."""
    rank_store.set(_told(rank, turn), text)


def told_by(
    rank_store: KeyValueStore,
    rank: int,
    turn: int,
    *,
    is_last: bool,
    is_waited_for: Callable[[], bool],
) -> str:
    """Wait for what a rank tells of a checkpoint; turns grow, the same way on all ranks.

    A rank may work for any time outside of steps before it comes, while the training of rank 0
    continues or ends. If that training waits for its next checkpoint, the rank may wait for it.

    Args:
        rank_store: of all ranks.
        rank: which one.
        turn: of the checkpoint.
        is_last: whether each rank comes to it, at its end.
        is_waited_for: whether the training of rank 0 waits, in order to make its next checkpoint.

    Raises:
        InvalidParamsError: it takes no part in it: it is past it, at its end, or doesn't come.
    """
    waited_s, looked_s = 0.0, time.monotonic()

    def is_over() -> bool:
        nonlocal waited_s, looked_s
        now_s = time.monotonic()
        waited_s += now_s - looked_s if is_waited_for() else 0.0
        looked_s = now_s
        begun = int(rank_store.get(f"begun/{rank}") or -1)
        has_ended = rank_store.get(f"ended/{rank}") is not None
        is_absent = not is_last and (has_ended or waited_s > ABSENT_S)
        return begun > turn or (begun < turn and is_absent)

    text = rank_store.wait_for(_told(rank, turn), rank, is_over)
    if text is None:
        msg = (
            f"rank {rank} took no part in the checkpoint; call ctx.track and ctx.checkpoint on "
            "every rank, at the same step"
        )
        raise InvalidParamsError(msg)
    rank_store.drop(_told(rank, turn))  # or a long training would keep all of them
    return text


def _told(rank: int, turn: int) -> str:
    return f"written/{turn}/{rank}"
