"""Owns how the ranks of a gang tell each other about checkpoints: through the process group's
store, never by a collective.
"""

import itertools
import threading
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist

POLL_S = 0.01
MAX_POLL_S = 0.2

_num_rank_stores = itertools.count()


class KeyValueStore(Protocol):
    """A board on which ranks leave notes for each other."""

    def set(self, key: str, text: str) -> None:
        """Leave a note."""
        ...

    def get(self, key: str) -> str | None:
        """Return a note, None where there is none yet; doesn't wait."""
        ...


class LocalStore:
    """The board of a world of one."""

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}

    def set(self, key: str, text: str) -> None:
        """Keep it."""
        self._notes[key] = text

    def get(self, key: str) -> str | None:
        """Return what was said."""
        return self._notes.get(key)


class GroupStore:
    """The board of a gang, in a store that all its ranks reach."""

    def __init__(self, store: dist.Store) -> None:
        """Use a connection of its own: others wait for the process group's, and hold it
        meanwhile.
        """
        self._store = dist.PrefixStore(
            f"prefect-torch-ddp-checkpoints-{next(_num_rank_stores)}", store.clone()
        )

    def set(self, key: str, text: str) -> None:
        """Leave a note."""
        self._store.set(key, text)

    def get(self, key: str) -> str | None:
        """Return a note."""
        return self._store.get(key).decode() if self._store.check([key]) else None


def open_rank_store(world_size: int) -> KeyValueStore:
    """Return the board of this process's gang; every rank has to open it equally often.

    Raises:
        RuntimeError: there are several ranks and the process group isn't up.
    """
    if world_size == 1:
        return LocalStore()
    if not dist.is_initialized():
        msg = (
            "ctx.track on several ranks needs the process group; call init_process_group before it"
        )
        raise RuntimeError(msg)
    return GroupStore(dist.distributed_c10d._get_default_store())


def set_gone(rank_store: KeyValueStore, rank: int) -> None:
    """Tell the others that this rank says nothing any more."""
    rank_store.set(f"gone/{rank}", "")


def wait_for(
    rank_store: KeyValueStore, key: str, speaker: int, is_over: Callable[[], bool] = lambda: False
) -> str | None:
    """Wait for a note of a rank; return None when it won't come, since the speaker is gone or
    `is_over`.

    A speaker that dies ends the whole gang, so there is no time limit.
    """
    pause_s = POLL_S
    while True:
        no_more = rank_store.get(f"gone/{speaker}") is not None or is_over()
        # Heard after that: what was said before the end counts.
        if (text := rank_store.get(key)) is not None or no_more:
            return text
        threading.Event().wait(pause_s)
        pause_s = min(1.5 * pause_s, MAX_POLL_S)
