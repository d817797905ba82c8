"""Gangs and train_flow run on jobs of a real Slurm and an imitated PBS, and jobs are lost.

The flows are those of deployments/clusters.
"""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
import yaml
from dask_jobqueue import PBSCluster, SLURMCluster
from distributed import Client

from prefect_torch_ddp import (
    CheckpointParams,
    ClusterParams,
    TrainParams,
    WorkerLostError,
    run_gang,
    train_flow,
)
from tests.integration.clusters.sites import Site
from tests.integration.tasks.test_cancel import (
    check_cancelled,
    flow_process,
    params_of,
    ranks_of,
    wait_for_checkpoint,
)
from tests.integration.tasks.test_run_record import events_of
from tests.integration.test_manual import COMMAND_S, DOCS, blocks_of, write_program
from tests.integration.test_wheel import run
from tests.support.gangs import all_gone, by_rank, pids_in, sleeping_gang
from tests.support.runs import flow_run_id_of, logs_of, steered, task_runs_of
from tests.support.waiting import HANG_S, wait_until
from tests.support.webhook import kept_posts
from tests.support.workers import ROOT
from tests.workloads import plain

HELD_AT, NUM_STEPS = 6, 21
SILENT_S = 30
"""Without a checkpoint until an alert; more than the time between two, and than ranks need to
start."""

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("prefect_api")]

SCHEDULER = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "allowed_failures": 0}
EXAMPLES = Path(__file__).parents[3] / "deployments" / "clusters"


def example(site: Site, folder: Path) -> ClusterParams:
    """Return the example with what an operator adapts: number, interface and folder of logs."""
    values = yaml.safe_load((EXAMPLES / f"{site.name}.yaml").read_text())
    values["cluster_kwargs"] |= {
        "python": f"exec {sys.executable}",
        "n_workers": 2,
        "interface": "lo",
        "log_directory": str(folder / "jobs"),
    }
    values["cluster_kwargs"]["scheduler_options"]["dashboard_address"] = "127.0.0.1:0"
    values["adapt_kwargs"] = {"minimum": 2, "maximum": 2}
    return ClusterParams(**values)


def job_of(site: Site, folder: Path, *, of_task: bool) -> str:
    """Return the id of the job whose worker runs the task `train`, or of the other one."""
    wait_until(lambda: (folder / "0").exists() and (folder / "1").exists())
    words = [word for process in site.processes() for word in process.cmdline()]
    scheduler = next(word for word in words if word.startswith("tcp://"))
    with Client(scheduler, set_as_default=False) as client:
        job_ids = client.run(os.getenv, site.job_variable)
        keys = client.processing()
    of_tasks = {
        worker for worker in job_ids if any(key.startswith("train-") for key in keys[worker])
    }
    chosen = of_tasks if of_task else job_ids.keys() - of_tasks
    (job_id,) = {job_ids[worker] for worker in chosen}
    return str(job_id)


def cancel_a_job(site: Site, folder: Path, *, of_task: bool) -> str:
    """Cancel such a job; return its id."""
    job_id = job_of(site, folder, of_task=of_task)
    site.cancel(job_id)
    return job_id


def end_a_job(site: Site, folder: Path) -> int:
    """Announce the end of a job, and end the training that continues; return the step before."""
    # On Slurm by its signal ahead of the end, of the job that runs the task too; on PBS by SIGTERM.
    job_id = job_of(site, folder, of_task=site.name == "slurm")
    ranks = pids_in(folder, 2)
    wait_until((folder / "step").exists)
    seen = int((folder / "step").read_text())
    site.call(*site.announce_end, job_id)
    wait_until(lambda: not any(map(psutil.pid_exists, ranks)))
    wait_until(lambda: not set(pids_in(folder, 2)) & set(ranks), 2 * HANG_S)
    (folder / "enough").touch()
    return seen


def outlive_the_jobs(site: Site, folder: Path, posts: list[Any]) -> int:
    """Wait until other jobs train than at first, which start only after an alert was posted, and
    end the training; return a step of the first ones."""
    partition = ("scontrol", "update", "PartitionName=batch")
    ranks = pids_in(folder, 2, 2 * HANG_S)
    wait_until((folder / "step").exists)
    seen, jobs = int((folder / "step").read_text()), set(site.job_ids())
    site.call(*partition, "State=DOWN")  # jobs that run aren't affected
    try:
        wait_until(lambda: not any(map(psutil.pid_exists, ranks)), 2 * HANG_S)
        assert not posts, "checkpoints came all the time"
        wait_until(lambda: posts, HANG_S, "the alert")
    finally:
        site.call(*partition, "State=UP")
    wait_until(lambda: not set(pids_in(folder, 2)) & set(ranks), 2 * HANG_S)
    later = set(site.job_ids())
    (folder / "enough").touch()
    assert not jobs & later
    return seen


