# The public names, each `as` itself: what type checkers read, and what `__init__.py` opens when
# first used. Others are bases and internal classes that `help` of a public name shows.
# ruff: noqa: F401
from prefect_torch_ddp.data import CachedReads as CachedReads
from prefect_torch_ddp.data import S3ImageFolder as S3ImageFolder
from prefect_torch_ddp.data import image_folder as image_folder
from prefect_torch_ddp.data import write_index as write_index
from prefect_torch_ddp.errors import BadKeyError as BadKeyError
from prefect_torch_ddp.errors import CheckpointError as CheckpointError
from prefect_torch_ddp.errors import CorruptImageError as CorruptImageError
from prefect_torch_ddp.errors import DamagedObjectError as DamagedObjectError
from prefect_torch_ddp.errors import GangCancelledError as GangCancelledError
from prefect_torch_ddp.errors import GangError as GangError
from prefect_torch_ddp.errors import GangHungError as GangHungError
from prefect_torch_ddp.errors import InvalidParamsError as InvalidParamsError
from prefect_torch_ddp.errors import NewerFormatError as NewerFormatError
from prefect_torch_ddp.errors import NoImagesError as NoImagesError
from prefect_torch_ddp.errors import NotEnoughWorkersError as NotEnoughWorkersError
from prefect_torch_ddp.errors import ObjectChangedError as ObjectChangedError
from prefect_torch_ddp.errors import ObjectNotFoundError as ObjectNotFoundError
from prefect_torch_ddp.errors import PrefectTorchDdpError as PrefectTorchDdpError
from prefect_torch_ddp.errors import RankFailedError as RankFailedError
from prefect_torch_ddp.errors import SchedulerLostError as SchedulerLostError
from prefect_torch_ddp.errors import StorageError as StorageError
from prefect_torch_ddp.errors import SupersededError as SupersededError
from prefect_torch_ddp.errors import VersionConflictError as VersionConflictError
from prefect_torch_ddp.errors import WorkerLostError as WorkerLostError
from prefect_torch_ddp.errors import _LongError
from prefect_torch_ddp.flow import evaluate_flow as evaluate_flow
from prefect_torch_ddp.flow import train_flow as train_flow
from prefect_torch_ddp.gang.run import run_gang as run_gang
from prefect_torch_ddp.gang.warm import warm as warm
from prefect_torch_ddp.lazy import __version__ as __version__
from prefect_torch_ddp.params import CheckpointParams as CheckpointParams
from prefect_torch_ddp.params import ClusterParams as ClusterParams
from prefect_torch_ddp.params import ContextOptions, ContextParams, GangParams
from prefect_torch_ddp.params import GangOptions as GangOptions
from prefect_torch_ddp.params import Params as Params
from prefect_torch_ddp.params import TrainParams as TrainParams
from prefect_torch_ddp.protocol.events import GangEvent as GangEvent
from prefect_torch_ddp.protocol.events import Hang as Hang
from prefect_torch_ddp.protocol.events import RankFailure as RankFailure
from prefect_torch_ddp.rank.assembly import ContextAssembly
from prefect_torch_ddp.rank.context import RankContext as RankContext
from prefect_torch_ddp.rank.context import current_context as current_context
from prefect_torch_ddp.rank.evaluation.classification import (
    ClassificationMeter as ClassificationMeter,
)
from prefect_torch_ddp.rank.evaluation.meters import LanguageMeter as LanguageMeter
from prefect_torch_ddp.rank.evaluation.meters import RegressionMeter as RegressionMeter
from prefect_torch_ddp.rank.link import report_progress as report_progress
from prefect_torch_ddp.rank.local import LocalOptions as LocalOptions
from prefect_torch_ddp.rank.stages import read_options as read_options
from prefect_torch_ddp.results import CheckpointRef as CheckpointRef
from prefect_torch_ddp.results import ClassScore as ClassScore
from prefect_torch_ddp.results import DatasetReport as DatasetReport
from prefect_torch_ddp.results import EpochLedger as EpochLedger
from prefect_torch_ddp.results import EpochRow as EpochRow
from prefect_torch_ddp.results import FailedAttempt as FailedAttempt
from prefect_torch_ddp.results import Goodput as Goodput
from prefect_torch_ddp.results import LedgerReport as LedgerReport
from prefect_torch_ddp.results import Report as Report
from prefect_torch_ddp.results import Result
from prefect_torch_ddp.results import TrainingSummary as TrainingSummary
from prefect_torch_ddp.results import TrainReport as TrainReport
from prefect_torch_ddp.results import WorstSample as WorstSample
from prefect_torch_ddp.storage.directory import DirectoryStorage as DirectoryStorage
from prefect_torch_ddp.storage.locate import storage_from_uri as storage_from_uri
from prefect_torch_ddp.storage.names import check_key as check_key
from prefect_torch_ddp.storage.names import check_prefix as check_prefix
from prefect_torch_ddp.storage.protocol import ListedObject as ListedObject
from prefect_torch_ddp.storage.protocol import ObjectPart as ObjectPart
from prefect_torch_ddp.storage.protocol import Readable as Readable
from prefect_torch_ddp.storage.protocol import Storage as Storage
from prefect_torch_ddp.storage.protocol import StoredObject as StoredObject
from prefect_torch_ddp.storage.s3.client import S3Location
from prefect_torch_ddp.storage.s3.storage import S3Storage as S3Storage
from prefect_torch_ddp.tasks.clusters.local_cluster import local_cluster as local_cluster
from prefect_torch_ddp.tasks.ddp_script import ddp_script as ddp_script
from prefect_torch_ddp.tasks.ddp_task import DdpTaskOptions as DdpTaskOptions
from prefect_torch_ddp.tasks.ddp_task import ddp_task as ddp_task
from prefect_torch_ddp.tasks.gangs.own_flow import gang_report as gang_report
from prefect_torch_ddp.tasks.sweeps.report import sweep_report as sweep_report
from prefect_torch_ddp.tracking.exported import export_records as export_records
from prefect_torch_ddp.tracking.runs import compare_runs as compare_runs
from prefect_torch_ddp.tracking.runs import list_runs as list_runs
from prefect_torch_ddp.tracking.runs import read_goodput as read_goodput
from prefect_torch_ddp.tracking.runs import read_ledger as read_ledger
from prefect_torch_ddp.tracking.runs import read_metrics as read_metrics
from prefect_torch_ddp.tracking.runs import read_result as read_result
