"""Owns the rank host: a process that loads torch once, stays single-threaded, and forks ranks
for its Dask worker.

Why forking is safe here: one thread and CUDA untouched (both checked before each fork), no lock
held, no open file but the socket; the child leads a session of its own, dies with the host
(PR_SET_PDEATHSIG), and the host dies with its Dask worker, whose end of the socket closes then.

The host is a *child subreaper*: what a dead rank leaves behind becomes the host's child, also
from another session, and is killed with the last rank of its gang.
"""

import contextlib
import gc
import os
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prefect_torch_ddp.protocol.fork_server import ForkServerAnswer, ForkServerOrder
from prefect_torch_ddp.protocol.rank import LaunchPage, RankFiles
from prefect_torch_ddp.rank import main as life

MAX_FDS = 8
SWEEP_TIMEOUT_S = 2.0
"""How long the host waits for killed leftovers of a gang; one that the kernel doesn't let go of
must not block the next gang."""

LULL_S, BUSY_LULL_S = 1.0, 5.0
"""A host that nobody asked for so long has the time to load more; the second while its ranks
run."""


def main(arguments: Sequence[str]) -> None:
    """Load torch, tell whether this process can be forked, then fork until the Dask worker is
    gone or nobody asked for long.
    """
    link, idle_s = socket.socket(fileno=int(arguments[0])), float(arguments[1])
    os.set_inheritable(link.fileno(), False)  # noqa: FBT003 - the standard library takes it by position
    life.show_name("ddp-rank-host")
    life.adopt_orphans()
    _load()
    link.send(ForkServerAnswer(unfit=why_unfit()).encode())
    _freeze()
    rank = _serve(link, idle_s)
    if rank is not None:
        life.live(*rank)
    os._exit(
        0
    )  # the interpreter's end takes torch apart, and triton writes to stderr what it then misses


def why_unfit() -> str | None:
    """Return what makes forking this process unsafe; None when nothing does."""
    import torch  # noqa: PLC0415 - loaded by `_load`

    num_threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - names alone are counted
    if num_threads != 1:
        return f"it runs {num_threads} threads"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "CUDA is initialised in it"
    return None


def _load() -> None:
    import torch  # noqa: PLC0415
    import torch.distributed  # noqa: PLC0415
    import torch.utils.data  # noqa: PLC0415, F401

    from prefect_torch_ddp.rank import checkpointing as tracker  # noqa: PLC0415, F401
    from prefect_torch_ddp.rank import failure as values  # noqa: PLC0415, F401
    from prefect_torch_ddp.rank import workload as entry  # noqa: PLC0415, F401
    from prefect_torch_ddp.rank.distributed import group as process_group  # noqa: PLC0415, F401
    from prefect_torch_ddp.rank.gradients import share_weights as gradients  # noqa: PLC0415, F401
    from prefect_torch_ddp.rank.loop import steps as loop  # noqa: PLC0415, F401


class _Lull:
    """Waits for orders, and loads more in the first lull."""

    def __init__(self, link: socket.socket) -> None:
        self._poller = select.poll()
        self._poller.register(link, select.POLLIN)
        self._is_complete = False

    def until_asked(self, idle_s: float, *, busy: bool) -> list[tuple[int, int]]:
        """Return what there is to read, after `idle_s` nothing."""
        if not self._is_complete:
            if ready := self._poller.poll((BUSY_LULL_S if busy else LULL_S) * 1000):
                return ready
            self._is_complete = True
            _load_the_rest()
        return self._poller.poll(idle_s * 1000)


def _load_the_rest() -> None:
    """Load what not every gang needs and DDP's constructor would import in each rank, which
    takes 1.3 s of a core.
    """
    with contextlib.suppress(
        ImportError
    ):  # a build of torch without it; the rank that wants it will say so
        import torch._dynamo  # noqa: PLC0415, F401
    _freeze()


def _freeze() -> None:
    """Have the children's garbage collector not touch, and thereby copy, what they share with
    this process.
    """
    gc.collect()
    gc.freeze()


