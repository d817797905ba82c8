"""Models are in MLflow's registry once, with what their cards say, where MLflow can load them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.mlflow_server import MlflowServer, mlflow_in
from tests.support.s3_server import S3Server
from tests.support.storage_0_1 import RUN_ID, copied

# The environment of the server is installed once for a checkout.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

REGISTERED = """
import json, sys, mlflow
from pathlib import Path
client = mlflow.MlflowClient()
found = []
for each in client.search_model_versions(f"name = '{sys.argv[1]}'"):
    files = Path(mlflow.artifacts.download_artifacts(f"models:/{each.name}/{each.version}"))
    names = {path.name: path.read_bytes().hex() for path in files.iterdir()}
    run = client.get_run(each.run_id)
    found.append([each.version, run.info.run_name, run.info.status, each.tags, names])
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """Run MLflow's server."""
    with mlflow_in(tmp_path_factory.mktemp("mlflow")) as found:
        yield found


def with_variables(server: MlflowServer, **variables: str) -> MlflowServer:
    """Have the client's processes get more variables."""
    return replace(server, environment={**server.environment, **variables})


@pytest.mark.parametrize("kind", [pytest.param("directory", marks=pytest.mark.more), "s3"])
def test_a_model_is_registered_once_with_its_card(
    server: MlflowServer, s3_server: S3Server, tmp_path: Path, kind: str
) -> None:
    """A storage that was moved since the training; a sync that was killed after it made the name;
    a second sync. What MLflow's client then loads are the exported weights and their card."""
    folder, name = DirectoryStorage(copied(tmp_path / "store")), f"digits-{kind}"
    own = with_variables(server, MLFLOW_EXPERIMENT_NAME=name, MLFLOW_REGISTERED_MODEL_NAME=name)
    uri = str(folder.root)
    if kind == "s3":
        bucket = s3_server.storage()
        for each in folder.list():
            bucket.write(each.key, folder.read(each.key))
        uri = bucket.uri
        variables = s3_server.environment()
        own = with_variables(own, **variables, MLFLOW_S3_ENDPOINT_URL=s3_server.endpoint_url)
    made = f"import mlflow; mlflow.MlflowClient().create_registered_model('{name}')"
    own.run("-c", made)
    sync = ["-m", "prefect_torch_ddp", "sync", RUN_ID, "--tracker", "mlflow", "--storage", uri]
    for _ in range(2):
        own.run(*sync)
        ((version, run, status, tags, files),) = json.loads(own.run("-c", REGISTERED, name))
    assert (version, run, status) == ("1", RUN_ID, "FINISHED")
    weights = bytes.fromhex(files["model.safetensors"])
    card = json.loads(bytes.fromhex(files["model.json"]))
    ours = {each.removeprefix("prefect_torch_ddp."): value for each, value in tags.items()}
    assert ours["sha256"] == card["sha256"] == sha256(weights).hexdigest()
    assert (ours["run_id"], ours["step"], ours["dataset"]) == (RUN_ID, "15", "58f78fcf18f83a05")
    assert float(ours["metrics.loss"]) == card["metrics"]["loss"]
    assert json.loads(ours["options"]) == card["options"]


@pytest.mark.more
def test_without_the_variable_nothing_is_registered(server: MlflowServer, tmp_path: Path) -> None:
    """A model whose files were deleted is an error, which doesn't keep the rest from MLflow."""
    storage = copied(tmp_path / "store")
    own = with_variables(server, MLFLOW_EXPERIMENT_NAME="plain")
    sync = ["-m", "prefect_torch_ddp", "sync", RUN_ID, "--tracker", "mlflow", "--storage"]
    own.run(*sync, str(storage))
    (storage / f"runs/{RUN_ID}/models/000002/model.json").unlink()
    named = with_variables(own, MLFLOW_REGISTERED_MODEL_NAME="gone", MLFLOW_EXPERIMENT_NAME="gone")
    said = named.run(*sync, str(storage), status=2)
    assert "/models/000002/model.safetensors isn't registered in MLflow: there is no" in said
    count = "import mlflow; print(len(mlflow.MlflowClient().search_model_versions()))"
    before = int(server.run("-c", count))
    assert json.loads(server.run("-c", REGISTERED, "gone")) == []
    named.run(*sync, str(storage), status=2)
    assert int(server.run("-c", count)) == before
    run = "import mlflow; print(mlflow.search_runs(experiment_names=['gone']).status[0])"
    assert server.run("-c", run).strip() == "FINISHED"
