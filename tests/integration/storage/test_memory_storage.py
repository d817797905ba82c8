"""A storage of another package is added as CONTRIBUTING.md says, and needs nothing else."""

import itertools
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from distributed import LocalCluster
from safetensors.torch import load

from prefect_torch_ddp import list_runs, storage_from_uri, train_flow
from prefect_torch_ddp.storage.protocol import Storage, StorageBelow
from prefect_torch_ddp.tasks.report.page.checkpoints import load_code
from tests.integration.tasks.test_recovery import params_of
from tests.support.memory_storage import MemoryStorage, memory_server
from tests.support.storage_conformance import StorageConformance

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Run a server for the module."""
    with memory_server() as found:
        yield found


class TestMemoryStorage(StorageConformance):
    """Everything a storage must do."""

    num_examples = 20

    @pytest.fixture
    def make_storage(self, port: int) -> Callable[[], Storage]:
        """Make storages in separate folders."""
        return lambda: MemoryStorage("127.0.0.1", port, uuid.uuid4().hex)


class TestAFolderOfIt(StorageConformance):
    """A folder of a storage that doesn't itself answer what a folder is."""

    num_examples = 20

    @pytest.fixture
    def make_storage(self, port: int) -> Callable[[], Storage]:
        """Make folders of one storage."""
        numbers = itertools.count()
        storage = MemoryStorage("127.0.0.1", port, uuid.uuid4().hex)

        def make() -> Storage:
            found = storage.below("team").below(f"x{next(numbers)}/y")
            assert isinstance(found, StorageBelow)
            return found

        return make


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package whose entry point names the scheme."""
    about = tmp_path / "site" / "memory_storage-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: memory-storage\nVersion: 1.0\n")
    maker = "tests.support.memory_storage:MemoryStorage.from_uri"
    (about / "entry_points.txt").write_text(f"[prefect_torch_ddp.storages]\nmemory = {maker}\n")
    monkeypatch.syspath_prepend(about.parent)


@pytest.mark.long
@pytest.mark.usefixtures("installed", "prefect_api")
def test_a_whole_flow_on_a_third_storage(port: int, dask_cluster: LocalCluster) -> None:
    """A flow prepares, trains over a kill, evaluates and publishes in a server's memory."""
    uri = f"memory://127.0.0.1:{port}/flow"
    killed = {"how": "SIGKILL", "step": 12, "rank": 1, "attempts": [1]}
    given = {"storage": uri, "options": {"fault": killed}, "max_restarts": 1}
    report = train_flow(params_of(Path("unused"), dask_cluster.scheduler_address, **given))
    assert report.training.resumed_from_step in {5, 10}  # whichever was written in time
    assert report.evaluation.num_samples
    assert report.checkpoint.uri.startswith(f"{uri}/runs/{report.run_id}/checkpoints/")
    assert report.model_uri is not None
    model = torch.nn.Linear(2, 2)
    exec("\n".join(load_code("model", report.model_uri).splitlines()[1:-1]), {"model": model})
    exported = load(storage_from_uri(uri).read(report.model_uri.removeprefix(f"{uri}/")))
    assert torch.equal(model.weight, exported["weight"]), "the report's code loads the model"
    assert list_runs(storage_from_uri(uri))["run_id"].tolist() == [report.run_id]
