"""A real MLflow server has a run's history once, whoever is killed."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from distributed import Client

from prefect_torch_ddp import read_metrics, run_gang
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.records.run_record import RunRecord, write_run_record
from prefect_torch_ddp.results import Report
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tracking.attempt_log import RunAttemptLog
from tests.support.gangs import RUN_WITH_CONTEXT
from tests.support.mlflow_server import MlflowServer, mlflow_in
from tests.support.ports import free_port
from tests.support.waiting import HANG_S

# The environment of the server is installed once for a checkout.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

RUN = "calm-otter-12345678"
NUM_STEPS = 1500
EVERY = 50
KILLS = {1: [1, 170], 2: [0, 430], 3: [1, 431], 4: [0, 900], 5: [1, 1333]}
"""By attempt: the rank, and the step in which it is killed."""
STRUCK, NUM_SYNC_KILLS = "tests.workloads.struck_sync", 45
SERIES = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient()
experiment = client.get_experiment_by_name(sys.argv[1])
found = []
for run in client.search_runs([experiment.experiment_id]):
    series = {
        name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    data = run.data
    found.append([run.info.run_name, run.info.status, series, data.params, data.tags])
json.dump([experiment.name, found], sys.stdout)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """Run MLflow's server."""
    with mlflow_in(tmp_path_factory.mktemp("mlflow")) as found:
        yield found


def train(client: Client, storage: DirectoryStorage) -> None:
    """Train on two ranks, of which some are killed."""
    options = {"num_steps": NUM_STEPS, "kill": KILLS}
    checkpoint = CheckpointParams(every_steps=EVERY, every_s=None)

    def arguments(attempt: int):
        config = RankConfig(RUN, attempt, "task", storage, options=options, checkpoint=checkpoint)
        return config, "tests.workloads.stored:report_steps"

    log = RunAttemptLog(storage, RUN, knows_steps=True)
    about = {"args": arguments, "attempt_log": log, "max_restarts": len(KILLS)}
    run_gang(client, RUN_WITH_CONTEXT, world_size=2, **about)


def failure_record(storage: DirectoryStorage, experiment: str) -> RunRecord:
    """Make a run's record, as its task writes it at its start."""
    return RunRecord(
        run_id=RUN,
        experiment=experiment,
        workload="stored",
        began=datetime.now(UTC),
        storage=storage.uri,
        parameters={"world_size": 2},
        options={"lr": 0.01},
        commit="abc123",
    )


def test_mlflow_has_each_step_once_though_ranks_and_syncs_are_killed(
    server: MlflowServer, dask_client: Client, tmp_path: Path
) -> None:
    """Ranks are killed 5 times and syncs at least 45 times, before and after each kind of call.
    MLflow, which can't delete a point, then has what `read_metrics` has, in one run."""
    storage = DirectoryStorage(tmp_path)
    record = failure_record(storage, "kills")
    write_run_record(storage, record)
    command = [str(server.python), "-m", STRUCK, str(tmp_path), RUN, str(NUM_SYNC_KILLS)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=server.environment, **pipes) as syncs:
        try:
            train(dask_client, storage)
        except BaseException:
            syncs.kill()
            raise
        printed, _ = syncs.communicate()
    assert syncs.returncode == 0
    assert int(printed) >= NUM_SYNC_KILLS

    newest = max(each.step for each in list_manifests(storage, RUN))
    assert newest >= NUM_STEPS - EVERY
    sync = ["-m", "prefect_torch_ddp", "sync", RUN, "--tracker", "mlflow", "--storage"]
    server.run(*sync, str(tmp_path))
    expected = read_metrics(storage, RUN, by="step")
    _, (running,) = json.loads(server.run("-c", SERIES, "kills"))
    assert running[1] == "RUNNING"
    assert [step for step, _ in running[2]["loss"]] == list(range(1, newest))

    top = {"acc@1": 0.5, "acc#1": 0.25}  # MLflow's names have no such characters
    evaluation = Report(num_samples=8, accuracy=0.875, loss=0.25, classes=(), metrics=top)
    done = {"state": "completed", "ended": datetime.now(UTC), "num_steps": NUM_STEPS}
    done |= {"evaluation": evaluation, "model_uris": {"model": "file:///model.pt"}}
    write_run_record(storage, record.model_copy(update=done))
    printed = server.run(*sync, str(tmp_path))
    assert f"it has all up to step {NUM_STEPS}" in printed
    assert "MLflow got 0 values" in server.run(*sync, str(tmp_path))
    experiment, (run,) = json.loads(server.run("-c", SERIES, "kills"))
    name, status, series, params, tags = run
    assert (experiment, name, status) == ("kills", RUN, "FINISHED")
    for metric in ("loss", "twice_step_plus_rank"):
        rows = expected[["step", metric]].itertuples(index=False, name=None)
        assert sorted(map(tuple, series.pop(metric))) == list(rows)
    assert len(expected) == NUM_STEPS
    assert series == {
        "evaluation/accuracy": [[NUM_STEPS, 0.875]],
        "evaluation/loss": [[NUM_STEPS, 0.25]],
        "evaluation/acc_1": [[NUM_STEPS, 0.5]],
        "evaluation/evaluation/acc_1": [[NUM_STEPS, 0.25]],
    }
    assert params == {"world_size": "2", "options.lr": "0.01", "seed": "0"}
    assert tags["prefect_torch_ddp.model.model"] == "file:///model.pt"
    assert tags["mlflow.source.git.commit"] == "abc123"