def set_alerts(url: str, silent_s: int) -> None:
    """Do what the page says on alerts, with another address and a shorter time."""
    page = (DOCS / "batch_sites.md").read_text("utf-8")
    (block,) = (
        each for each in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if "tell_" in each
    )
    typed = block.replace("https://hooks.example.com/...", url).replace("3600", str(silent_s))
    typed = typed.replace("python", sys.executable)
    subprocess.run(["bash", "-ec", typed], cwd=ROOT, check=True, timeout=COMMAND_S)


def train_while(
    ends_jobs: Callable[[Site, Path], int],
    site: Site,
    tmp_path: Path,
    cluster: ClusterParams,
    **changes: Any,
) -> None:
    """Train while jobs end: without a retry, a restart or a word of failure, and from where they
    ended; `ends_jobs` returns a step that was reached before."""
    folder = tmp_path / "marks"
    given = {"retries": 0, "max_restarts": 0, "workers_timeout_s": 120, "cluster": cluster}
    params = steered(folder, **given, **changes)
    with (
        ThreadPoolExecutor(1) as pool,
        # After so long the cluster ends the job of a worker that has left, by 15 s if nothing is
        # said; a loaded machine needs more than one for ranks to save and the task to end.
        dask.config.set({"distributed.deploy.lost-worker-timeout": "8s"}),
    ):
        operator = pool.submit(ends_jobs, site, folder)
        training = (report := train_flow(params)).training
        seen = operator.result()
    assert (training.attempt, training.world_size) == (2, 2)
    assert (training.resumed_from_step or 0) >= seen
    events = events_of(flow_run_id_of(report.flow_run_url))
    assert [each for each in events if each["event"].endswith(".rank.failed")] == []
    wait_until(lambda: not site.job_ids() and not site.processes())


def test_a_job_that_ends_costs_nothing(site: Site, tmp_path: Path) -> None:
    """All ranks save before a job ends, and continue with the next job without a retry."""
    train_while(end_a_job, site, tmp_path, example(site, tmp_path))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("batch_system", ["slurm"], indirect=True)
def test_jobs_that_reach_their_walltime_cost_nothing(site: Site, tmp_path: Path) -> None:
    """Slurm ends all jobs of a run; ranks save at its signal, and continue in the next jobs.

    Meanwhile the queue starts none, and the alert that the page describes is posted once.
    """
    cluster = example(site, tmp_path)
    ahead = ["--signal=B:USR1@30"]  # Slurm may be 30 s early
    cluster.cluster_kwargs.update(walltime="00:02:00", job_extra_directives=ahead)
    with kept_posts() as (url, posts):
        set_alerts(url, SILENT_S)
        often = CheckpointParams(every_s=1)
        outlive = partial(outlive_the_jobs, posts=posts)
        train_while(outlive, site, tmp_path, cluster, checkpoint=often)
        (alert,) = posts
    assert re.match(
        r"Training \S+ of train-ddp/tests\.workloads\.tiny:Steered has committed no checkpoint for "
        rf"{SILENT_S} s; its last event was of step \d+$",
        alert["text"],
    )