Life = tuple[Sequence[int], int, LaunchPage, bytes]
"""What a rank lives by: the arguments of `live`."""


def _serve(link: socket.socket, idle_s: float) -> Life | None:
    """Take orders; returns in a forked child, with what the rank lives by, and in the host
    itself when it is to end.
    """
    children: set[int] = set()
    lull = _Lull(link)
    while True:
        ready = lull.until_asked(idle_s, busy=bool(children))
        if not ready and children:
            continue
        # An order whose sender is gone, or gave this process up while it was stopped, must not
        # be carried out late.
        order = None if not ready or ready[0][1] & select.POLLHUP else _receive(link)
        if order is None:
            _kill_all()
            return None
        message, fds = order
        if message.op == "reap":
            link.send(ForkServerAnswer(status=_reap(message.pid, children)).encode())
            continue
        unfit = why_unfit()
        child = 0 if unfit else _fork(link)
        if child is None:
            return _become_rank(fds)
        for fd in fds:
            os.close(fd)
        if child:
            children.add(child)
        link.send(ForkServerAnswer(pid=child, unfit=unfit).encode())


def _reap(pid: int, children: set[int]) -> int:
    """Return how a dead rank ended; with the last one goes all that the gang's ranks left
    behind, in whatever session.
    """
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    children.discard(pid)
    if not children:
        _kill_all()
    return status


def _kill_all() -> None:
    """Kill and reap every child, and those that become children by it, until there are none."""
    deadline = time.monotonic() + SWEEP_TIMEOUT_S
    # Raised by waitid when there is no child left; and where the kernel doesn't list children,
    # they are left alone.
    with contextlib.suppress(ChildProcessError, FileNotFoundError):
        while time.monotonic() < deadline:
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is None:
                for pid in Path("/proc/thread-self/children").read_text().split():
                    with contextlib.suppress(PermissionError):  # it became another user's
                        os.kill(
                            int(pid), signal.SIGKILL
                        )  # a child that nobody reaped: the number is still its own
                time.sleep(0.001)


def _fork(link: socket.socket) -> int | None:
    """Fork; return the child's pid once it leads a session, before which nobody could kill it
    as one, and None in the child.
    """
    started_read, started_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(started_read)
        link.close()
        os.setsid()
        os.write(started_write, b"1")
        os.close(started_write)
        return None
    os.close(started_write)
    os.read(started_read, 1)
    os.close(started_read)
    return pid


def _receive(link: socket.socket) -> tuple[ForkServerOrder, list[int]] | None:
    data, fds, _, _ = socket.recv_fds(link, 65_536, MAX_FDS)
    return (ForkServerOrder.decode(data), fds) if data else None


def _become_rank(fds: Sequence[int]) -> Life:
    """Turn the forked child into what a fresh process would be."""
    host_pid = os.getppid()
    files = RankFiles(*fds)
    with Path(os.devnull).open("rb") as nothing:
        for source, target in ((nothing.fileno(), 0), (files.stdout, 1), (files.stderr, 2)):
            os.dup2(source, target)
    os.close(files.stdout)
    os.close(files.stderr)
    page, payload = LaunchPage.read(files.launch)
    # The socket came by another number than it was sent with.
    page = replace(page, launch=replace(page.launch, store_fd=files.store))
    os.chdir(page.folder)
    os.environ.clear()
    os.environ.update(page.environment)
    _forget_the_host(page.environment)
    return (files.events, files.outcome, files.control, files.heartbeat), host_pid, page, payload


def _forget_the_host(environment: dict[str, str]) -> None:
    """Undo what a fresh process wouldn't share with its siblings: random states, the host's own
    thread limits, its argv.
    """
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    random.seed()
    np.random.seed()
    torch.seed()  # as in a fresh process: random, and another one on each rank
    # Read by the libraries when they were loaded, in the host: a rank's own value must be set
    # by hand.
    wanted = environment.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(
        int(wanted) if wanted.isdecimal() and int(wanted) > 0 else len(os.sched_getaffinity(0))
    )
    sys.argv = ["prefect_torch_ddp.rank"]


if __name__ == "__main__":
    main(sys.argv[1:])
