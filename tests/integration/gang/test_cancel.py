"""A cancelled gang ends whole; a cancelled training stops after one step and saves it."""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
from distributed import Client, Future

from prefect_torch_ddp import GangCancelledError, NotEnoughWorkersError, RankFailedError, run_gang
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.protocol.events import GangEvent, LogLine, Waiting
from prefect_torch_ddp.rank.stages import run_with_context
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.gangs import all_gone, call_sleeping_gang, pids_in, sleeping_gang
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import hanging, plain


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the run's checkpoints."""
    return [manifest.step for manifest in list_manifests(DirectoryStorage(folder / "store"), "run")]


@contextlib.contextmanager
def training(
    client: Client, folder: Path, function: Callable[..., int] = hanging.train_until_enough
) -> Iterator[tuple["ThreadFuture[list[object]]", list[int]]]:
    """Train in a thread; give its future and the ranks' pids."""
    pids = folder / "pids"
    pids.mkdir()
    args = hanging.config_in(folder), function, (str(pids),)
    with ThreadPoolExecutor(1) as pool:
        gang = pool.submit(run_gang, client, run_with_context, args=args, world_size=2)
        yield gang, pids_in(pids, 2)


def cancel_agents(client: Client, num_agents: int) -> None:
    """Cancel so many agents from outside, by their Dask keys."""
    keys = [key for key in map(str, client.futures) if key.startswith("ddp-agent-")]
    assert len(keys) == 2
    client.cancel([Future(key, client) for key in keys[:num_agents]], force=True)


@pytest.mark.extended
def test_client_cancel_ends_the_gang(dask_client: Client, tmp_path: Path) -> None:
    """Cancelling the Dask keys ends all ranks of a plain function, and the next gang works."""
    with sleeping_gang(dask_client, tmp_path) as (gang, ranks):
        cancel_agents(dask_client, 2)
        assert type(gang.exception(HANG_S)) is GangCancelledError
        wait_until(lambda: all_gone(ranks))
    assert run_gang(dask_client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(hanging.train_until_enough, id="returns"),
        pytest.param(hanging.train_enough, id="raises"),
    ],
)
def test_client_cancel_leaves_a_checkpoint(
    function: Callable[..., int], dask_client: Client, tmp_path: Path
) -> None:
    """If one agent is cancelled, all ranks stop after the same step, which is saved and named,
    also if code after the loop raises since the model isn't fully trained."""
    with training(dask_client, tmp_path, function) as (gang, ranks):
        cancel_agents(dask_client, 1)
        error = gang.exception(HANG_S)
    assert isinstance(error, GangCancelledError)
    assert saved_steps(tmp_path) == [error.step] == [error.checkpoint_step]
    wait_until(lambda: not any(map(psutil.pid_exists, ranks)))
    assert run_gang(dask_client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]


def test_sigterm_of_a_rank_is_its_failure_and_leaves_a_checkpoint(
    dask_client: Client, tmp_path: Path
) -> None:
    """Preemption of one rank is neither a success nor a cancel, so that a retry resumes."""
    with training(dask_client, tmp_path) as (gang, ranks):
        os.kill(ranks[1], signal.SIGTERM)
        error = gang.exception(HANG_S)
    assert isinstance(error, RankFailedError)
    assert (error.rank, error.signal) == (1, signal.SIGTERM)
    (step,) = saved_steps(tmp_path)
    assert f"was ended by SIGTERM (15); all ranks stopped after step {step}" in str(error)


CALLER = """
import sys
from pathlib import Path
from prefect_torch_ddp import run_gang
from prefect_torch_ddp.rank.stages import run_with_context
from tests.support.gangs import own_cluster
from tests.workloads import hanging
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    args = hanging.config_in(folder), hanging.train_until_enough, (str(folder / "pids"),)
    with own_cluster(2) as (_, client):
        run_gang(client, run_with_context, args=args, world_size=2)
"""


