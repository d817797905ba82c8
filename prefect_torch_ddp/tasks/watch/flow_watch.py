"""The flow watch: a process next to the flow's that ends the run in Prefect if that is killed.

It also ends the temporary server that the flow's process had started, which would stay for ever.
It waits with nothing loaded: this module imports Prefect only if it is needed.
"""

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from uuid import UUID

import psutil

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun, TaskRun

OVER = b"over"
"""What the flow's process says at its end."""
PARENT_EVERY_S = 1.0
END_S = 5.0
SERVER_END_S = 10.0
"""How long a temporary server may take to end."""
LOOK_EVERY_S = 0.5
TRIES = 10
RETRY_S = 5.0
"""For an API that is down just now."""
MESSAGE = "The process of the flow run ended without a word: it was killed."


@contextlib.contextmanager
def closed_if_killed(flow_run_id: UUID, grace_s: float) -> Iterator[None]:
    """Have the flow run and its task runs set Crashed if this process dies within the block.

    A killed process closes nothing, Prefect's server doesn't notice, and a deployment's runner
    sets only the flow run's state, none of the task runs'.

    Args:
        flow_run_id: the run that this process runs.
        grace_s: how long others get to set states first, from the death on: a runner, and tasks
            on a cluster that lives on.
    """
    from prefect.settings import get_current_settings  # noqa: PLC0415

    # In its own session: neither a Ctrl-C in the terminal nor a runner that kills the
    # flow's process group is meant for it.
    process = subprocess.Popen(  # noqa: S603 - our own module, by this Python
        [
            *(sys.executable, "-m", __name__),
            *(str(flow_run_id), str(grace_s), str(os.getpid()), *_own_servers()),
        ],
        env=os.environ | get_current_settings().to_environment_variables(exclude_unset=True),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        try:
            process.communicate(OVER, timeout=END_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()


def _own_servers() -> Iterator[str]:
    """Yield pid and start of each temporary server of Prefect's that this process has started."""
    module = sys.modules.get("prefect.server.api.server")  # who has started one has loaded it
    instances = module.SubprocessASGIServer._instances if module else {}  # noqa: SLF001
    for server in instances.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            if (process := server.server_process) is not None:
                yield f"{process.pid}@{psutil.Process(process.pid).create_time()}"


def main(flow_run_id: UUID, grace_s: float, parent: int, servers: Sequence[str]) -> None:
    """Wait until the flow's process has left its block, or is gone."""
    if _is_told_of_end(parent):
        return
    for _ in range(TRIES):
        with contextlib.suppress(Exception):
            close(flow_run_id, grace_s)
            break
        time.sleep(RETRY_S)
    for server in servers:
        pid, started_s = server.split("@")
        _end(int(pid), float(started_s))


def _is_told_of_end(parent: int) -> bool:
    """Wait for the flow's word, or for its death; return which it was.

    The pipe alone doesn't tell a death: what the flow has forked, as for a pool, holds its other
    end for as long as it lives.
    """
    said = b""
    while len(said) < len(OVER):
        # Asked first: what it had said can still be read then. If sys.executable is a script that
        # starts Python, the watch's parent is that script, and the flow lives on.
        has_died = os.getppid() != parent and _is_gone(parent)
        if select.select([0], [], [], 0 if has_died else PARENT_EVERY_S)[0]:
            if not (part := os.read(0, len(OVER) - len(said))):
                return False
            said += part
        elif has_died:
            return False
    return True


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _end(pid: int, started_s: float) -> None:
    """End a process that nobody else will, unless its number is another's by now."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.create_time() != started_s:
            return
        process.terminate()
        try:
            process.wait(SERVER_END_S)
        except psutil.TimeoutExpired:
            process.kill()


def close(flow_run_id: UUID, grace_s: float) -> None:
    """Set Crashed what is still open after the grace period.

    What another process of the same run has begun since then stays as it is.
    """
    from prefect.client.orchestration import get_client  # noqa: PLC0415 - seconds and 100 MB
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId  # noqa: PLC0415
    from prefect.states import Crashed  # noqa: PLC0415

    of_this_run = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    with get_client(sync_client=True) as client:
        deadline = time.monotonic() + grace_s
        state_id = client.read_flow_run(flow_run_id).state_id
        known = {run.id for run in client.read_task_runs(flow_run_filter=of_this_run)}
        while True:
            flow_run = client.read_flow_run(flow_run_id)
            is_flow_open = flow_run.state_id == state_id and _is_open(flow_run)
            task_runs = client.read_task_runs(flow_run_filter=of_this_run)
            left = [run.id for run in task_runs if run.id in known and _is_open(run)]
            if time.monotonic() > deadline or not (left or is_flow_open):
                break
            time.sleep(LOOK_EVERY_S)
        for task_run_id in left:
            client.set_task_run_state(task_run_id, Crashed(message=MESSAGE), force=True)
        if is_flow_open:
            client.set_flow_run_state(flow_run_id, Crashed(message=MESSAGE), force=True)


def _is_open(run: "FlowRun | TaskRun") -> bool:
    return run.state is not None and not run.state.is_final()


if __name__ == "__main__":
    main(UUID(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
