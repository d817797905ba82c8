"""Any PyTorch function as a fault-tolerant distributed task of a Prefect flow, on the Dask cluster that the flow already uses.

Names are loaded when first used: importing this package loads neither prefect, nor distributed, nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect_torch_ddp.data.ledger import read_ledger
    from prefect_torch_ddp.errors import (
        BadKeyError,
        CheckpointError,
        GangCancelledError,
        GangError,
        GangHungError,
        InvalidParamsError,
        NotEnoughWorkersError,
        ObjectNotFoundError,
        PrefectTorchDdpError,
        RankFailedError,
        SchedulerLostError,
        StorageError,
        WorkerLostError,
    )
    from prefect_torch_ddp.flow import train_flow
    from prefect_torch_ddp.gang.launch import run_gang
    from prefect_torch_ddp.gang.warm import warm
    from prefect_torch_ddp.params import CheckpointParams, ClusterParams, TrainParams
    from prefect_torch_ddp.rank.context import RankContext
    from prefect_torch_ddp.rank.link import report_progress
    from prefect_torch_ddp.results import LedgerReport, Report, TrainReport
    from prefect_torch_ddp.tasks.ddp_task import ddp_task

    __version__: str

__all__ = [
    "BadKeyError",
    "CheckpointError",
    "CheckpointParams",
    "ClusterParams",
    "GangCancelledError",
    "GangError",
    "GangHungError",
    "InvalidParamsError",
    "LedgerReport",
    "NotEnoughWorkersError",
    "ObjectNotFoundError",
    "PrefectTorchDdpError",
    "RankContext",
    "RankFailedError",
    "Report",
    "SchedulerLostError",
    "StorageError",
    "TrainParams",
    "TrainReport",
    "WorkerLostError",
    "__version__",
    "ddp_task",
    "read_ledger",
    "report_progress",
    "run_gang",
    "train_flow",
    "warm",
]

_HOMES = {
    "CheckpointParams": "params",
    "ClusterParams": "params",
    "LedgerReport": "results",
    "RankContext": "rank.context",
    "Report": "results",
    "TrainParams": "params",
    "TrainReport": "results",
    "ddp_task": "tasks.ddp_task",
    "read_ledger": "data.ledger",
    "report_progress": "rank.link",
    "run_gang": "gang.launch",
    "train_flow": "flow",
    "warm": "gang.warm",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - costs more than the rest of this module

        value: Any = version("prefect-torch-ddp")
    elif name in __all__:
        value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    else:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
