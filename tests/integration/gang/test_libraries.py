"""Each Dask worker loads libraries once in advance, if the user names them or they are safe."""

import os
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, LocalCluster

from prefect_torch_ddp import InvalidParamsError, run_gang, warm
from prefect_torch_ddp.gang.worker.child import CONTRACT
from prefect_torch_ddp.protocol import rank as protocol
from prefect_torch_ddp.protocol.events import GangEvent, LogLine
from prefect_torch_ddp.protocol.rank import SAFE_LIBRARIES
from tests.support.waiting import HANG_S, wait_until

NOTE = "import os, pathlib\nwith pathlib.Path({place!r}, __name__).open('a') as file:\n"
NOTE += "    file.write(f'{{os.getpid()}}\\n')\n"
LIBRARIES = {
    "good": "",
    "better": "",
    "starts_thread": "import threading\n"
    "threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "fails_once": "if os.environ.get('RANK') is None:\n    raise RuntimeError('no rank')",
    "dies": "os.environ.get('RANK') or os._exit(7)",
    "killed_once": "import signal\nmark = pathlib.Path(os.environ['PYTHONUSERBASE'], 'killed')\n"
    "if os.environ.get('RANK') is None and not mark.exists():\n"
    "    mark.touch()\n    os.kill(os.getpid(), signal.SIGKILL)",
    "handles": "import signal\nif os.environ.get('RANK') is None:\n"
    "    signal.signal(signal.SIGTERM, os._exit)",
}
REASONS = {
    "starts_thread": "it runs 2 threads",
    "fails_once": "RuntimeError: no rank",
    "dies": "the fork server ended with status 7",
}


@contextmanager
def cluster_with_libraries(place: Path) -> Iterator[Client]:
    """Start a cluster of one worker that has its own folder of installed packages."""
    user_site = sysconfig.get_path("purelib", "posix_user", vars={"userbase": str(place)})
    installed, own = Path(user_site), place / "own"
    for folder in (installed, own, place / "loads"):
        folder.mkdir(parents=True)
    note = NOTE.format(place=str(place / "loads"))
    for name, code in LIBRARIES.items():
        (installed / f"{name}.py").write_text(note + code, encoding="utf-8")
    (own / "trains.py").write_text(
        f"import os, signal, {', '.join(LIBRARIES)}\n"
        "def train(): return os.getpid(), os.getppid()\n"
        "def handler(): return signal.getsignal(signal.SIGTERM) is os._exit, os.getppid()\n",
        encoding="utf-8",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, [Path.cwd(), installed])))
        patch.setenv("PYTHONUSERBASE", str(place))
        patch.setattr(site, "USER_SITE", user_site)
        protocol.package_folders.cache_clear()
        patch.syspath_prepend(str(own))
        patch.syspath_prepend(str(installed))
        with (
            LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
            Client(cluster) as client,
        ):
            yield client
    protocol.package_folders.cache_clear()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of the libraries of the cluster that tests share."""
    return tmp_path_factory.mktemp("libraries")


@pytest.fixture(scope="module")
def client(place: Path) -> Iterator[Client]:
    """Share a cluster among tests that name different libraries: a worker remembers what it has
    tried to load."""
    with cluster_with_libraries(place) as client:
        yield client


@pytest.fixture
def own_client(tmp_path: Path) -> Iterator[Client]:
    """Start a cluster whose worker has tried nothing."""
    with cluster_with_libraries(tmp_path) as client:
        yield client


def loads(place: Path, library: str) -> list[int]:
    """Return the processes that imported a library."""
    path = place / "loads" / library
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def run(
    client: Client, preload: tuple[str, ...] | None = None
) -> tuple[set[int], set[int], list[str]]:
    """Run a gang of two ranks; return them, their parents, and what the gang itself said."""
    events: list[GangEvent] = []
    call: dict[str, Any] = {"world_size": 2, "ranks_per_worker": 2, "on_event": events.append}
    values = run_gang(client, "trains:train", **call, preload=preload)
    said = [event.text for event in events if isinstance(event, LogLine)]
    return {rank for rank, _ in values}, {parent for _, parent in values}, said


@pytest.mark.extended
def test_a_library_that_is_named_is_loaded_once(client: Client, place: Path) -> None:
    """`warm` loads the library, and only later gangs that name it get it."""
    warm(client, preload=["good"])
    wait_until(lambda: bool(loads(place, "good")))
    _, servers, said = run(client, ("good",))
    assert set(loads(place, "good")) == servers
    ranks, same, said_again = run(client, ("good", "better"))
    assert same == servers, "it loads what is wanted besides"
    assert set(loads(place, "better")) > servers
    assert ranks.isdisjoint(loads(place, "good"))
    assert ranks.isdisjoint(loads(place, "better"))
    without, others, said_last = run(client)
    assert others.isdisjoint(servers)
    assert without <= set(loads(place, "good"))
    assert said == said_again == said_last == []


@pytest.mark.extended
def test_a_library_that_cannot_be_loaded_ahead_is_left_to_the_ranks(
    own_client: Client, tmp_path: Path
) -> None:
    """The log names the library and the reason once, and the others are loaded."""
    ranks, _, said = run(own_client, ("good", *REASONS))
    for library, reason in REASONS.items():
        assert f"loaded in each rank and not in advance: {library} ({reason})" in said
        assert ranks <= set(loads(tmp_path, library))
    _, _, said_again = run(own_client, ("good", *REASONS))
    assert (len(said), said_again) == (len(REASONS), [])
    with pytest.raises(InvalidParamsError, match="'trains', which is your own module"):
        run(own_client, ("trains",))


def test_a_library_is_tried_again_if_the_kernel_killed_its_server(
    client: Client, place: Path
) -> None:
    """A gang whose server is killed while it loads runs without it; the next one loads it."""
    ranks, _, said = run(client, ("killed_once",))
    assert said == [
        "loaded in each rank and not in advance: killed_once (the fork server ended with status -9)"
    ]
    assert ranks <= set(loads(place, "killed_once"))
    again, servers, said = run(client, ("killed_once",))
    assert said == []
    assert servers <= set(loads(place, "killed_once"))
    assert again.isdisjoint(loads(place, "killed_once"))


def test_only_a_gang_that_names_a_library_says_that_it_was_not_loaded(
    client: Client, place: Path
) -> None:
    """The next gang that names the library reports the failure of `warm`, and no other gang."""
    warm(client, preload=["fails_once"])
    wait_until(lambda: bool(loads(place, "fails_once")))
    said = [run(client, preload)[2] for preload in ((), ("fails_once",), ("fails_once",))]
    text = f"loaded in each rank and not in advance: fails_once ({REASONS['fails_once']})"
    assert said == [[], [text], []]


@pytest.mark.extended
def test_a_worker_without_rank_0_keeps_no_note(own_client: Client) -> None:
    """A later gang doesn't repeat the message of an earlier one."""
    cluster: Any = own_client.cluster
    cluster.scale(2)
    own_client.wait_for_workers(2, timeout=HANG_S)
    events: list[GangEvent] = []
    call: dict[str, Any] = {"preload": ("fails_once",), "on_event": events.append}
    (_, server), _ = run_gang(own_client, "trains:train", world_size=2, **call)
    assert sum(isinstance(event, LogLine) for event in events) == 1
    worker = psutil.Process(server).ppid()
    of_rank_0 = [address for address, pid in own_client.run(os.getpid).items() if pid == worker]
    assert list(own_client.retire_workers(of_rank_0)) == of_rank_0
    assert run(own_client, ("fails_once",))[2] == []


