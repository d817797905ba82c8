"""The plan of a gang: the call that it makes, and what is fixed before it is placed."""

import site
import sys
import sysconfig
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.gang.caller.placement import Placement
from prefect_torch_ddp.params import GangParams
from prefect_torch_ddp.protocol.agent import Reservation, Seniority, StartOrder, WorkerIdentity
from prefect_torch_ddp.protocol.rank import CodePaths, ProcessGroupMode, RankLaunch

RANK_PATIENCE_S = 2.0
"""How much longer than its caller a rank waits for its agent, so that the caller names a silent
worker before that worker's ranks end themselves and their peers fail."""


@dataclass(frozen=True)
class GangPlan:
    """One attempt of one call of run_gang."""

    name: str
    seniority: Seniority
    options: GangParams
    process_group: ProcessGroupMode
    liveness_timeout_s: float
    code_paths: CodePaths
    watched_from_start: bool
    """Whether progress is expected before a rank has shown any: of a plain function whose
    caller gave a limit."""
    payload: bytes = b""
    attempt: int = 1
    max_restarts: int = 0
    full_size_s: float = 0.0
    """How long the gang waits for all its ranks while there are workers for its fewest."""

    @property
    def resources(self) -> dict[str, float]:
        """What the gang takes from each of its workers."""
        return dict(self.options.resources or {})

    def reservation(self, worker: WorkerIdentity, placement: Placement) -> Reservation:
        """Make the reservation for one worker; its token is never used twice."""
        return Reservation(
            token=f"{self.seniority.gang_id}-{uuid.uuid4().hex[:12]}",
            gang_name=self.name,
            seniority=self.seniority,
            worker=worker.address,
            process_id=worker.process_id,
            hosts_store=worker.address == placement.workers[0],
            stop_grace_s=self.options.stop_grace_s,
            liveness_timeout_s=self.liveness_timeout_s,
            store_host=placement.places[0].address,
        )

    def start_order(self, placement: Placement, worker: str, store_port: int) -> StartOrder:
        """Make the order that starts one worker's ranks."""
        launches = tuple(
            RankLaunch(
                place=place,
                shape=placement.shape,
                gang_id=self.seniority.gang_id,
                attempt=self.attempt,
                max_restarts=self.max_restarts,
                master_addr=placement.places[0].address,
                master_port=store_port,
                store_fd=None,
                process_group=self.process_group,
                backend=self.options.backend,
                rendezvous_timeout_s=self.options.rendezvous_timeout_s,
                agent_timeout_s=self.liveness_timeout_s + RANK_PATIENCE_S,
                code_paths=self.code_paths,
                launcher=self.options.launcher,
            )
            for place in placement.ranks_of(worker)
        )
        return StartOrder(launches, self.payload, self.options.progress_timeout_s)


def pickle_call(
    fn: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bytes:
    """Pickle the call, a script by its whole path; raises InvalidParamsError where that fails."""
    if isinstance(fn, str) and fn.endswith(".py"):
        fn = str(Path(fn).resolve())
    try:
        payload: bytes = cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:
        msg = (
            f"{name_of(fn)} or its arguments can't be sent to the ranks: "
            f"{type(error).__name__}: {error}"
        )
        raise InvalidParamsError(msg) from error
    return payload


def brings_context(fn: Callable[..., Any] | str) -> bool:
    """Whether this is our own entry with a RankContext, which says from when it is watched."""
    return isinstance(fn, str) and fn.startswith("prefect_torch_ddp.rank.stages:")


def name_of(fn: Callable[..., Any] | str) -> str:
    """Return the function's name for people."""
    return fn if isinstance(fn, str) else getattr(fn, "__qualname__", type(fn).__name__)


def own_code_paths() -> CodePaths:
    """Return the caller's import paths with the user's own code, without installed packages.

    A function that is pickled by reference must be importable at its rank, also when the Dask
    worker was started elsewhere on the same machine or a shared file system; and a name that the
    user's own module shares with an installed package must mean the same there.
    """
    packages = [
        sysconfig.get_path("stdlib"),
        *site.getsitepackages(),
        site.getusersitepackages(),
    ]
    installed = _resolved([sys.prefix, sys.base_prefix, *packages])
    paths = _resolved(sys.path)
    where = [paths.index(folder) for folder in _resolved(packages) if folder in paths]
    own = [(at, path) for at, path in enumerate(paths) if not _is_in(path, installed)]
    boundary = min(where, default=len(paths))
    return CodePaths(
        first=tuple(str(path) for at, path in own if at < boundary),
        last=tuple(str(path) for at, path in own if at > boundary),
    )


def _resolved(paths: Sequence[str]) -> list[Path]:
    return list(dict.fromkeys(Path(path).resolve() for path in paths))


def _is_in(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
