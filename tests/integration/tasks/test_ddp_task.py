"""Level 2: a function that takes a RankContext is a Prefect task on its flow's Dask cluster."""

import base64
import inspect
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any
from uuid import UUID, uuid4

import pytest
from distributed import LocalCluster
from prefect import Task, flow, unmapped
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowFilter,
    FlowFilterName,
)
from prefect.client.schemas.objects import Artifact, Log
from prefect.futures import as_completed
from prefect.runtime import flow_run
from prefect.states import AwaitingRetry, Cancelled, Completed, Crashed, Failed, Running, State
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import (
    BadKeyError,
    CheckpointParams,
    InvalidParamsError,
    RankContext,
    RankFailedError,
    ddp_task,
    read_goodput,
    read_ledger,
)
from prefect_torch_ddp.checkpoint.attempts import newest_attempt
from prefect_torch_ddp.checkpoint.keys import manifest_key
from prefect_torch_ddp.checkpoint.manifest import Manifest
from prefect_torch_ddp.records.run_record import RunState, write_run_record
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.gangs.task_training import TaskParams
from prefect_torch_ddp.tasks.report.artifacts import key
from prefect_torch_ddp.tracking.description import draft_record
from prefect_torch_ddp.tracking.resume import resume_point
from tests.support.gangs import by_rank
from tests.support.pages import DATASET, evaluation
from tests.support.records import assert_adds_up
from tests.support.runs import logs_of, retry_from_the_cli, states_of, task_runs_of
from tests.support.waiting import wait_until
from tests.workloads import flows as retried_flow
from tests.workloads.flows import fit

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("prefect_api")]

OF_THE_SESSION = str(Path(os.environ["PREFECT_HOME"]) / "ddp-tasks")
OFFSET = 41


def describe(ctx: RankContext, lr: float, *, scale: float = 2.0) -> dict[str, Any]:
    """Sum over the ranks and say who speaks."""
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(ctx.rank + 1)])
    dist.all_reduce(total)
    print(f"lr {lr}")
    return {
        "rank": ctx.rank,
        "world_size": ctx.world_size,
        "total": total.item(),
        "lr": lr * scale,
        "run_id": ctx.run_id,
    }


@ddp_task(world_size=1, storage=OF_THE_SESSION)
def decorated(ctx: RankContext, x: int) -> int:
    """Use a constant of the module; pickle finds the task by this name, not the function."""
    return x + OFFSET


def on(cluster: LocalCluster) -> Any:
    """Return a runner of a running cluster; Any, since Prefect's flow takes no runner whose
    futures are PrefectDaskFutures."""
    return DaskTaskRunner(address=cluster.scheduler_address)


def run_id(flow_run_id: str | None) -> UUID:
    """Return a flow run's id."""
    assert flow_run_id is not None
    return UUID(flow_run_id)


def save_and_fail(ctx: RankContext) -> None:
    """Hand over a text and bytes, try to leave the results, then fail, all ranks together."""
    import torch.distributed as dist

    if ctx.rank == 0:
        ctx.save("notes/a.txt", "before the failure: é")
        ctx.save("b.bin", b"\x00\x01")
        for path in ("../x", "a/../../x", "/tmp/x", "C:/x", "C:\\x", ""):
            try:
                ctx.save(path, b"lost")
            except BadKeyError:
                continue
            else:
                msg = f"{path!r} was let through"
                raise AssertionError(msg)
    dist.barrier()
    msg = "after the files"
    raise RuntimeError(msg)


def lines_with(text: str, flow_run_id: str | None) -> list[Log]:
    """Return the lines of a flow run's log that have a text."""
    return [line for line in logs_of(run_id(flow_run_id)) if text in line.message]


