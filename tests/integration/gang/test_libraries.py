"""Libraries are loaded once for each Dask worker, where a rank computes the same with them."""

import os
import site
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

from prefect_torch_ddp import run_gang, warm
from prefect_torch_ddp.protocol import rank as protocol
from prefect_torch_ddp.protocol.events import GangEvent, LogLine
from tests.support.waiting import wait_until

NOTE = "import os, pathlib\nwith pathlib.Path({place!r}, __name__).open('a') as file:\n"
NOTE += "    file.write(f'{{os.getpid()}}\\n')\n"
ODD = {
    "starts_thread": "import threading\n"
    "threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "opens_file": "FILE = open(os.devnull)",
    "reads_rank": "RANK = os.environ.get('LOCAL_RANK')",
    "draws": "import random\nDRAWS = random.Random()",
    "fails_once": "if os.environ.get('RANK') is None:\n    raise RuntimeError('no rank')",
}
REASONS = {
    "starts_thread": "it runs 2 threads",
    "opens_file": "it opens files",
    "reads_rank": "it reads LOCAL_RANK, which is each rank's own",
    "draws": "it keeps random numbers of its own",
    "fails_once": "RuntimeError: no rank",
}


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Start a cluster of one worker that has a folder of installed packages of its own."""
    user_site = sysconfig.get_path("purelib", "posix_user", vars={"userbase": str(tmp_path)})
    installed, own = Path(user_site), tmp_path / "own"
    for folder in (installed, own, tmp_path / "loads"):
        folder.mkdir(parents=True)
    note = NOTE.format(place=str(tmp_path / "loads"))
    for name, code in {**ODD, "good": "", "dies": "os.environ.get('RANK') or os._exit(7)"}.items():
        (installed / f"{name}.py").write_text(note + code)
    (own / "helper.py").write_text("import good\n")
    (own / "trains.py").write_text(
        f"import helper, os\nimport {', '.join(ODD)}\n"
        "def train(): return os.getpid(), os.getppid()\n"
        "def evaluate(): return os.getpid(), os.getppid()\n"
    )
    (own / "unlucky.py").write_text("import good, dies\ndef train(): return 'trained'\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [Path.cwd(), installed])))
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path))
    monkeypatch.setattr(site, "USER_SITE", user_site)
    protocol.package_folders.cache_clear()
    monkeypatch.syspath_prepend(str(own))
    monkeypatch.syspath_prepend(str(installed))
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client
    protocol.package_folders.cache_clear()


def loads(tmp_path: Path, library: str) -> list[int]:
    """Return the processes that imported a library."""
    path = tmp_path / "loads" / library
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def run(client: Client, name: str) -> tuple[list[Any], list[str]]:
    """Run a gang of two ranks; return their values, and what the gang itself said."""
    events: list[GangEvent] = []
    call = {"world_size": 2, "ranks_per_worker": 2, "on_event": events.append}
    values = run_gang(client, name, **call)
    return values, [event.text for event in events if isinstance(event, LogLine)]


def test_a_library_is_loaded_once_and_what_does_not_fit_in_ranks(
    client: Client, tmp_path: Path
) -> None:
    """`warm` loads those of the next gang ahead, a second gang finds them loaded; what would differ
    in a fork is named once, with the reason."""
    warm(client, "trains:train")
    wait_until(lambda: bool(loads(tmp_path, "good")))
    first, said = run(client, "trains:train")
    loaded_by = loads(tmp_path, "good")
    second, said_again = run(client, "trains:evaluate")
    assert {parent for _, parent in first + second} == {loaded_by[-1]}
    assert loads(tmp_path, "good") == loaded_by
    assert len(loaded_by) == 1 + len(ODD), "each odd one costs a server its life"
    for library, reason in REASONS.items():
        assert f"not loaded ahead but in each rank: import {library} ({reason})" in said
        assert {pid for pid, _ in first + second} <= set(loads(tmp_path, library))
    assert len(said) == len(ODD)
    assert said_again == []


def test_an_import_that_ends_the_server_costs_the_libraries_alone(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gang runs, its ranks load what they import, and another gang has its libraries. A
    checkout that comes first on the path, as with `python -m flows.quickstart`, is installed."""
    values, said = run(client, "unlucky:train")
    assert values == ["trained", "trained"]
    left = "import good; import dies (the fork server ended with status 7)"
    assert said == [f"not loaded ahead but in each rank: {left}"]
    assert len(loads(tmp_path, "good")) == 3
    monkeypatch.syspath_prepend(str(Path.cwd()))
    example = "from prefect_torch_ddp.examples import digits\ndef train(): return 'trained'\n"
    (tmp_path / "own" / "example.py").write_text(example)
    assert run(client, "example:train") == (["trained", "trained"], [])
