"""A sweep over one `ddp_task`: experiments of their own, one page, the best one continued."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from distributed import LocalCluster
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.futures import wait
from prefect.runtime import flow_run
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import (
    InvalidParamsError,
    RankContext,
    ddp_task,
    list_runs,
    sweep_report,
)
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.workloads.trainers import digest_of

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("prefect_api")]


def fit(ctx: RankContext, lr: float, epochs: int = 2) -> str:
    """Fit a line with momentum; return the digest of its weights. A negative rate fails."""
    import torch

    if lr < 0:
        msg = "a negative rate"
        raise ValueError(msg)
    torch.manual_seed(0)
    model = ctx.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    ctx.track(model=model, optimizer=optimizer)
    x = torch.linspace(-1, 1, 64)[:, None]
    rows = torch.utils.data.TensorDataset(x, 3 * x + 1)
    for inputs, targets in ctx.steps(ctx.loader(rows, global_batch_size=8), epochs=epochs):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss, validation_loss=loss.item() / 2)
    return digest_of(model.module if hasattr(model, "module") else model)


@pytest.mark.extended
def test_a_sweep_has_a_page_and_repeats_no_trial(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """After a retry of the flow, each trial has one attempt and an experiment of its own, one page
    compares them, and the best one trained on has the bits of a longer training."""
    task: Any = ddp_task(
        world_size=1, storage=str(tmp_path), run_key="lr-{lr}", persist_result=True
    )(fit)
    flow_runs: list[Any] = []

    @flow(task_runner=DaskTaskRunner(address=dask_cluster.scheduler_address), retries=1)
    def sweep(rates: list[float]) -> tuple[dict[str, Any], str, str]:
        wait(task.map(rates))
        flow_runs.append(flow_run.id)
        run_id, best = sweep_report(task, "validation_loss", mode="min")
        if flow_run.run_count == 1:
            msg = "a later step fails once"
            raise ConnectionError(msg)
        longer = task.with_options(name="longer", resume_from=run_id)(**best | {"epochs": 4})
        straight = task.with_options(name="straight")(best["lr"], epochs=4)
        return best, longer, straight

    best, longer, straight = sweep([0.001, 0.05, -1.0])
    assert best == {"lr": 0.05, "epochs": 2}
    assert longer == straight
    runs = list_runs(DirectoryStorage(tmp_path)).set_index("experiment").sort_index()
    of_fit = runs[[":" in name and "/fit:" in name for name in runs.index]]
    assert [name.rpartition(":")[2] for name in of_fit.index] == ["lr--1.0", "lr-0.001", "lr-0.05"]
    # What failed is tried again by the flow's retry; what had ended isn't.
    assert of_fit["attempts"].tolist() == [2, 1, 1]
    assert len({*flow_runs}) == 1
    with get_client(sync_client=True) as client:
        of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=flow_runs[:1]))
        artifacts = client.read_artifacts(artifact_filter=of_run)
    (page,) = [str(each.data) for each in artifacts if str(each.key).endswith("-sweep")]
    best_id = of_fit["run_id"].iloc[2]
    assert f'resume_from="{best_id}"' in page
    assert "with lr 0.05" in page
    assert "2 of 3 calls were completed" in page
    rates = re.findall(r"^\| (-?[\d.]+) \|", page, re.MULTILINE)
    assert rates == ["0.05", "0.001", "-1"]
    assert "a negative rate" in page
    assert page.count("![") == 2, "curves of validation_loss and of loss"


def by_config(ctx: RankContext, **config: float) -> float:
    """Report a loss that the arguments decide."""
    loss = config.get("lr", 9.0) * config.get("epochs", 1)
    ctx.report(loss=loss)
    return loss


@pytest.mark.extended
def test_the_best_of_any_keyword_arguments_can_be_passed_on(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """The record has what `**config` was given by name, not one argument called config."""
    task: Any = ddp_task(world_size=1, storage=str(tmp_path))(by_config)

    @flow(task_runner=DaskTaskRunner(address=dask_cluster.scheduler_address))
    def sweep() -> tuple[dict[str, Any], float]:
        wait(task.map(lr=[0.5, 0.25]))
        _, best = sweep_report(task, "loss", mode="min")
        return best, task(**best | {"epochs": 4})

    assert sweep() == ({"lr": 0.25}, 1.0)


def by_square(ctx: RankContext, lr: float) -> None:
    """Report another loss under the same name."""
    ctx.report(loss=lr**2)


@pytest.mark.extended
def test_two_functions_whose_tasks_have_one_name_are_not_compared(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """Their losses mean something else: the best call is one of the task that is asked about."""
    tasks: list[Any] = [
        ddp_task(name="fit", world_size=1, storage=str(tmp_path))(fn)
        for fn in (by_config, by_square)
    ]

    @flow(task_runner=DaskTaskRunner(address=dask_cluster.scheduler_address))
    def sweep() -> list[dict[str, Any]]:
        wait([task.submit(lr=lr) for task, lr in zip(tasks, [0.5, 0.1], strict=True)])
        return [sweep_report(task, "loss", mode="min")[1] for task in tasks]

    assert sweep() == [{"lr": 0.5}, {"lr": 0.1}]


def with_secrets(
    ctx: RankContext, lr: float, hf_token: str, source: str, more: dict[str, str]
) -> str:
    """Report the learning rate as the loss; return the token."""
    ctx.report(loss=lr)
    return hf_token


@pytest.mark.extended
def test_arguments_that_the_record_hides_are_not_returned(
    dask_cluster: LocalCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A training with them would get "(hidden)"; a warning names what the caller has to pass."""
    task: Any = ddp_task(world_size=1, storage=str(tmp_path))(with_secrets)
    secrets = {
        "hf_token": "hf-1234",
        "source": "https://me:hunter2@host/data",
        "more": {"password": "hunter2"},
    }

    @flow(task_runner=DaskTaskRunner(address=dask_cluster.scheduler_address))
    def sweep() -> tuple[dict[str, Any], str]:
        task.submit(0.5, **secrets).wait()
        _, best = sweep_report(task, "loss", mode="min")
        return best, task(**{**best, **secrets})

    with caplog.at_level(logging.WARNING):
        assert sweep() == ({"lr": 0.5}, "hf-1234")
    (said,) = [each.getMessage() for each in caplog.records if "secrets" in each.getMessage()]
    assert said.startswith("hf_token, source, more of run ")
    assert said.endswith("look like secrets and aren't on record: pass them yourself")