def test_a_cancelled_job_costs_a_retry(site: Site, tmp_path: Path) -> None:
    """After a job is cancelled, another takes its place and the run resumes."""
    pid_folder = tmp_path / "pids"
    pid_folder.mkdir()
    fault = {"how": "hang", "step": HELD_AT, "rank": None, "attempts": [1], "mark": str(pid_folder)}
    params = TrainParams(
        workload="tests.workloads.tiny",
        storage=str(tmp_path / "store"),
        options={"fault": fault},
        checkpoint=CheckpointParams(every_s=None, every_steps=2),
        retry_delay_s=0,
        workers_timeout_s=120,
        cluster=example(site, tmp_path),
    )
    # On Slurm the job whose worker has only ranks: Prefect retries the task. On PBS the one
    # whose worker runs the task itself, out of reach of Prefect: the flow submits the task
    # again. Dask takes 15 s to believe that a worker won't come back.
    with (
        ThreadPoolExecutor(1) as pool,
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1s"}),
    ):
        operator = pool.submit(cancel_a_job, site, pid_folder, of_task=site.name == "pbs")
        report = train_flow(params)
        cancelled = operator.result()
    assert (report.training.attempt, report.training.num_steps) == (2, NUM_STEPS)
    assert 0 < (report.training.resumed_from_step or 0) <= HELD_AT
    assert (report.training.world_size, report.evaluation.num_samples) == (2, 21)
    wait_until(lambda: not site.job_ids() and not site.processes())
    assert not site.processes(cancelled)
    flow_run_id = flow_run_id_of(report.flow_run_url)
    # Where the task's own worker was lost there are two runs of `train`, the first of them
    # Crashed; the report says how it ended.
    runs = task_runs_of(flow_run_id)
    assert {runs[name].state_name for name in ("prepare", "evaluate", "publish")} == {"Completed"}
    last = {f"[rank {rank}] step {NUM_STEPS}" for rank in (0, 1)}
    wait_until(lambda: last <= set(by_rank(line.message for line in logs_of(flow_run_id))))


def test_a_cancelled_run_ends_its_jobs(site: Site, tmp_path: Path) -> None:
    """After SIGTERM the flow is Cancelled with a checkpoint, and none of its jobs remains."""
    params = params_of(tmp_path, cluster=example(site, tmp_path), workers_timeout_s=120)
    with flow_process(tmp_path, params.model_dump_json()) as process:
        ranks_of(tmp_path)
        wait_for_checkpoint(tmp_path)
        process.terminate()
        process.wait(2 * HANG_S)
    check_cancelled(tmp_path)
    wait_until(lambda: not site.job_ids() and not site.processes())


@contextmanager
def two_jobs(site: Site, folder: Path) -> Iterator[Client]:
    """Submit two jobs of one Dask worker each, on two nodes; give a client of theirs."""
    cluster_class = {"slurm": SLURMCluster, "pbs": PBSCluster}[site.name]
    with (
        cluster_class(
            n_workers=2,
            cores=1,
            memory="1GB",
            walltime="00:10:00",
            log_directory=str(folder),
            worker_extra_args=["--host", site.node_address],
            scheduler_options=SCHEDULER,
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(2, timeout=HANG_S)
        yield client


def test_a_gang_over_two_jobs(site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A killed job ends the gang, and nothing outlives its job or the cluster."""
    with two_jobs(site, tmp_path) as client:
        assert run_gang(client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]
        with caplog.at_level(logging.INFO, logger="prefect_torch_ddp.ranks"):
            run_gang(client, plain.speak, args=("hello",), world_size=2)
        assert {"[rank 0] printed hello", "[rank 1] printed hello"} <= set(by_rank(caplog.messages))
        environments: list[dict[str, Any]] = run_gang(client, plain.environment, world_size=2)
        jobs = [environment[site.job_variable] for environment in environments]
        assert set(jobs) == set(site.job_ids())
        hosts = [(each["GROUP_RANK"], each["MASTER_ADDR"]) for each in environments]
        assert hosts == [("0", "127.0.0.11"), ("1", "127.0.0.11")]

        with sleeping_gang(client, tmp_path / "pids") as (gang, ranks):
            victim = jobs[1]
            assert ranks[1] in site.processes(victim)
            site.kill(victim)
            says = r"127\.0\.0\.12:\d+ was lost; it held rank 1"
            with pytest.raises(WorkerLostError, match=says):
                gang.result(HANG_S)
        wait_until(lambda: all_gone(ranks) and not site.processes(victim))
        assert run_gang(client, plain.sum_of_ones, world_size=1) == [1.0]
    wait_until(lambda: not site.job_ids() and not site.processes())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("batch_system", ["slurm", "pbs"], indirect=True)
def test_the_program_for_those_who_chain_jobs(site: Site, tmp_path: Path) -> None:
    """The program of docs/from trains in jobs that the file describes."""
    described = example(site, tmp_path).model_dump(mode="json", exclude_unset=True)
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(described))
    ((_, code),) = blocks_of(DOCS / "from/batch_jobs.md")
    program = write_program(code, tmp_path)
    said = run(sys.executable, program, "cluster.yaml", folder=tmp_path, timeout_s=COMMAND_S)
    assert re.search(r"^accuracy 0\.9\d, attempt 1$", said, re.MULTILINE), said
