"""The main of a rank process: from its launch page to its outcome, fresh or forked."""

import ctypes
import multiprocessing.process
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect_torch_ddp.protocol.call import Call
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.protocol.rank import COPIES, LaunchPage, RankLaunch, is_script
from prefect_torch_ddp.rank.link import AgentLink, set_link
from prefect_torch_ddp.rank.process.ending import finish, flush_files, join_threads
from prefect_torch_ddp.rank.process.failure import describe, pickle_value
from prefect_torch_ddp.rank.process.logs import show_output
from prefect_torch_ddp.rank.process.script import run_script
from prefect_torch_ddp.rank.user_code import default_to_fork, resolve

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36  # prctl(2)
LINGER_S = 2.0
"""How long a rank that returned keeps its connections, for peers in their last collective."""


def main(arguments: Sequence[str]) -> None:
    """Run one rank in a fresh process, by `python -m prefect_torch_ddp.rank.process.main`."""
    launch_fd, *fds, parent_pid = map(int, arguments)
    run_rank(fds, parent_pid, *LaunchPage.read(launch_fd))


def run_rank(fds: Sequence[int], parent_pid: int, page: LaunchPage, payload: bytes) -> None:
    """Run the pickled call of one rank to its end; doesn't return.

    Args:
        fds: of the events' socket, the outcome's file, the control pipe and the heartbeat page.
        parent_pid: the process to die with.
        page: how to run.
        payload: the call.
    """
    die_with(parent_pid)
    inherited = frozenset(sys.modules)
    launch = page.launch
    name_process(f"ddp-rank-{launch.place.rank}")
    default_to_fork()
    sys.argv = ["prefect_torch_ddp.rank"]  # else user code would parse our arguments
    link = AgentLink(launch, *fds)
    _set_scratch(Path(page.scratch))
    link.copies = Path(page.scratch, COPIES)
    show_output(link)
    sys.path[:] = launch.code_paths.around(sys.path)
    exit_code = 0
    try:
        _run(launch, payload, link)
    except BaseException as error:  # noqa: BLE001 - whatever ends the function is the outcome
        link.failed(describe(error, launch.place.rank, launch.place.host))
        exit_code = 1
    # Out of that block: the error's traceback kept the function's variables.
    finish(inherited)
    if exit_code:
        # The agent kills the whole gang once this rank has ended. Until then its connections stay
        # open, so that its peers don't fail because of it.
        link.heartbeat.enter(Phase.ENDED)
        link.wait_to_leave(None)
    # Not sys.exit: that would take torch apart, and may hang on what a failure left.
    os._exit(exit_code)


def _run(launch: RankLaunch, payload: bytes, link: AgentLink) -> None:
    call: Call = pickle.loads(payload)
    # Torch loads after the user's own modules, which may set its environment variables.
    from prefect_torch_ddp.rank.distributed import (  # noqa: PLC0415
        choose_device,
        close_connections,
        join_process_group,
    )

    set_link(link)
    choose_device(launch)
    join_process_group(launch)
    link.heartbeat.enter(Phase.FUNCTION)
    value = _run_call(call)
    link.end_if_forked()
    link.heartbeat.enter(Phase.RETURNED)
    join_threads()
    link.returned(pickle_value(value, launch.place.rank))
    flush_files()
    if not link.wait_to_leave(LINGER_S):
        close_connections()
        link.wait_to_leave(None)


def _run_call(call: Call) -> Any:
    if not isinstance(call.fn, str):
        return call.fn(*call.args, **call.kwargs)
    if is_script(call.fn):
        return run_script(call.fn, call.args)
    return resolve(call.fn)(*call.args, **call.kwargs)


def name_process(name: str) -> None:
    """Name this process in `ps -o comm` and `top`, where all would be called python."""
    _prctl(PR_SET_NAME, name.encode()[:15])


def adopt_orphans() -> None:
    """Become the parent of processes below this one when theirs ends, whatever their session."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid != os.getppid():
        os._exit(1)  # it ended before we asked


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value)


def _set_scratch(scratch: Path) -> None:
    """Have multiprocessing put sockets and semaphores where the agent finds and removes them."""
    scratch.mkdir(mode=0o700)
    process = multiprocessing.process.current_process()
    config = process._config  # type: ignore[attr-defined]  # noqa: SLF001 - children inherit it
    config["tempdir"] = str(scratch)  # see multiprocessing.util.get_temp_dir
    config["semprefix"] = f"/{scratch.name}"  # see multiprocessing.synchronize.SemLock


if __name__ == "__main__":
    main(sys.argv[1:])
