"""A mix of gangs that end in every way, and the comparison of what is there before and
after it."""

import collections
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from distributed import Client, Future

from prefect_torch_ddp import GangCancelledError, NotEnoughWorkersError, RankFailedError, run_gang
from prefect_torch_ddp.gang.worker.rank_io import SEMAPHORES
from prefect_torch_ddp.protocol.rank import Launcher
from tests.support.gangs import own_cluster, sleeping_gang
from tests.support.waiting import HANG_S, becomes_true
from tests.workloads import failing, plain

MIX = (
    *("good", "loader", "raise", "SIGKILL", "os_exit", "killed_outside"),
    *("cancelled", "refused", "queued", "loader_killed", "good"),
)
SLACK = 4
"""Connections and threads that Dask may open and keep for reuse, in each process."""


def run_mix(client: Client, folder: Path, number: int, launcher: Launcher = "auto") -> None:
    """Run the gang of this number, and assert that it ends as it should."""
    how = MIX[number % len(MIX)]
    call: dict[str, Any] = {"world_size": 2, "launcher": launcher}
    match how:
        case "good":
            assert run_gang(client, plain.sum_of_ones, **call) == [2.0, 2.0]
        case "loader":
            assert run_gang(client, plain.load_with_workers, args=(None,), **call) == [285, 285]
        case "raise" | "SIGKILL" | "os_exit":
            with pytest.raises(RankFailedError, match="rank 1 "):
                run_gang(client, failing.only_on, args=(1, how), **call)
        case "loader_killed":
            with pytest.raises(RankFailedError, match=r"rank 1 .* SIGKILL"):
                run_gang(client, failing.die_while_loading, args=("spawn",), **call)
        case "queued":
            with ThreadPoolExecutor(3) as pool:
                gangs = [pool.submit(run_gang, client, plain.sum_of_ones, **call) for _ in range(3)]
                assert [gang.result(HANG_S) for gang in gangs] == [[2.0, 2.0]] * 3
        case _:
            _disturb(client, folder / str(number), how, launcher)


def _disturb(client: Client, place: Path, how: str, launcher: Launcher) -> None:
    """Start a gang that would run for ever, and end it from outside."""
    with sleeping_gang(client, place, launcher=launcher) as (gang, ranks):
        if how == "refused":
            with pytest.raises(NotEnoughWorkersError):
                run_gang(client, plain.sum_of_ones, world_size=2, queue_timeout_s=0.3)
        if how == "cancelled":
            agents = [key for key in map(str, client.futures) if key.startswith("ddp-agent-")]
            client.cancel([Future(key, client) for key in agents], force=True)
        else:
            ranks[0].kill()
        expected = GangCancelledError if how == "cancelled" else RankFailedError
        assert type(gang.exception(HANG_S)) is expected


@dataclass(frozen=True)
class Belongings:
    """What one process has."""

    name: str
    files: collections.Counter[str]
    """Open file descriptors by what they are."""
    num_threads: int
    ports: tuple[int, ...]
    rss_bytes: int


def assert_nothing_is_left(tmp_path: Path, patch: pytest.MonkeyPatch, num_gangs: int) -> None:
    """Run that many gangs on a separate cluster, which has run one of each before, and compare."""
    with TemporaryDirectory(prefix="left-") as temporary:  # loader workers need a short path
        patch.setenv("TMPDIR", temporary)
        _run_and_compare(tmp_path, Path(temporary), num_gangs)


def _run_and_compare(tmp_path: Path, temporary: Path, num_gangs: int) -> None:
    folders = [tmp_path / "warm", tmp_path / "counted"]
    with own_cluster(2) as (_, client):
        for folder in folders:
            folder.mkdir()
        for number in range(len(MIX)):
            run_mix(client, folders[0], number)
        before, files_before = belongings(), files_in(temporary)
        for number in range(num_gangs):
            run_mix(client, folders[1], number, "exec" if number % 17 == 0 else "auto")
        left: list[str] = []

        def is_nothing_left() -> bool:
            left[:] = differences(before, belongings())
            return not left

        # No second look: Dask's monitor may have a file open just then.
        assert becomes_true(is_nothing_left), left
        assert not sorted(files_in(temporary) ^ files_before)
        after = belongings()
        for pid in before.keys() & after.keys():
            old = before[pid]
            grown = (after[pid].rss_bytes - old.rss_bytes) / 2**20
            files = after[pid].files
            print(f"{old.name} ({pid}) grew by {grown:.1f} MiB over {num_gangs} gangs; {files}")


def files_in(temporary: Path) -> set[Path]:
    """Return all temporary files, with the named semaphores of ranks."""
    return {*temporary.rglob("*"), *SEMAPHORES.glob("sem.ddp-*")}


def belongings() -> dict[int, Belongings]:
    """Describe this process, the Dask processes and fork servers below it, and whatever else is
    alive there."""
    found = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = _describe(process)
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue
    return found


def _describe(process: psutil.Process) -> Belongings:
    connections = process.net_connections("tcp")
    ports = sorted(c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN)
    files = collections.Counter(map(_kind, Path(f"/proc/{process.pid}/fd").iterdir()))
    rss_bytes = process.memory_info().rss
    return Belongings(process.name(), files, process.num_threads(), tuple(ports), rss_bytes)


def _kind(fd: Path) -> str:
    try:
        return str(fd.readlink()).partition(":[")[0]
    except OSError:
        return "gone"


def differences(before: dict[int, Belongings], after: dict[int, Belongings]) -> list[str]:
    """Return what exists now and didn't before; empty if there is nothing."""
    # A worker's fork server may have been replaced, but not become two.
    new = collections.Counter(after[pid].name for pid in after.keys() - before.keys())
    new -= collections.Counter(before[pid].name for pid in before.keys() - after.keys())
    found = [f"{count} more of process {name}" for name, count in new.items()]
    for pid in after.keys() & before.keys():
        old, new = before[pid], after[pid]
        who = f"{new.name} ({pid})"
        found += [f"{who} listens at {port}" for port in set(new.ports) - set(old.ports)]
        for kind, count in new.files.items():
            more = count - old.files[kind]
            if more > (SLACK if kind == "socket" else 0):
                found.append(f"{who} has {more} more of {kind}")
        if new.num_threads > old.num_threads + SLACK:
            found.append(f"{who} has {new.num_threads - old.num_threads} more threads")
    return found