def test_a_librarys_signal_handler_is_the_ranks_and_not_the_servers(client: Client) -> None:
    """The server ignores SIGTERM, and its ranks have the handler that the library set."""
    call: dict[str, Any] = {"world_size": 1, "preload": ("handles",)}
    ((has_handler, server),) = run_gang(client, "trains:handler", **call)
    assert has_handler
    psutil.Process(server).terminate()
    assert run_gang(client, "trains:handler", **call) == [(True, server)]


PROBE = """
import gc, os, random, sys
import numpy as np, torch, torch.distributed, torch.utils.data, torch._dynamo
reads, read = set(), os._Environ.__getitem__
def note(environ, name):
    reads.add(name)
    return read(environ, name)
def look():
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    return states, sorted(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
def generators():
    kinds = random.Random, np.random.Generator, np.random.RandomState
    return sum(isinstance(each, kinds) for each in gc.get_objects())
gc.collect()
before, made, environment = look(), generators(), dict(os.environ)
os._Environ.__getitem__ = note
__import__(sys.argv[1])
os._Environ.__getitem__ = read
gc.collect()
assert look() == before, "a state, a file or a thread"
assert generators() == made, "a generator"
assert dict(os.environ) == environment, "the environment"
assert not torch.cuda.is_initialized()
print(*reads)
"""


@pytest.mark.extended
@pytest.mark.parametrize("library", SAFE_LIBRARIES)
def test_safe_libraries_leave_a_fork_server_fit(library: str) -> None:
    """The import of a safe library starts, opens, draws and changes nothing."""
    command = [sys.executable, "-c", PROBE, library]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    reads = subprocess.check_output(command, text=True, timeout=HANG_S, env=environment).split()
    assert set(reads).isdisjoint(CONTRACT)