def test_a_run_key_names_only_arguments() -> None:
    """A key that names anything else, or can't be fed to trackers, is refused by name."""
    with pytest.raises(InvalidParamsError, match=r"names \['rate'\]; the task's arguments: lr, ep"):
        ddp_task(run_key="lr-{rate}")(fit)
    with pytest.raises(InvalidParamsError, match="has a brace that names no argument"):
        ddp_task(run_key="lr-{")(fit)
    with pytest.raises(InvalidParamsError, match="leave out trackers"):
        ddp_task(run_key="lr-{lr}", trackers=["mlflow"])(fit)
    with pytest.raises(InvalidParamsError, match=r"names \['rate'\]"):
        ddp_task(fit).with_options(run_key="{rate.x:.3f}")  # type: ignore[call-arg]


def test_a_sweep_report_says_what_it_lacks(tmp_path: Path) -> None:
    """Outside of a flow, of another task, and before a call has ended, the error says so."""
    task = ddp_task(world_size=1, storage=str(tmp_path))(fit)
    with pytest.raises(InvalidParamsError, match="call it in a flow"):
        sweep_report(task, "loss", mode="min")

    @flow
    def empty() -> None:
        with pytest.raises(InvalidParamsError, match="no ended call of fit: call it"):
            sweep_report(task, "loss", mode="min")
        with pytest.raises(InvalidParamsError, match="takes a ddp_task, not"):
            sweep_report(max, "loss", mode="min")  # type: ignore[arg-type]

    empty()
