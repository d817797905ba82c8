"""What the public names promise a type checker: mypy reads it, nothing runs it.

A line that must be refused carries `type: ignore` with the error's code: mypy warns about each
that is not needed.
"""

from typing import Any, assert_type

from distributed import Client
from prefect import Task, flow
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import RankContext, TrainParams, TrainReport, ddp_task, run_gang, train_flow


@ddp_task(world_size=2, retries=1, tags=["nightly"])
def train(ctx: RankContext, lr: float, *, epochs: int = 1) -> dict[str, float]:
    """Take a positional and a keyword-only argument after the rank."""
    return {"loss": lr * epochs * ctx.world_size}


@ddp_task
def bare(ctx: RankContext) -> int:
    """Be decorated without parentheses."""
    return ctx.rank


assert_type(bare, Task[[], int])


@flow(task_runner=DaskTaskRunner())  # type: ignore[arg-type]  # its futures are PrefectDaskFutures
def a_flow() -> float:
    """Call them as a flow does."""
    assert_type(train(lr=0.1), dict[str, float])
    assert_type(train(0.1, epochs=2), dict[str, float])
    assert_type(train.submit(lr=0.1).result(), dict[str, float])
    assert_type(bare(), int)
    return train(lr=0.1)["loss"]


def refused(ctx: RankContext) -> None:
    """Make each mistake once."""
    train()  # type: ignore[call-overload]
    train(lr="fast")  # type: ignore[call-overload]
    train(lr=0.1, momentum=0.9)  # type: ignore[call-overload]
    train(ctx, 0.1)  # type: ignore[call-overload]
    train(0.1, 2)  # type: ignore[call-overload]
    bare(1)  # type: ignore[call-overload]
    ddp_task(world_size="two")  # type: ignore[call-overload]
    ddp_task(backend="mpi")  # type: ignore[call-overload]
    ddp_task(retrys=1)  # type: ignore[call-overload]


@ddp_task(world_size=2)  # type: ignore[arg-type]
def without_rank(lr: float) -> float:
    """Take no RankContext."""
    return lr


def in_a_rank(ctx: RankContext) -> None:
    """Count steps with any iterable or none, keep values, say how far an own loop is."""
    ctx.steps(total=5)
    ctx.steps([1, 2], total=float("inf"), on_other_world_size="begin")
    ctx.state(best=0.0).best = 1.0
    ctx.progress(1, 5, epoch=1)
    ctx.steps(3, total=5)  # type: ignore[arg-type]
    ctx.steps([1], total=5, on_other_world_size="anew")  # type: ignore[arg-type]
    ctx.progress("1")  # type: ignore[arg-type]


def level_1(client: Client) -> None:
    """Get a list, one value for each rank."""
    assert_type(run_gang(client, max, args=(1, 2), world_size=2), list[Any])
    run_gang(client, max, resources={"GPU": 1}, interface="ib0", max_restarts=1)
    run_gang(client, 3)  # type: ignore[arg-type]
    run_gang(client, max, backend="mpi")  # type: ignore[arg-type]
    run_gang(client, max, backnd="gloo")  # type: ignore[call-arg]
    run_gang(client, max, process_group="mine")  # type: ignore[arg-type]


def level_3() -> None:
    """Get a typed report."""
    assert_type(train_flow(TrainParams()), TrainReport)
    assert_type(train_flow(), TrainReport)
    assert_type(train_flow(TrainParams()).evaluation.accuracy, float | None)
    train_flow("prefect_torch_ddp.examples.digits")  # type: ignore[call-overload]
    TrainParams(resources={"GPU": 1}, interface="ib0")
    TrainParams(worldsize=2)  # type: ignore[call-arg]
    TrainParams().seed = 1  # type: ignore[misc]