@pytest.mark.more
def test_a_tracker_that_is_away_is_named_and_brought_up_to_date_later(
    server: MlflowServer, tmp_path: Path
) -> None:
    """The command says in a line who doesn't answer, without the password; a later one sends
    everything."""
    storage = DirectoryStorage(tmp_path)
    done = {"state": "failed", "ended": datetime.now(UTC), "cause": "ValueError: boom"}
    record = failure_record(storage, "outage").model_copy(update=done)
    write_run_record(storage, record)
    sync = ["-m", "prefect_torch_ddp", "sync", "latest", "--tracker", "mlflow", "--storage"]
    away = replace(
        server,
        environment={
            **server.environment,
            "MLFLOW_TRACKING_URI": f"http://user:hunter2@127.0.0.1:{free_port()}",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        },
    )
    said = away.run(*sync, str(tmp_path), status=2)
    assert "MLflow at http://(hidden)@127.0.0.1" in said
    assert "hunter2" not in said
    printed = server.run(*sync, str(tmp_path))
    assert "MLflow got 0 values of run" in printed
    assert "no step is final yet" in printed
    assert f"{server.url}/#/experiments/" in printed
    (run,) = json.loads(server.run("-c", SERIES, "outage"))[1]
    assert run[1] == "FAILED"
    assert run[4]["prefect_torch_ddp.cause"] == "ValueError: boom"
    completed = {"state": "completed", "ended": datetime.now(UTC), "cause": ""}
    write_run_record(storage, record.model_copy(update=completed))
    server.run(*sync, str(tmp_path))
    (run,) = json.loads(server.run("-c", SERIES, "outage"))[1]
    assert run[1] == "FINISHED"
    assert "prefect_torch_ddp.cause" not in run[4], "it was tried again"
    typo = {**server.environment, "MLFLOW_TRACKING_URI": "mlflow:5000"}
    said = replace(server, environment=typo).run(*sync, str(tmp_path), status=2)
    assert "MLflow at mlflow:5000 failed: " in said
    assert "Traceback" not in said


@pytest.mark.more
def test_a_run_is_followed_until_it_has_completed(server: MlflowServer, tmp_path: Path) -> None:
    """A process beside it shows its end in MLflow, and ends itself."""
    storage = DirectoryStorage(tmp_path)
    record = failure_record(storage, "followed")
    write_run_record(storage, record)
    command = [str(server.python), "-m", "prefect_torch_ddp", "sync", RUN, "--follow"]
    command += ["--tracker", "mlflow", "--storage", str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "text": True, "cwd": tmp_path}
    with subprocess.Popen(command, env=server.environment, **pipes) as follower:
        try:
            assert "no step is final yet" in follower.stdout.readline()
            (run,) = json.loads(server.run("-c", SERIES, "followed"))[1]
            assert run[1] == "RUNNING"
            done = {"state": "completed", "ended": datetime.now(UTC)}
            write_run_record(storage, record.model_copy(update=done))
            assert follower.wait(HANG_S) == 0
        finally:
            follower.kill()
    (run,) = json.loads(server.run("-c", SERIES, "followed"))[1]
    assert run[1] == "FINISHED"


def test_parameters_that_mlflow_would_call_the_same_are_told_apart(
    server: MlflowServer, tmp_path: Path
) -> None:
    """It refuses a batch with two of one name, and with it all that comes later: the status, for
    example. A second sync sends the same."""
    storage = DirectoryStorage(tmp_path)
    long = "x" * 300
    options = {"vocab": {"<": 0, ">": 1, "_": 2}, f"{long}a": 3, f"{long}b": 4}
    done = {"state": "completed", "ended": datetime.now(UTC), "num_steps": 1, "options": options}
    record = failure_record(storage, "signs").model_copy(update=done)
    write_run_record(storage, record)
    sync = ["-m", "prefect_torch_ddp", "sync", RUN, "--tracker", "mlflow", "--storage"]
    for _ in range(2):
        server.run(*sync, str(tmp_path))
        (run,) = json.loads(server.run("-c", SERIES, "signs"))[1]
        assert run[1] == "FINISHED"
        short = f"options.{long}"[:250]
        assert run[3] == {
            "world_size": "2",
            "seed": "0",
            "options.vocab._": "2",
            "options.vocab._.2": "0",
            "options.vocab._.3": "1",
            short: "3",
            f"{short[:248]}.2": "4",
        }
