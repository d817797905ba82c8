"""The fork server: a process that loads torch once and forks ranks for its Dask worker.

It imports other libraries too, for a gang whose user names them or that are known to be safe.

Why forking is safe here: one thread and no CUDA (both checked before each fork), no lock held,
no open file but the socket. The child leads its own session and dies with the fork server
(PR_SET_PDEATHSIG), which ends when its Dask worker's end of the socket closes.

SIGTERM and SIGINT are left to the ranks, the worker and the flow: they save and end, and this
process with them. Signals that go to every process of a job or a service mustn't kill ranks first.

The fork server is a *child subreaper*: what a dead rank leaves becomes its child, from
any session, and is killed with the last rank of the gang.
"""

import contextlib
import functools
import gc
import importlib
import os
import random
import select
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from prefect_torch_ddp.protocol.rank import (
    ForkServerAnswer,
    ForkServerOrder,
    LaunchPage,
    RankFiles,
    is_installed,
)
from prefect_torch_ddp.rank.process.main import (
    adopt_orphans,
    name_process,
    run_rank,
)
from prefect_torch_ddp.rank.user_code import default_to_fork

MAX_FDS = 8
LEFT_TO_OTHERS = (signal.SIGTERM, signal.SIGINT)
SWEEP_TIMEOUT_S = 2.0
"""How long killed leftovers of a gang may take to die before they no longer block the next."""


def main(arguments: Sequence[str]) -> None:
    """Load torch, report whether this process can be forked, then take orders.

    Ends when the Dask worker is gone, or when nobody wanted a rank for the idle time.
    """
    ranks_own = _leave_signals({})
    worker, idle_s = socket.socket(fileno=int(arguments[0])), float(arguments[1])
    os.set_inheritable(worker.fileno(), False)  # noqa: FBT003 - positional in the standard library
    name_process("ddp-fork-server")
    adopt_orphans()
    default_to_fork()  # before a library settles the default
    # Collections that find next to nothing are a quarter of the time that loading torch takes,
    # and would copy memory that ranks share.
    gc.disable()
    _load_torch()
    with contextlib.suppress(BrokenPipeError):  # its worker is gone
        worker.send(ForkServerAnswer(unfit=_why_unfit()).encode())
    _freeze()
    run = _Server(worker, idle_s, ranks_own).serve()
    if run is not None:
        run()
    # The interpreter's end would take torch apart, and triton writes to stderr what it misses.
    os._exit(0)


def _leave_signals(ranks_own: dict[int, Any]) -> dict[int, Any]:
    """Do nothing at a signal; note in `ranks_own` what Python or a library had set for it."""
    for number in LEFT_TO_OTHERS:
        # Not SIG_IGN, which what a library starts would inherit.
        before = signal.signal(number, _do_nothing)
        if before is not _do_nothing:
            ranks_own[number] = before
    return ranks_own


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def _load_torch() -> None:
    # Not at the top: spawned children of a rank import this module as their __main__. The first is
    # what `socket.getaddrinfo` imports.
    import encodings.idna  # noqa: PLC0415, F401

    import torch.distributed  # noqa: PLC0415
    import torch.utils.data  # noqa: PLC0415

    from prefect_torch_ddp.rank import distributed, stages  # noqa: PLC0415, F401
    from prefect_torch_ddp.rank.strategies import choice  # noqa: PLC0415, F401
    from prefect_torch_ddp.rank.training import outcome, steps  # noqa: PLC0415, F401

    # For each group torch reads the entry points of all installed packages, as a plugin may bring
    # its backend: 8 ms for every rank. Gloo is torch's own.
    backends: Any = torch.distributed.Backend
    if hasattr(backends, "_ensure_backend_registered"):
        ensure = functools.cache(backends._ensure_backend_registered)  # noqa: SLF001
        backends._ensure_backend_registered = staticmethod(ensure)  # noqa: SLF001
        ensure("gloo")

    # DDP's constructor imports it, which takes a second of a core in each rank. A build of torch
    # may lack it; the rank that wants it will say so.
    with contextlib.suppress(ImportError):
        import torch._dynamo  # noqa: PLC0415


def _import(library: str) -> ForkServerAnswer:
    """Import a library; says whether it failed, or made this process unfit."""
    try:
        file = getattr(importlib.import_module(library), "__file__", None)
    except BaseException as error:  # noqa: BLE001 - its rank will meet it too, and says so
        return ForkServerAnswer(unfit=f"{type(error).__name__}: {error}")
    if file is not None and not is_installed(file):
        return ForkServerAnswer(unfit="it isn't an installed package")
    unfit = _why_unfit()
    _freeze()
    return ForkServerAnswer(unfit=unfit)


def _why_unfit() -> str | None:
    """Return what makes forking this process unsafe; None when nothing does."""
    import torch  # noqa: PLC0415 - spawned children of a rank import this module

    num_threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - only names are counted
    if num_threads != 1:
        return f"it runs {num_threads} threads"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "CUDA is initialised in it"
    return None


def _freeze() -> None:
    """Keep children from copying what they share with this process, or taking it apart at exit."""
    gc.freeze()
    # Only torch's take 30 ms of each rank's end.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # noqa: SLF001
        finalizer.atexit = False


