"""`run-script`: runs a script for torchrun as a task of a Prefect flow."""

import importlib.util
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from prefect_torch_ddp.cli.options import STORAGE, StorageOption
from prefect_torch_ddp.errors import InvalidParamsError

if TYPE_CHECKING:
    from prefect import Task
    from prefect_dask import DaskTaskRunner


NEAR = 0.75
"""How similar a name has to be to what was typed."""

Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="A .py file; with -m a module.")]
Args = Annotated[
    list[str] | None, typer.Argument(metavar="[-- ARGS]", help="The script's arguments.")
]
Module = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module.")]
RANKS = "Number of ranks: nnodes x nproc-per-node."
WorldSize = Annotated[
    int | None, typer.Option("-n", "--world-size", min=1, metavar="N", help=RANKS)
]
PER_NODE = "--nproc-per-node", "--nproc_per_node"
PerNode = Annotated[
    int | None, typer.Option(*PER_NODE, min=1, metavar="N", help="Ranks on each Dask worker.")
]
Nodes = Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of Dask workers.")]
RESTARTS = "--max-restarts", "--max_restarts"
Restarts = Annotated[int, typer.Option(*RESTARTS, min=0, metavar="N", help="Immediate restarts.")]
Retries = Annotated[int, typer.Option(min=0, metavar="N", help="Prefect's retries.")]
RESUMES = "Added from the second attempt on: --resume-arg=--resume"
ResumeArgs = Annotated[list[str] | None, typer.Option(metavar="ARG", help=RESUMES)]
SCHEDULER = "A running Dask scheduler; default: a local cluster."
Address = Annotated[str | None, typer.Option(metavar="URL", help=SCHEDULER)]


def run_script(
    script: Script,
    args: Args = None,
    module: Module = False,
    world_size: WorldSize = None,
    nproc_per_node: PerNode = None,
    nnodes: Nodes = None,
    max_restarts: Restarts = 0,
    retries: Retries = 0,
    resume_arg: ResumeArgs = None,
    storage: StorageOption = STORAGE,
    address: Address = None,
) -> None:
    """Run a script written for torchrun.

    For example: prefect-torch-ddp run-script train.py --world-size 2 -- --lr 0.1
    """
    ranks, each = placed(world_size, nproc_per_node, nnodes)
    named = f"-m {script}" if module else script
    if not module and not Path(script).is_file():
        hint = _near(script, (each.name for each in Path.cwd().glob("*.py")))
        msg = f"there is no script {script} in {Path.cwd()}; add -m to run a module{hint}"
        raise InvalidParamsError(msg)
    top = script.partition(".")[0]
    if module and not address and importlib.util.find_spec(top) is None:
        hint = _near(top, (each.stem for each in Path.cwd().glob("*.py")))
        msg = f"there is no module {top} that can be imported here{hint}"
        raise InvalidParamsError(msg)
    from prefect_torch_ddp.server import use_server

    use_server()
    from prefect_dask import DaskTaskRunner

    from prefect_torch_ddp.tasks.clusters.local_cluster import local_cluster
    from prefect_torch_ddp.tasks.ddp_script import ddp_script

    task = ddp_script(
        named,
        args or [],
        resume_args=resume_arg or [],
        world_size=ranks,
        ranks_per_worker=each,
        max_restarts=max_restarts,
        retries=retries,
        storage=storage,
    )
    if address:
        runner = DaskTaskRunner(address=address)
    else:
        shape = {"n_workers": ranks // each, "ranks_per_worker": each}
        runner = DaskTaskRunner(cluster_class=local_cluster, cluster_kwargs=shape)
    run_as_flow(task, runner)


def _near(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, list(known), 1, NEAR)
    return "".join(f"; did you mean {each}?" for each in close)


class OfScripts(TyperCommand):
    """Says of an unknown option how the script gets it."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read what was typed in."""
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # Of click's NoSuchOption, of which typer has a copy of its own or not.
            flag = getattr(error, "option_name", None)
            if flag is None or not hasattr(error, "possibilities"):
                raise
            hint = _near(flag, (each for param in self.params for each in param.opts))
            at = next((at for at, each in enumerate(typed) if each.startswith(flag)), len(typed))
            rest = " ".join(typed[at:]) or flag
            like = f"; write the script's own after --, as in: train.py -- {rest}"
            msg = f"there is no option {flag} of run-script{hint or like}"
            raise InvalidParamsError(msg) from None


def placed(world_size: int | None, per_node: int | None, nodes: int | None) -> tuple[int, int]:
    """Return how many ranks there are, and how many on each Dask worker.

    Raises:
        InvalidParamsError: the numbers contradict each other.
    """
    ranks = world_size or (per_node or 1) * (nodes or 1)
    each = per_node or (ranks // nodes if nodes else 1)
    if each < 1 or ranks % each or (nodes and ranks != each * nodes):
        said = {"--world-size": world_size, "--nproc-per-node": per_node, "--nnodes": nodes}
        given = ", ".join(f"{name} is {value}" for name, value in said.items() if value)
        msg = f"{given}; the world size is --nproc-per-node times --nnodes"
        raise InvalidParamsError(msg)
    return ranks, each


def run_as_flow(task: "Task[..., Any]", runner: "DaskTaskRunner") -> None:
    """Run one task in a flow of the same name."""
    from prefect import flow

    @flow(name=task.name, task_runner=runner)  # type: ignore[arg-type]
    def script() -> None:
        task.submit().result()

    script()