@pytest.mark.long
def test_called_and_submitted_on_as_many_workers_as_ranks(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """Each call or submission is one training that returns rank 0's value."""
    train = ddp_task(world_size=2, storage=str(tmp_path))(describe)

    @flow(task_runner=on(dask_cluster))
    def every_way() -> tuple[str | None, list[dict[str, Any]]]:
        assert decorated.submit(1).result() == OFFSET + 1
        called = train(lr=0.1)
        submitted = [train.submit(lr=lr, scale=10.0) for lr in (0.2, 0.3)]
        return flow_run.id, [called, *(future.result() for future in submitted), train(0.1)]

    flow_run_id, values = every_way()
    found = [(value["rank"], value["world_size"], value["total"], value["lr"]) for value in values]
    assert found == [(0, 2, 3, 0.2), (0, 2, 3, 2.0), (0, 2, 3, 3.0), (0, 2, 3, 0.2)]
    assert len({value["run_id"] for value in values}) == 4

    def lines() -> list[str]:
        return by_rank(line.message for line in lines_with("] lr 0.", flow_run_id))

    wait_until(lambda: len(lines()) == 8)
    expected = [f"[rank {rank}] lr {lr}" for rank in (0, 1) for lr in (0.1, 0.1, 0.2, 0.3)]
    assert sorted(lines()) == expected
    assert len({line.task_run_id for line in lines_with("] lr 0.", flow_run_id)}) == 4


def test_without_parentheses_it_takes_all_workers_and_any_argument(
    dask_cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain decorator keeps the function's name and signature, and has a rank per worker."""
    monkeypatch.setenv("HOME", str(tmp_path))

    @ddp_task
    def awkward(  # noqa: PLR0917
        ctx: RankContext,
        /,
        key: int,
        retries: int,
        workers: str = "w",
        timeout: float = 1.5,
        fn: int = 6,
        args: tuple[int, ...] = (7,),
        *,
        world_size: str,
        config: str = "c",
        client: int = 8,
        name: str = "n",
        **others: Any,
    ) -> dict[str, Any]:
        """Say what came."""
        ctx.save("size.txt", str(ctx.world_size))
        return {name: value for name, value in locals().items() if name != "ctx"}

    assert isinstance(awkward, Task)
    assert (awkward.name, awkward.description) == ("awkward", "Say what came.")
    assert list(inspect.signature(awkward.fn).parameters)[:2] == ["key", "retries"]
    given: dict[str, Any] = {"retries": 2, "world_size": "ws", "timeout": 0.5, "backend": "mine"}
    given |= {"run": 3, "rank": 9, "kwargs": {"x": 1}}

    # On a Dask worker the default storage is below the worker's own HOME.
    store = str(tmp_path / "prefect-torch-ddp")
    elsewhere: Any = awkward.with_options(storage=store)  # type: ignore[call-arg]

    @flow(task_runner=on(dask_cluster))
    def both_ways() -> list[Any]:
        return [awkward(1, **given), elsewhere.submit(1, **given).result()]

    expected = {"key": 1, "retries": 2, "workers": "w", "timeout": 0.5, "fn": 6, "args": (7,)}
    expected |= {"world_size": "ws", "config": "c", "client": 8, "name": "n"}
    expected["others"] = {"backend": "mine", "run": 3, "rank": 9, "kwargs": {"x": 1}}
    assert both_ways() == [expected, expected]
    runs = tmp_path / "prefect-torch-ddp" / "runs"
    saved = [path.read_text() for path in runs.glob("awkward-*/results/000001/size.txt")]
    assert saved == ["2", "2"]


# What Prefect says of a task's log lines if there is no flow run to send them to.
def test_a_relative_path_and_a_home_are_the_callers(
    dask_cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task's storage is resolved in its caller's folder and home, not on its Dask worker."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    @ddp_task(world_size=1)
    def where(ctx: RankContext, lr: float) -> str:
        ctx.save("note", f"lr {lr}")
        return ctx.config.storage.uri

    @flow(task_runner=on(dask_cluster))
    def stores() -> list[str]:
        relative, at_home = (where.with_options(storage=each) for each in ("runs", "~/mine"))
        mapped = where.with_options(storage=Path("mapped")).map([0.5])
        submitted = [relative.submit(0.5), at_home.submit(0.5), *mapped]
        return [relative(0.5), *(each.result() for each in submitted)]

    expected = [tmp_path / each for each in ("runs", "runs", "home/mine", "mapped")]
    assert stores() == list(map(str, expected))
    assert all(list(folder.rglob("note")) for folder in expected)


def test_an_argument_that_cannot_be_sent_is_named_at_the_call(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """The flow that submits or maps a task gets the part of the argument and what to do."""

    @ddp_task(world_size=1, storage=tmp_path)
    def reads(ctx: RankContext, dataset: dict[str, Any], lr: float) -> None: ...

    @flow(task_runner=on(dask_cluster))
    def submits() -> list[str]:
        said = []
        with (tmp_path / "held").open("wb") as file:
            for submit, dataset in (
                (reads.submit, {"file": file}),
                (reads.map, [{"file": file}]),
            ):
                with pytest.raises(InvalidParamsError) as refused:
                    submit(dataset, lr=0.1, wait_for=[])
                said.append(str(refused.value).partition(" can't be sent to the ranks: ")[0])
        return said

    assert submits() == ["dataset['file']", "dataset[0]['file']"]


@pytest.mark.filterwarnings("ignore:Logger 'prefect.task_runs' attempted to send logs:UserWarning")
def test_a_flow_without_dask_is_refused(tmp_path: Path) -> None:
    """The error names the flow, its runner and what to write."""
    train = ddp_task(world_size=2, storage=str(tmp_path))(describe)

    @flow(name="no-dask")
    def calls() -> object:
        return train(lr=0.1)

    @flow(name="no-dask")
    def submits() -> object:
        return train.submit(lr=0.1).result()

    says = r"flow 'no-dask' uses ThreadPoolTaskRunner; write @flow\(task_runner=DaskTaskRunner"
    for wrong in (calls, submits):
        with pytest.raises(InvalidParamsError, match=says):
            wrong()
    with pytest.raises(InvalidParamsError, match="there is no flow run; write @flow"):
        train(lr=0.1)


@pytest.mark.long
def test_a_retry_resumes_and_each_training_has_a_page_of_its_own(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """Rank 1 fails at step 7; the second attempt resumes from the newest checkpoint, to the very
    same weights. Two calls of one task and one of another are three pages and three progress
    artifacts; after a retry the page is whole, and one that fails for good says why, with the
    curves so far."""
    train: Any = task(tmp_path, retries=1, retry_delay_seconds=0)
    doomed = train.with_options(name="doomed", retries=0)

    @flow(task_runner=on(dask_cluster))
    def trains() -> tuple[str | None, list[dict[str, Any]]]:
        first = train.with_options(task_run_name="faulty-1").submit(fail_at=7).result()
        whole = train.with_options(task_run_name="whole-1")(fail_at=None)
        with pytest.raises(RankFailedError) as caught:
            doomed(fail_at=7)
        assert isinstance(caught.value.__cause__, ValueError)
        return flow_run.id, [first, whole]

    began_s = time.monotonic()
    flow_run_id, (faulty, whole) = trains()
    took_s = time.monotonic() - began_s
    start = faulty["made"][0]
    # The checkpoint of step 6 is written during step 7, and may not be whole by then.
    assert start in (4, 7)
    assert (faulty["attempt"], faulty["made"]) == (2, list(range(start, 13)))
    assert (whole["attempt"], whole["made"]) == (1, list(range(1, 13)))
    assert faulty["weights"] == whole["weights"]
    runs = task_runs_of(run_id(flow_run_id), "faulty")
    names = [name for name, _ in states_of(runs["faulty"]) if name not in ("Pending", "Running")]
    assert names in (["AwaitingRetry", "Retrying", "Completed"], ["Retrying", "Completed"])
    cause = "rank 1 on 127.0.0.1 failed in attempt 1: ValueError: told to fail"
    wait_until(lambda: lines_with(cause, flow_run_id))
    restored = f"resuming from the checkpoint of step {start - 1} of run fit-"
    wait_until(lambda: lines_with(restored, flow_run_id))
    for value, num_attempts in ((faulty, 2), (whole, 1)):
        found = read_goodput(tmp_path, value["run_id"])
        assert_adds_up(found, num_attempts=num_attempts, at_most_s=took_s)
        assert (found.redone_s > 0) == (value is faulty)
    check_pages(made_by(run_id(flow_run_id)))


def check_pages(made: list[Artifact]) -> None:
    """Expect those of a training that was tried again, of one that ran through, and of one that
    failed, each with its own numbers."""
    pages = [str(one.data) for one in made if str(one.key).endswith("-report")]
    lines = [str(one.description) for one in made if one.type == "progress"]
    keys = [one.key for one in made]
    made_by_task = (key("report", f"trains/{fit.__module__}/{name}") for name in ("fit", "doomed"))
    assert [keys.count(each) for each in made_by_task] == [2, 1], keys
    resumed, whole, failed = pages
    for page in (resumed, whole):
        assert page.startswith("# fit: finished\n\nepoch 2/2 · step 12/12 · loss 0.")
        assert "| 2 | 6 | 24 | " in page.partition("## Epochs")[2].partition("\n\n## ")[0]
        steps = [f"step {step}, attempt" for step in (12, 9)]
        assert all(step in page for step in steps), page
        assert "| learning_rate | 0.01 | 0.01 (step 1) | 0.01 (step 1) |" in page
        assert "| checkpoint.every_steps | `3` |" in page
    assert "| fail_at | `7` |" in resumed
    failure = r"\| 7 \| rank 1 on 127.0.0.1 failed in attempt 1: ValueError: told"
    assert re.search(rf"\| 1 \| 2 \| 127\.0\.0\.1 \| [^|]+ {failure}", resumed)
    assert ["attempt 2" in svg_of(page) for page in pages] == [True, False, False]
    assert failed.startswith("# doomed: failed in step 7\n\n")
    assert "```text\nRankFailedError: " in failed
    assert "resume_from=" in failed.partition("![")[0]
    assert "ValueError: told to fail" in failed.partition("```text")[2].partition("```")[0]
    assert "loss" in svg_of(failed)
    assert {re.sub(r"[\d.]+ · finished", "", line) for line in lines[:2]} == {
        "epoch 2/2 · step 12/12 · loss "
    }
    stopped = r"epoch (1/2 · 6|2/2 · 7) of 12 steps done · loss [\d.]+ · failed"
    assert re.fullmatch(stopped, lines[2])


def made_by(flow_run_id: UUID) -> list[Artifact]:
    """Return the artifacts of a flow run, in the order in which they were made."""
    with get_client(sync_client=True) as client:
        where = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        found = client.read_artifacts(artifact_filter=where)
    return sorted(found, key=lambda one: one.created)


def svg_of(page: str) -> str:
    """Return the picture of the curves."""
    found = re.search(r"!\[training curves\]\(data:image/svg\+xml;base64,([\w+/=]+)\)", page)
    assert found is not None, page
    return base64.b64decode(found[1]).decode()


@pytest.mark.extended
def test_saved_files_outlive_the_failure(dask_cluster: LocalCluster, tmp_path: Path) -> None:
    """What was handed over is in the run's results; paths that lead out are refused;
    nothing is lost when the run fails."""
    train = ddp_task(world_size=2, storage=str(tmp_path / "store"))(save_and_fail)
    seen = []

    @flow(task_runner=on(dask_cluster))
    def trains() -> None:
        seen.append(flow_run.id)
        train.submit().result()

    with pytest.raises(RankFailedError, match="RuntimeError: after the files") as caught:
        trains()
    assert isinstance(caught.value.__cause__, RuntimeError)
    storage = DirectoryStorage(tmp_path / "store")
    keys = [found.key for found in storage.list("runs/") if "/results/" in found.key]
    results = {key.split("/results/000001/")[1]: storage.read(key) for key in keys}
    assert results == {"notes/a.txt": "before the failure: é".encode(), "b.bin": b"\x00\x01"}
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    says = "on 127.0.0.1 failed in attempt 1: RuntimeError: after the files"
    wait_until(lambda: lines_with(says, seen[0]))


@pytest.mark.extended
def test_cached_results_belong_to_their_own_function(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """Prefect tells persisted results of equal inputs apart by the function's source: the
    user's, not ours. Another seed, option or number of ranks is another training."""
    options: dict[str, Any] = {"world_size": 1, "storage": str(tmp_path), "persist_result": True}

    @ddp_task(**options)
    def first(ctx: RankContext, x: int) -> str:
        return f"first {x}"

    @ddp_task(**options)
    def second(ctx: RankContext, x: int) -> str:
        return f"second {x}"

    @ddp_task(**options)
    def third(ctx: RankContext, x: int) -> str:
        return f"{ctx.seed} {dict(ctx.options)} {ctx.world_size} {ctx.run_id}"

    varied: Any = third

    @flow(task_runner=on(dask_cluster))
    def calls() -> list[str]:
        others = [{}, {"seed": 1}, {"options": {"a": 2}}, {"world_size": 2}, {"max_restarts": 1}]
        return [
            first(1),
            second(1),
            second.with_options(name="renamed").submit(1).result(),
            first(1),
            *(varied.with_options(**other).submit(1).result() for other in others),
            varied.with_options(cache_key_fn=lambda *_: None).submit(1).result(),
        ]

    *plain, default, seed, option, ranks, restarts, uncached = calls()
    assert plain == ["first 1", "second 1", "second 1", "first 1"]
    assert default.startswith("0 {} 1 ")
    assert restarts == default
    assert seed.startswith("1 {} 1 ")
    assert option.startswith("0 {'a': 2} 1 ")
    assert ranks.startswith("0 {} 2 ")
    assert uncached.startswith("0 {} 1 ")
    assert uncached != default


def task(folder: Path, **options: Any) -> Task[..., dict[str, Any]]:
    """Return the training as a task with a checkpoint every three steps."""
    made: Task[..., dict[str, Any]] = ddp_task(
        world_size=2,
        seed=5,
        checkpoint=CheckpointParams(every_s=None, every_steps=3),
        storage=str(folder),
        **options,
    )(fit)
    return made


@pytest.mark.long
def test_calls_of_one_key_and_equal_arguments_are_one_training(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """Over a retry of the flow run, and after a failure that the flow caught, each resumes what it
    left, to the same bits, and adds no step if it had ended; with other arguments it is another
    training."""
    train = task(tmp_path, run_key="fit")
    again = train.with_options(run_key="again")  # type: ignore[call-arg]

    @flow(task_runner=on(dask_cluster), retries=1)
    def trains() -> list[dict[str, Any]]:
        whole, broken = train(None), train.submit(7).result()
        with pytest.raises(RankFailedError, match="failed in attempt 1: ValueError: told to fail"):
            again(7)
        return [whole, broken, again.submit(7).result()]

    whole, broken, taken_up = trains()
    assert (whole["attempt"], whole["made"]) == (2, [])  # it had ended before the flow's retry
    for value in (broken, taken_up):
        # The checkpoint of step 6 may not be whole when step 7 fails.
        assert (value["attempt"], value["made"][0] in (4, 7)) == (2, True)
        assert value["weights"] == whole["weights"]
    runs = {value["run_id"] for value in (whole, broken, taken_up)}
    assert runs == {path.name for path in (tmp_path / "runs").iterdir()}
    assert len(runs) == 3


DIGEST = """
import numpy, torch
from tests.workloads.flows import fit
from prefect_torch_ddp.tracking.digest import value_digest
letters = {"class_a", "class_b", "class_c", "class_d"}
module = torch.nn.Sequential(torch.nn.Linear(2, 1))
torch.nn.init.ones_(module[0].weight), torch.nn.init.ones_(module[0].bias)
data = torch.utils.data.TensorDataset(torch.arange(3.0))
for value in (letters, {"x": frozenset(letters)}, torch.ones(2), module, data, numpy.ones(3), fit):
    print(value_digest((value, 0.1)))
"""


@pytest.mark.extended
def test_equal_arguments_have_one_digest_in_every_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Tensors, modules, datasets, sets and functions of modules, whatever the seed of hashes."""
    env = {**os.environ, "PYTHONHASHSEED": "1"}  # here it is another one
    command = [sys.executable, "-c", DIGEST]
    there = subprocess.run(command, env=env, capture_output=True, check=True, text=True).stdout
    exec(DIGEST, {})
    assert capsys.readouterr().out == there
    assert len(set(there.split())) == 7


ENCLOSED = """
from tests.unit.tasks.test_run_id import KEYED, Classes, made_with, name_of
letters = frozenset({"class_a", "class_b", "class_c", "class_d"})
for value in (letters, {"x": letters}, {letters: 1}, {Classes(letters): 1}, Classes(letters)):
    print(name_of(KEYED, 1, fn=made_with(value)))
"""


@pytest.mark.extended
def test_a_function_that_encloses_sets_has_one_name_in_every_process() -> None:
    """Also in an object that is a key of a dict, whatever the seed of hashes."""
    printed = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", ENCLOSED]
        run = subprocess.run(command, env=env, capture_output=True, check=True, text=True)
        printed.add(run.stdout)
    assert len(printed) == 1
    assert len(set(printed.pop().split())) == 5


@pytest.mark.long
def test_prefect_flow_run_retry_resumes_it(
    prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry from the command line, in another Prefect home, resumes the training."""
    command = [sys.executable, "-c", "from tests.workloads.flows import retried; retried()"]
    env = {**os.environ, "PREFECT_API_URL": prefect_api, "RETRIED_STORE": str(tmp_path / "store")}
    failed = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert "failed in attempt 1: ValueError: told to fail" in failed.stderr
    storage = DirectoryStorage(tmp_path / "store")
    begun = sorted(path.name for path in (tmp_path / "store/runs").iterdir())
    assert len(begun) == 2
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_filter=FlowFilter(name=FlowFilterName(any_=["retried"])))
    (flow_run,) = (run for run in runs if run.state_name == "Failed")
    env["PREFECT_HOME"] = str(tmp_path / "home")
    printed = retry_from_the_cli(flow_run.id, f"{retried_flow.__file__}:retried", **env)
    assert sorted(path.name for path in (tmp_path / "store/runs").iterdir()) == begun
    assert [newest_attempt(storage, run_id) for run_id in begun] == [2, 2]
    assert "resuming from the checkpoint of step" in printed


@pytest.mark.parametrize(("state", "taken_up"), [("cancelled", "yesterday"), ("training", None)])
def test_latest_takes_up_what_its_own_flow_run_cancelled(
    tmp_path: Path, state: str, taken_up: str | None
) -> None:
    """New task runs of a flow run continue with what its earlier ones left."""
    storage, params = DirectoryStorage(tmp_path), TaskParams(resume_from="latest")

    @flow
    def resumed() -> str | None:
        draft = draft_record(params, "yesterday", "fit", storage, workload="fit")
        write_run_record(storage, draft.model_copy(update={"state": state}))
        manifest = Manifest("yesterday", 7, 1, epoch=1, position={}, world_size=2)
        storage.write(manifest_key("yesterday", 7, 1), manifest.as_bytes())
        found = resume_point(params, storage, "tonight", "fit")
        return found and found.run_id

    assert resumed() == taken_up


def latest_of(folder: Path, state: State, **runs: dict[str, Any]) -> str | None:
    """Return which of these runs, the newest first, `latest` takes up.

    Each has a checkpoint and is of another flow run, which is in this state.
    """
    storage, params = DirectoryStorage(folder), TaskParams(resume_from="latest")

    @flow
    def other() -> None: ...

    @flow
    def resumed() -> str | None:
        with get_client(sync_client=True) as client:
            elsewhere = client.create_flow_run(other, state=state)
        for days, (run_id, fields) in enumerate(runs.items()):
            draft = draft_record(params, run_id, "fit", storage, workload="fit")
            began = draft.began - timedelta(days=days)
            given = {"began": began, "flow_run_id": str(elsewhere.id), **fields}
            write_run_record(storage, type(draft).model_validate({**draft.model_dump(), **given}))
            manifest = Manifest(run_id, 7, 1, epoch=1, position={}, world_size=2)
            storage.write(manifest_key(run_id, 7, 1), manifest.as_bytes())
        found = resume_point(params, storage, "tonight", "fit")
        return found and found.run_id

    return resumed()


@pytest.mark.parametrize(
    ("is_tried_again", "state", "taken_up"),
    [
        pytest.param(True, Running(), None, id="its task waits for a retry"),
        pytest.param(True, Cancelled(), "yesterday", id="its flow was cancelled meanwhile"),
        pytest.param(False, AwaitingRetry(), None, id="its flow waits for a retry"),
        pytest.param(False, Running(), "yesterday", id="its flow does other work"),
        pytest.param(False, Failed(), "yesterday", id="its flow failed"),
    ],
)
def test_latest_leaves_alone_what_is_still_to_be_retried(
    tmp_path: Path, is_tried_again: bool, state: State, taken_up: str | None
) -> None:
    """What failed once in another flow run would otherwise train twice."""
    failed = {"state": "failed", "is_tried_again": is_tried_again}
    assert latest_of(tmp_path, state, yesterday=failed) == taken_up


@pytest.mark.parametrize(
    ("record", "state", "taken_up"),
    [
        pytest.param({"dataset": DATASET}, Crashed(), "yesterday", id="killed in its evaluation"),
        pytest.param({"dataset": DATASET}, Running(), None, id="is evaluated now"),
        pytest.param(
            {"dataset": DATASET, "evaluation": evaluation()}, Completed(), None, id="evaluated"
        ),
        pytest.param({}, Crashed(), None, id="a task's, which nothing evaluates"),
    ],
)
def test_latest_continues_a_trained_run_that_was_not_evaluated(
    tmp_path: Path, record: dict[str, Any], state: State, taken_up: str | None
) -> None:
    """It counted as finished, so the next run trained everything again."""
    trained, failed = {"state": "completed", **record}, {"state": "failed", "flow_run_id": None}
    assert latest_of(tmp_path, state, yesterday=trained, before=failed) == taken_up


@pytest.mark.parametrize("reference", ["base", "best", None])
def test_latest_begins_as_a_run_did_that_ended_before_its_first_checkpoint(
    tmp_path: Path, reference: str | None
) -> None:
    """Neither from scratch, nor from an older run that has nothing to do with it."""
    storage, params = DirectoryStorage(tmp_path), TaskParams(resume_from="latest")

    @flow
    def resumed() -> tuple[str, bool] | None:
        given: list[tuple[str, RunState, str | None, int | None]] = [
            ("base", "completed", None, 7),
            ("unlucky", "failed", None, 3),
            ("crashed", "failed", reference, None),
            ("again", "failed", "latest", None),
        ]
        for day, (run_id, state, began_from, step) in enumerate(given):
            own = TaskParams(resume_from=began_from)
            draft = draft_record(own, run_id, "fit", storage, workload="fit")
            began = draft.began + timedelta(days=day)
            write_run_record(storage, draft.model_copy(update={"state": state, "began": began}))
            if step is not None:
                manifest = Manifest(run_id, step, 1, epoch=1, position={}, world_size=2)
                storage.write(manifest_key(run_id, step, 1), manifest.as_bytes())
        found = resume_point(params, storage, "tonight", "fit")
        return found and (found.run_id, found.only_weights)

    expected = ("unlucky", False) if reference is None else ("base", reference == "best")
    assert resumed() == expected


@pytest.mark.parametrize(
    ("saved", "reference", "taken_up"),
    [
        ("crashed", None, "crashed"),
        ("its subflow", None, "crashed"),
        ("nothing", None, None),
        ("nothing", "base", "base"),
        ("nothing", "flow-run", "first"),
    ],
)
def test_a_crashed_flow_run_is_continued_or_begun_again_and_no_other(
    tmp_path: Path, saved: str, reference: str | None, taken_up: str | None
) -> None:
    """Other runs failed before it and after it, which have other parameters."""
    storage = DirectoryStorage(tmp_path)

    @flow
    def trains(params: dict[str, Any]) -> None: ...

    @flow
    def resumed() -> str | None:
        with get_client(sync_client=True) as client:
            first = client.create_flow_run(trains, parameters={"params": {}})
            began_from = f"flow-run:{first.id}" if reference == "flow-run" else reference
            given = {"params": {"resume_from": began_from}}
            crashed = client.create_flow_run(trains, parameters=given)
            inner = client.create_flow_run(trains, parameters={"params": {}})
            outer = client.create_task_run(
                task=Task(save_and_fail), flow_run_id=crashed.id, dynamic_key="0"
            )
            within = client.create_flow_run(trains, parent_task_run_id=outer.id)
        owners = {"base": inner, "first": first, "older": inner, "crashed": crashed}
        if saved == "its subflow":
            owners["crashed"] = within
        for day, run_id in enumerate([*owners, "newer"]):
            params = TaskParams(resume_from=began_from if run_id == "crashed" else None)
            draft = draft_record(params, run_id, "fit", storage, workload="fit")
            more = {"state": "failed", "began": draft.began + timedelta(days=day)}
            owner = owners.get(run_id, inner)
            write_run_record(
                storage, draft.model_copy(update={**more, "flow_run_id": str(owner.id)})
            )
            if run_id != "crashed" or saved != "nothing":
                manifest = Manifest(run_id, 7, 1, epoch=1, position={}, world_size=2)
                storage.write(manifest_key(run_id, 7, 1), manifest.as_bytes())
        now = TaskParams(resume_from=f"flow-run:{crashed.id}")
        found = resume_point(now, storage, "tonight", "fit")
        return found and found.run_id

    assert resumed() == taken_up


def test_a_flow_run_that_prefect_does_not_know_is_refused(tmp_path: Path) -> None:
    """A new training from the beginning would be none that anybody asked for."""

    @flow
    def resumed(given: str) -> None:
        resume_point(TaskParams(resume_from=given), DirectoryStorage(tmp_path), "now", "fit")

    for given in (str(uuid4()), "yesterday"):
        with pytest.raises(InvalidParamsError, match=f"Prefect has no flow run {given}"):
            resumed(f"flow-run:{given}")


def weight_of_a_training(ctx: RankContext, initial: float, fails: bool) -> float:
    """Train a weight that starts as given, and fail in step 6 of 8 if told."""
    import torch

    model = ctx.wrap(torch.nn.Linear(1, 1))
    torch.nn.init.constant_(model.weight, initial)
    ctx.track(model=model)
    loader = ctx.loader(torch.utils.data.TensorDataset(torch.ones(8, 1)), global_batch_size=1)
    for _ in ctx.steps(loader, epochs=1):
        if fails and ctx.step == 6:
            msg = "a bug"
            raise ValueError(msg)
    return float(model.weight.item())


@pytest.mark.long
@pytest.mark.parametrize("reference", [pytest.param("latest", marks=pytest.mark.more), "best"])
def test_latest_and_best_take_no_run_of_another_flow(
    dask_cluster: LocalCluster, tmp_path: Path, reference: str
) -> None:
    """A task in another flow, or with another run_key, is another experiment."""
    saves = CheckpointParams(every_s=None, every_steps=2)
    fit: Any = ddp_task(name="fit", world_size=1, storage=str(tmp_path), checkpoint=saves)(
        weight_of_a_training
    )
    later = fit.with_options(resume_from=reference)
    fails = reference == "latest"

    @flow(task_runner=on(dask_cluster))
    def cats() -> None:
        fit.submit(7.0, fails=fails).wait()

    @flow(name="cats", task_runner=on(dask_cluster))
    def cats_again() -> list[float]:
        keyed = later.with_options(run_key="fold-2")
        return [task.submit(1.0, fails=False).result() for task in (keyed, later)]

    @flow(task_runner=on(dask_cluster))
    def dogs() -> float:
        return float(later.submit(1.0, fails=False).result())

    with suppress(RankFailedError):
        cats()
    assert dogs() == 1.0
    assert cats_again() == [1.0, 7.0]


@pytest.mark.long
def test_a_new_run_begins_from_another_with_its_ledger(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """`resume_from` takes a run's id, a place and a step, and the new ledger begins there."""
    train = task(tmp_path, ledger=True)
    later: Any = train.with_options(name="later")

    @flow(task_runner=on(dask_cluster))
    def trains() -> tuple[str | None, list[dict[str, Any]]]:
        begun = train(None, epochs=1)
        at_3 = f"{tmp_path}/runs/{begun['run_id']}/checkpoints/step-00000003"
        whole = train.with_options(ledger=False, seed=5)(None)  # type: ignore[call-arg]
        resumed = [later.with_options(resume_from=each) for each in (begun["run_id"], at_3)]
        found = [begun, whole, *(each.submit(None).result() for each in resumed)]
        return flow_run.id, found

    flow_run_id, (begun, undisturbed, *resumed) = trains()
    epochs = [(2, 0, 24)], [(1, 12, 12), (2, 0, 24)]
    for value, first, expected in zip(resumed, (7, 4), epochs, strict=True):
        assert value["made"] == list(range(first, 13))
        assert value["weights"] == undisturbed["weights"]
        proof = read_ledger(tmp_path, value["run_id"])
        assert proof.is_clean, str(proof)
        found = [(epoch.epoch, epoch.begins_at, epoch.num_samples) for epoch in proof.epochs]
        assert found == expected
    assert read_ledger(tmp_path, begun["run_id"]).is_clean
    assert read_ledger(tmp_path, undisturbed["run_id"]).epochs == ()

    def said() -> list[str]:
        lines = lines_with("the ledger of ", flow_run_id)
        return sorted(line.message.partition(":")[0] for line in lines)

    of_one, of_two = (f"the ledger of {num} epochs is clean" for num in (1, 2))
    wait_until(lambda: said() == [of_one, of_one, of_two])


def wait_or_fail(ctx: RankContext, folder: str, what: str) -> None:
    """Wait until the other one has failed and its flow has ended this one; or fail."""
    if what == "fails":
        wait_until((Path(folder) / "waits").exists)
        msg = "as told"
        raise ValueError(msg)
    (Path(folder) / what).touch()
    Event().wait()


@pytest.mark.extended
def test_a_callback_that_fails_keeps_no_other_from_being_called(
    dask_cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, as by concurrent.futures; Prefect's `as_completed` doesn't wait for ever."""
    called: list[object] = []

    def fails(_: object) -> None:
        msg = "a bug of a callback"
        raise ValueError(msg)

    @flow(task_runner=on(dask_cluster))
    def adds_callbacks() -> int:
        future = decorated.submit(1)
        future.add_done_callback(fails)
        future.add_done_callback(called.append)
        value = int(future.result())
        wait_until(lambda: called == [future])
        return value

    assert adds_callbacks() == OFFSET + 1
    assert "a bug of a callback" in caplog.text


@pytest.mark.parametrize(
    "has_order",
    [
        pytest.param(True, id="in order"),
        pytest.param(False, id="as completed", marks=pytest.mark.extended),
    ],
)
def test_of_mapped_calls_one_that_fails_is_heard_of_at_once(
    dask_cluster: LocalCluster, tmp_path: Path, *, has_order: bool
) -> None:
    """Though the one before it still trains, which is ended with the flow."""
    train = ddp_task(world_size=1, storage=str(tmp_path / "store"), stop_grace_s=1)(wait_or_fail)

    @flow(task_runner=DaskTaskRunner(address=dask_cluster.scheduler_address))
    def mapped() -> None:
        futures = train.map(unmapped(str(tmp_path)), ["waits", "fails"])
        if has_order:
            futures.result()
        for each in as_completed(futures):
            each.result()

    with pytest.raises(RankFailedError, match="as told"):
        mapped()