class _Server:
    def __init__(self, worker: socket.socket, idle_s: float, ranks_own: dict[int, Any]) -> None:
        self._worker = worker
        self._ranks_own = ranks_own
        """How a rank handles the signals that this process leaves to others."""
        self._pid = os.getpid()
        self._idle_s = idle_s
        self._ranks: set[int] = set()
        self._poller = select.poll()
        self._poller.register(worker, select.POLLIN)

    def serve(self) -> Callable[[], None] | None:
        """Take orders until the server is to end; in a forked child returns what it is to run."""
        while (order := self._next_order()) is not None:
            message, fds = order
            if message.op == "reap":
                self._answer(ForkServerAnswer(status=self._reap(message.pid)))
                continue
            if message.op == "load":
                answer = _import(message.library)
                _leave_signals(self._ranks_own)
                self._answer(answer)
                continue
            unfit = _why_unfit()
            pid = 0 if unfit else _fork(self._worker, self._ranks_own)
            if pid is None:
                return _become_rank(fds, self._pid)
            for fd in fds:
                os.close(fd)
            if pid:
                self._ranks.add(pid)
            self._answer(ForkServerAnswer(pid=pid, unfit=unfit))
        _kill_children()
        return None

    def _next_order(self) -> tuple[ForkServerOrder, list[int]] | None:
        """Wait for an order; None if the worker is gone, or nobody wanted a rank for long."""
        while not (ready := self._poller.poll(self._idle_s * 1000)) and self._is_in_use():
            pass
        # An order whose sender is gone, or gave this process up while it was stopped, must not
        # be carried out late.
        if not ready or ready[0][1] & select.POLLHUP:
            return None
        data, fds, _, _ = socket.recv_fds(self._worker, 65_536, MAX_FDS)
        return (ForkServerOrder.decode(data), fds) if data else None

    def _is_in_use(self) -> bool:
        """Whether a rank lives."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return any(os.waitid(os.P_PID, pid, options) is None for pid in self._ranks)

    def _answer(self, answer: ForkServerAnswer) -> None:
        self._worker.send(answer.encode())

    def _reap(self, pid: int) -> int:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._ranks.discard(pid)
        if not self._ranks:
            _kill_children()  # what the gang's ranks left, in whatever session
        return status


def _kill_children() -> None:
    """Kill and reap every child, and those that become children by it, until there are none."""
    deadline = time.monotonic() + SWEEP_TIMEOUT_S
    # waitid raises when no child is left. A kernel that doesn't list children keeps them.
    with contextlib.suppress(ChildProcessError, FileNotFoundError):
        while time.monotonic() < deadline:
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is not None:
                continue
            for pid in Path("/proc/thread-self/children").read_text(encoding="utf-8").split():
                with contextlib.suppress(PermissionError):  # it became another user's
                    os.kill(int(pid), signal.SIGKILL)  # not reaped yet: the number is its own
            time.sleep(0.001)


def _fork(worker: socket.socket, ranks_own: dict[int, Any]) -> int | None:
    """Fork; return None in the child, and its pid once it leads a session, to be killed by."""
    started_read, started_write = os.pipe()
    # One that comes while the child still does nothing at it waits.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_OTHERS)
    pid = os.fork()
    if pid == 0:
        for number, handler in ranks_own.items():
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if pid == 0:
        os.close(started_read)
        worker.close()
        os.setsid()
        os.write(started_write, b"1")
        os.close(started_write)
        return None
    os.close(started_write)
    os.read(started_read, 1)
    os.close(started_read)
    return pid


def _become_rank(fds: Sequence[int], parent_pid: int) -> Callable[[], None]:
    """Turn the forked child into what a fresh process would be."""
    files = RankFiles(*fds)
    with Path(os.devnull).open("rb") as nothing:
        for source, target in ((nothing.fileno(), 0), (files.stdout, 1), (files.stderr, 2)):
            os.dup2(source, target)
    os.close(files.stdout)
    os.close(files.stderr)
    page, payload = LaunchPage.read(files.launch)
    # The store's socket came by another number than it was sent with.
    page = replace(page, launch=replace(page.launch, store_fd=files.store))
    gc.enable()
    os.chdir(page.folder)
    os.environ.clear()
    os.environ.update(page.environment)
    _reset_libraries(page.environment)
    return partial(run_rank, files.own()[1:], parent_pid, page, payload)


def _reset_libraries(environment: dict[str, str]) -> None:
    """Give the generators new seeds, and give torch the rank's own number of threads."""
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    random.seed()
    np.random.seed()  # noqa: NPY002 - the global generator is what user code may use
    # Not torch.seed, which also notes the stack for CUDA's, seeded again in each process anyway.
    torch.default_generator.seed()
    # The libraries read OMP_NUM_THREADS when the server loaded them, where it was 1.
    wanted = environment.get("OMP_NUM_THREADS", "")
    is_number = wanted.isdecimal() and int(wanted) > 0
    torch.set_num_threads(int(wanted) if is_number else len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    main(sys.argv[1:])
