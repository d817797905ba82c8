"""Scripts for torchrun run as Prefect tasks with the same bits, and resume after a kill."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed import Client, LocalCluster
from prefect import flow, task, unmapped
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import InvalidParamsError, ddp_script, list_runs, read_metrics, run_gang
from prefect_torch_ddp.records.run_record import read_run_record
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.workloads import torchrun_script

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("prefect_api")]

SCRIPT = Path(torchrun_script.__file__)
MODULE = f"-m {torchrun_script.__name__}"


@pytest.fixture(scope="module")
def of_torchrun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return the weights of the undisturbed script under torchrun."""
    folder = tmp_path_factory.mktemp("torchrun")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", SCRIPT, folder]
    subprocess.run([*command, "--lr", "0.3"], check=True, timeout=120, capture_output=True)
    return final(folder)


def final(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that a run has left."""
    found: dict[str, torch.Tensor] = torch.load(folder / "final.pt", weights_only=True)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare two models to the last bit."""
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


RESTART, RETRY = {"max_restarts": 1}, {"retries": 1}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("again", "script"),
    [
        pytest.param(RESTART, str(SCRIPT), id="restart-a file"),
        pytest.param(RESTART, MODULE, id="restart-a module", marks=pytest.mark.more),
        pytest.param(RETRY, str(SCRIPT), id="retry-a file", marks=pytest.mark.more),
        pytest.param(RETRY, MODULE, id="retry-a module"),
    ],
)
def test_a_killed_script_goes_on_from_its_own_checkpoint(
    tmp_path: Path,
    dask_cluster: LocalCluster,
    of_torchrun: dict[str, torch.Tensor],
    script: str,
    again: dict[str, int],
) -> None:
    """The next attempt gets `resume_args`, and ends with torchrun's bits."""
    storage = str(tmp_path / "storage")
    train = ddp_script(
        script,
        [tmp_path, "--lr", 0.3],
        resume_args=["--resume"],
        world_size=2,
        storage=storage,
        **again,
    )

    @flow(task_runner=DaskTaskRunner(address=dask_cluster.scheduler_address))
    def nightly() -> None:
        assert train.submit("--die-at", 5).result() is None

    nightly()
    assert_same(final(tmp_path), of_torchrun)
    runs = list_runs(DirectoryStorage(Path(storage)))
    assert runs["state"].tolist() == ["completed"]
    assert runs["attempts"].tolist() == [2]
    metrics = read_metrics(DirectoryStorage(Path(storage)), runs["run_id"][0])
    assert metrics["loss"].notna().any(), "the script reports by current_context()"


@pytest.mark.extended
def test_a_script_needs_no_word_on_its_process_group(
    tmp_path: Path, dask_client: Client, of_torchrun: dict[str, torch.Tensor]
) -> None:
    """`run_gang` lets scripts, and modules that run as one, start their own process group."""
    run_gang(dask_client, MODULE, args=[tmp_path, "--lr", 0.3], world_size=2)
    assert_same(final(tmp_path), of_torchrun)


@pytest.mark.extended
def test_a_mapped_script_runs_once_for_each_element(
    tmp_path: Path, dask_cluster: LocalCluster
) -> None:
    """Prefect itself would run it once, with all elements as its arguments."""
    script = tmp_path / "note.py"
    script.write_text(
        "import sys, pathlib\n"
        "pathlib.Path(sys.argv[1], '-'.join(sys.argv[2:])).touch(exist_ok=False)\n"
    )
    (folder := tmp_path / "noted").mkdir()
    note = ddp_script(script, [folder], world_size=1, storage=str(tmp_path / "storage"))

    @flow(task_runner=DaskTaskRunner(address=dask_cluster.scheduler_address))
    def nightly() -> None:
        note.map(["one", "two"]).result()
        note.map(unmapped("seed"), range(2), "last").result()
        note.map(task(lambda: ["of a future"], name="names").submit()).result()
        assert note.map([]).result() == note.map([], return_state=True) == []

    nightly()
    names = ["of a future", "one", "seed-0-last", "seed-1-last", "two"]
    assert sorted(path.name for path in folder.iterdir()) == names
    kept = DirectoryStorage(tmp_path / "storage")
    records = [read_run_record(kept, run_id) for run_id in list_runs(kept)["run_id"]]
    given = [each.arguments["args"] for each in records]
    assert sorted("-".join(more) for _, *more in given) == names
    assert {first for first, *_ in given} == {str(folder)}


@pytest.mark.extended
def test_each_rank_of_a_script_draws_its_own_numbers(
    tmp_path: Path, dask_cluster: LocalCluster
) -> None:
    """As under torchrun, and unlike there again the same if the seed is."""
    script = tmp_path / "draw.py"
    script.write_text(
        "import os, pathlib, random, sys, numpy, torch\n"
        "drawn = random.random(), numpy.random.rand(), torch.rand(()).item()\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(repr(drawn))\n"
    )
    storage = str(tmp_path / "storage")

    @flow(task_runner=DaskTaskRunner(address=dask_cluster.scheduler_address))
    def nightly(folder: Path) -> list[str]:
        folder.mkdir()
        ddp_script(script, [folder], world_size=2, storage=storage).submit().result()
        return [(folder / rank).read_text() for rank in "01"]

    first, second = nightly(tmp_path / "once")
    assert not set(eval(first)) & set(eval(second))
    assert nightly(tmp_path / "again") == [first, second]


def test_a_script_is_mapped_over_lists_of_one_length() -> None:
    """The error says what was given, and how it is done."""
    note = ddp_script(SCRIPT)
    with pytest.raises(InvalidParamsError, match=r"lists of \[1, 2\] elements: pass lists of one"):
        note.map([1], [1, 2])
    with pytest.raises(InvalidParamsError, match=r"given no list: .* map\(\['--seed=1'"):
        note.map("--seed=1", "--seed=2")


def test_what_is_no_script_is_refused_before_work_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another kind of file is refused at once, and a missing one when the task is called."""
    with pytest.raises(InvalidParamsError, match=r"script is 'train.sh'; give the path of a .py"):
        ddp_script("train.sh")
    monkeypatch.chdir(tmp_path)
    missing = ddp_script("train.py", world_size=2)
    with pytest.raises(InvalidParamsError, match=rf"there is no script {tmp_path}/train.py: give"):
        flow(missing.submit)()
