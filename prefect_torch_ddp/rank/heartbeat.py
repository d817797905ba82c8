"""The rank's side of its heartbeat: marks of what it does, at a fraction of a microsecond each."""

import faulthandler
import mmap
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from prefect_torch_ddp.protocol import heartbeat as layout
from prefect_torch_ddp.protocol.heartbeat import LOOK_SIGNAL, MOVED_NS, PAGE_BYTES, PHASE, Phase

_now_ns = time.monotonic_ns
_STEP, _EPOCH_END = int(Phase.STEP), int(Phase.EPOCH_END)


class HeartbeatWriter:
    """Writes the heartbeat page. Never waits, never fails."""

    def __init__(self, page: "mmap.mmap | bytearray | None" = None) -> None:
        """Write to the page that the agent reads; None: to one that nobody reads."""
        self._words = memoryview(page if page is not None else bytearray(PAGE_BYTES)).cast("q")
        self._compiled_from = Phase.SETUP

    @classmethod
    def shared(cls, fd: int) -> Self:
        """Map the agent's file, and write all stacks to it on LOOK_SIGNAL.

        The signal's handler is C: it works while a thread holds the GIL forever.
        """
        os.set_inheritable(fd, False)  # noqa: FBT003 - positional in the standard library
        writer = cls(mmap.mmap(fd, PAGE_BYTES))
        os.lseek(fd, PAGE_BYTES, os.SEEK_SET)
        faulthandler.register(LOOK_SIGNAL, file=fd, all_threads=True)
        writer.enter(Phase.STARTING)
        return writer

    def enter(self, phase: Phase) -> None:
        """Mark the phase that the rank enters; counts as progress."""
        # The time first: a new phase with an old time would look like a long silence in it.
        self._words[MOVED_NS] = _now_ns()
        self._words[PHASE] = phase

    def begin_step(self, step: int, epoch: int, *, is_last: bool) -> None:
        """Mark the begin of a step's body."""
        words = self._words
        words[MOVED_NS] = _now_ns()
        words[layout.STEP] = step
        words[layout.EPOCH] = epoch
        words[PHASE] = _EPOCH_END if is_last else _STEP

    def progress(self, *, arms: bool = True) -> None:
        """Mark progress; if it arms the watch, the rank is expected to keep making it."""
        self._words[MOVED_NS] = _now_ns()
        if arms:
            self._words[layout.ARMED] = 1

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Mark a phase, and the one before it again at the end."""
        before = Phase(self._words[PHASE])
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    @contextmanager
    def looping(self) -> Iterator[None]:
        """Mark that the rank is inside `steps`."""
        self._words[layout.LISTENS] = 1
        self.progress()
        try:
            yield
        finally:
            self._words[layout.LISTENS] = 0
            self.enter(Phase.SETUP)

    def beat(self) -> None:
        """Count the collectives begun; a new one is progress. A thread calls it every second."""
        self._watch_compiler()
        count = _collectives_begun()
        if count != self._words[layout.SEQ]:
            self._words[MOVED_NS] = _now_ns()
            self._words[layout.SEQ] = count

    def _watch_compiler(self) -> None:
        # Registered again each time, since a reset of torch.compile may drop our callbacks.
        handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if handler is not None and self._compile_begins not in handler.start_callbacks:
            handler.register_start_callback(self._compile_begins)
            handler.register_end_callback(self._compile_ends)

    def _compile_begins(self, *_: object) -> None:
        if self._words[PHASE] != Phase.COMPILING:
            self._compiled_from = Phase(self._words[PHASE])
            self.enter(Phase.COMPILING)

    def _compile_ends(self, *_: object) -> None:
        if self._words[PHASE] == Phase.COMPILING:
            self.enter(self._compiled_from)


def _collectives_begun() -> int:
    """Return the collectives begun on the default group; 0 without one, or without torch."""
    dist = sys.modules.get("torch.distributed")
    try:
        if dist is None or not dist.is_initialized():
            return 0
        group = dist.group.WORLD
        backends = {
            id(backend): backend
            for backend in map(group._get_backend, group._device_types)  # noqa: SLF001
        }
        return sum(backend._get_sequence_number_for_group() for backend in backends.values())  # noqa: SLF001
    except (AttributeError, RuntimeError):  # half loaded, or being taken down
        return 0
