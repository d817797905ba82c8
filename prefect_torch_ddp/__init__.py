"""Any PyTorch function as a fault-tolerant distributed task of a Prefect flow, on the Dask
cluster that the flow already uses.

Names are loaded when first used: importing this package loads neither prefect, nor distributed,
nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect_torch_ddp.data.images.cache import CachedReads
    from prefect_torch_ddp.data.images.folder import S3ImageFolder, image_folder
    from prefect_torch_ddp.data.images.listing import write_index
    from prefect_torch_ddp.data.images.packed import PackedObjects
    from prefect_torch_ddp.data.images.tar_shards import pack_shards
    from prefect_torch_ddp.errors import (
        BadKeyError,
        CheckpointError,
        CorruptImageError,
        DamagedObjectError,
        GangCancelledError,
        GangError,
        GangHungError,
        InvalidParamsError,
        NoImagesError,
        NotEnoughWorkersError,
        ObjectChangedError,
        ObjectNotFoundError,
        PrefectTorchDdpError,
        RankFailedError,
        SchedulerLostError,
        StorageError,
        WorkerLostError,
    )
    from prefect_torch_ddp.flow import train_flow
    from prefect_torch_ddp.gang.run import run_gang
    from prefect_torch_ddp.gang.warm import warm
    from prefect_torch_ddp.params import CheckpointParams, ClusterParams, Params, TrainParams
    from prefect_torch_ddp.rank.context import RankContext
    from prefect_torch_ddp.rank.evaluation import ClassificationMeter
    from prefect_torch_ddp.rank.link import report_progress
    from prefect_torch_ddp.rank.workload import read_options
    from prefect_torch_ddp.results import LedgerReport, Report, TrainReport
    from prefect_torch_ddp.storage.locate import storage_from_uri
    from prefect_torch_ddp.tasks.ddp_task import ddp_task
    from prefect_torch_ddp.tasks.reading import read_ledger, read_metrics, read_result

    __version__: str

__all__ = [
    "BadKeyError",
    "CachedReads",
    "CheckpointError",
    "CheckpointParams",
    "ClassificationMeter",
    "ClusterParams",
    "CorruptImageError",
    "DamagedObjectError",
    "GangCancelledError",
    "GangError",
    "GangHungError",
    "InvalidParamsError",
    "LedgerReport",
    "NoImagesError",
    "NotEnoughWorkersError",
    "ObjectChangedError",
    "ObjectNotFoundError",
    "PackedObjects",
    "Params",
    "PrefectTorchDdpError",
    "RankContext",
    "RankFailedError",
    "Report",
    "S3ImageFolder",
    "SchedulerLostError",
    "StorageError",
    "TrainParams",
    "TrainReport",
    "WorkerLostError",
    "__version__",
    "ddp_task",
    "image_folder",
    "pack_shards",
    "read_ledger",
    "read_metrics",
    "read_options",
    "read_result",
    "report_progress",
    "run_gang",
    "storage_from_uri",
    "train_flow",
    "warm",
    "write_index",
]

_HOMES = {
    "CachedReads": "data.images.cache",
    "CheckpointParams": "params",
    "ClassificationMeter": "rank.evaluation",
    "ClusterParams": "params",
    "LedgerReport": "results",
    "PackedObjects": "data.images.packed",
    "Params": "params",
    "RankContext": "rank.context",
    "Report": "results",
    "S3ImageFolder": "data.images.folder",
    "TrainParams": "params",
    "TrainReport": "results",
    "ddp_task": "tasks.ddp_task",
    "image_folder": "data.images.folder",
    "pack_shards": "data.images.tar_shards",
    "read_ledger": "tasks.reading",
    "read_metrics": "tasks.reading",
    "read_options": "rank.workload",
    "read_result": "tasks.reading",
    "report_progress": "rank.link",
    "run_gang": "gang.run",
    "storage_from_uri": "storage.locate",
    "train_flow": "flow",
    "warm": "gang.warm",
    "write_index": "data.images.listing",
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
