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
        self._spent_ns = [0] * len(Phase)
        self._since_ns = _now_ns()
        self._waited_ns = 0
        self._is_first_wait = True
        self._is_looping = False
        self._stacks_fd: int | None = None

    @classmethod
    def shared(cls, fd: int) -> Self:
        """Map the agent's file, and write all stacks to it when asked, or on LOOK_SIGNAL.

        The signal's handler is C: it works while a thread holds the GIL forever. The agent sets
        where in the file the stacks begin: it has the same open file.
        """
        os.set_inheritable(fd, False)  # noqa: FBT003 - positional in the standard library
        writer = cls(mmap.mmap(fd, PAGE_BYTES))
        writer._stacks_fd = fd
        faulthandler.register(LOOK_SIGNAL, file=fd, all_threads=True)
        writer.enter(Phase.STARTING)
        return writer

    def enter(self, phase: Phase) -> None:
        """Mark the phase that the rank enters; counts as progress."""
        words, now_ns = self._words, _now_ns()
        self._spent_ns[words[PHASE]] += now_ns - self._since_ns
        self._since_ns = now_ns
        # The time first: a new phase with an old time would look like a long silence in it.
        words[MOVED_NS] = now_ns
        words[PHASE] = phase

    def begin_step(self, step: int, epoch: int, *, is_last: bool) -> None:
        """Mark the begin of a step's body."""
        words, now_ns = self._words, _now_ns()
        self._spent_ns[words[PHASE]] += now_ns - self._since_ns
        self._since_ns = now_ns
        words[MOVED_NS] = now_ns
        words[layout.STEP] = step
        words[layout.EPOCH] = epoch
        words[PHASE] = _EPOCH_END if is_last else _STEP

    def own_step(self, step: int, epoch: int) -> None:
        """Mark the step of a loop that isn't `steps`; arms the watch."""
        self._words[layout.STEP], self._words[layout.EPOCH] = step, epoch
        self.progress()

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

    def write_stacks(self) -> None:
        """Write the stacks of all threads for the agent, the main thread's last."""
        if self._stacks_fd is not None:
            faulthandler.dump_traceback(file=self._stacks_fd, all_threads=True)

    def listen(self) -> None:
        """Mark that the rank obeys an order to stop, from now on."""
        self._words[layout.LISTENS] = 1

    @contextmanager
    def looping(self) -> Iterator[None]:
        """Mark that the rank makes progress inside `steps`, where its waiting counts."""
        self._is_looping = self._is_first_wait = True
        self.progress()
        try:
            yield
        finally:
            self._is_looping = False
            self.enter(Phase.SETUP)

    def count_from(self, launched: float) -> None:
        """Count the time since then, in Unix seconds by another machine's clock, as the start."""
        self._since_ns -= max(0, int((time.time() - launched) * 1e9))

    def waited(self, since_ns: int) -> None:
        """Count the time since then, of the monotonic clock, as waiting for peers in a loop.

        Not the first of a loop: a peer that started later is none that is slower.
        """
        if self._is_first_wait or not self._is_looping:
            self._is_first_wait = False
            return
        self._waited_ns += _now_ns() - since_ns

    def count_setup_as_start(self) -> None:
        """Count the code before a loop with the process's start; what no loop follows is left."""
        self.enter(Phase(self._words[PHASE]))
        self._spent_ns[Phase.STARTING] += self._spent_ns[Phase.SETUP]
        self._spent_ns[Phase.SETUP] = 0

    def seconds(self) -> dict[str, float]:
        """Return the time since the launch by phase, and what of it was waiting for peers.

        Without the last if that isn't known: on one rank, or if a GPU computes.
        """
        spent_ns = list(self._spent_ns)
        spent_ns[self._words[PHASE]] += _now_ns() - self._since_ns
        seconds = {phase.name.lower(): spent_ns[phase] / 1e9 for phase in Phase if spent_ns[phase]}
        return seconds | ({"waiting": self._waited_ns / 1e9} if self._waited_ns else {})

    def beat(self) -> None:
        """Count the collectives begun; a new one is progress. A thread calls it every second."""
        self._watch_compiler()
        # Not there yet while the rank's own thread is importing torch.
        uses_cuda = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)
        if uses_cuda is not None and uses_cuda():
            self._words[layout.USES_GPU] = 1
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
        distinct = backends.values()
        return sum(backend._get_sequence_number_for_group() for backend in distinct)  # noqa: SLF001
    except (AttributeError, RuntimeError):  # half loaded, or being taken down
        return 0