@pytest.mark.long
def test_ctrl_c_in_a_terminal_leaves_a_checkpoint(tmp_path: Path) -> None:
    """The signal reaches the whole process group, workers too, and the ranks stop, save and end."""
    pids = tmp_path / "pids"
    pids.mkdir()
    script = tmp_path / "caller.py"
    script.write_text(CALLER, encoding="utf-8")
    command = [sys.executable, str(script), str(tmp_path)]
    caller = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    ranks = pids_in(pids, 2)
    os.killpg(caller.pid, signal.SIGINT)
    wait_until(lambda: not any(map(psutil.pid_exists, ranks)))
    _, said = caller.communicate(timeout=HANG_S)
    assert caller.returncode != 0
    (step,) = saved_steps(tmp_path)
    says = f"all ranks stopped after step {step}; the newest checkpoint is of step {step}"
    assert says in said, said
    assert "KeyboardInterrupt" in said


@pytest.mark.long
def test_ctrl_c_again_ends_the_ranks_at_once(tmp_path: Path) -> None:
    """What it shortens is said before, and it adds no frames; the first one was silent for 20 s."""
    hangs, script, said = tmp_path / "hangs", tmp_path / "caller.py", tmp_path / "said"
    hangs.mkdir()
    script.write_text(
        CALLER.replace("train_until_enough", "train_or_hang").replace("pids", "hangs"),
        encoding="utf-8",
    )
    with said.open("wb") as log:
        command = [sys.executable, str(script), str(tmp_path)]
        caller = subprocess.Popen(command, start_new_session=True, stderr=log)
        try:
            ranks = pids_in(hangs, 2)
            os.killpg(caller.pid, signal.SIGINT)
            wait_until(lambda: "the ranks get up to 20 s to stop" in said.read_text("utf-8"))
            assert all(map(psutil.pid_exists, ranks))
            os.killpg(caller.pid, signal.SIGINT)
            assert caller.wait(HANG_S) != 0
        finally:
            if caller.poll() is None:
                os.killpg(caller.pid, signal.SIGKILL)
                caller.wait()
    wait_until(lambda: not any(map(psutil.pid_exists, ranks)))
    text = said.read_text("utf-8")
    assert "Ctrl-C again ends them at once\n" in text
    assert "\nKeyboardInterrupt\n" in text
    assert "During handling of the above exception" not in text


def start_caller(client: Client, folder: Path) -> BaseProcess:
    """Run a gang from a separate process."""
    folder.mkdir()
    args = client.scheduler.address, str(folder)
    caller = multiprocessing.get_context("spawn").Process(target=call_sleeping_gang, args=args)
    caller.start()
    return caller


def test_death_of_the_caller(dask_client: Client, tmp_path: Path) -> None:
    """After Ctrl-C, SIGTERM or SIGKILL of the caller its ranks end, and the next gang runs."""
    ways = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    folders = [tmp_path / how.name for how in ways]
    callers = [start_caller(dask_client, folder) for folder in folders]
    waiting = dict(zip(folders, callers, strict=True))
    for how in ways:  # in whatever order they get the workers
        wait_until(lambda: any(map(has_ranks, waiting)))
        folder = next(filter(has_ranks, waiting))
        ranks, caller = pids_in(folder, 2), waiting.pop(folder)
        os.kill(caller.pid or 0, how)
        wait_until(lambda ranks=ranks: not any(map(psutil.pid_exists, ranks)))
        caller.join(HANG_S)
        assert caller.exitcode not in (None, 0)
    assert run_gang(dask_client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]


def has_ranks(folder: Path) -> bool:
    """Tell whether a caller's ranks have begun."""
    return any(folder.iterdir())


def test_busy_workers_are_waited_for_and_named(dask_client: Client, tmp_path: Path) -> None:
    """Displays, log and refusal name the gang that keeps the workers busy."""
    said: list[GangEvent] = []
    with sleeping_gang(dask_client, tmp_path, name="night") as (gang, ranks):
        call = {"world_size": 2, "queue_timeout_s": 4.0, "on_event": said.append}
        with pytest.raises(NotEnoughWorkersError, match="busy with gang 'night'"):
            run_gang(dask_client, plain.sum_of_ones, **call)
        ranks[0].kill()
        two = run_gang(dask_client, plain.sum_of_ones, world_size=2, queue_timeout_s=HANG_S)
        assert two == [2.0, 2.0]
        assert isinstance(gang.exception(HANG_S), RankFailedError)
    for kind in (Waiting, LogLine):
        text = next(event.text for event in said if isinstance(event, kind))
        assert re.match(r"waiting for workers: 0 of 2 after \d s \(limit 4 s\): tcp:", text)
        assert text.count("is busy with gang 'night'") == 2
