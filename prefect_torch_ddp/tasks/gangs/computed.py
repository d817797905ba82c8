"""The dataset that Dask computes: partitions written by the workers, the manifest last."""

import pickle
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import distributed
from dask.delayed import delayed
from dask.graph_manipulation import clone
from distributed.scheduler import KilledWorker

from prefect_torch_ddp.data.dataset_manifest import DatasetFile
from prefect_torch_ddp.data.dataset_store import drop_files, new_files_folder, publish_written
from prefect_torch_ddp.data.tables.writing import write_part
from prefect_torch_ddp.errors import GangCancelledError, InvalidParamsError
from prefect_torch_ddp.gang.liveness import own_task_watch
from prefect_torch_ddp.protocol.prepared import LazyDataset
from prefect_torch_ddp.results import DatasetReport
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.report.markdown import duration, size

if TYPE_CHECKING:
    from logging import Logger, LoggerAdapter

    LoggingAdapter = Logger | LoggerAdapter[Any]

LOOK_S = 0.5
"""Between two looks for a cancel."""
SAY_EVERY_S = 10.0
MAX_DEATHS = 3
"""So many workers may die at one partition; a cluster that a run starts allows none itself."""


def publish_computed(
    client: distributed.Client,
    storage: Storage,
    dataset_id: str,
    lazy: LazyDataset,
    logger: "LoggingAdapter",
) -> DatasetReport:
    """Have a Dask DataFrame's partitions computed and written, and publish them as a dataset.

    Needs the memory of what Dask computes at once, on the workers, and none here. A lost worker
    costs what it had not finished.

    Args:
        client: of the cluster.
        storage: of the dataset.
        dataset_id: of the dataset.
        lazy: what prepare returned.
        logger: reports the progress.

    Raises:
        InvalidParamsError: a library is missing on the workers, or a partition can't be written.
        GangCancelledError: this task was cancelled.
        Exception: what computing a partition raised.
    """
    collection = _unpickled(lazy)
    folder, files_key = new_files_folder(dataset_id)
    try:
        parts = collection.to_delayed()
        files = _Writing(client, parts, (storage, files_key), logger).to_the_end()
        return publish_written(storage, dataset_id, folder, files)
    except BaseException:
        with suppress(Exception):  # what failed first is the one to report
            drop_files(storage, dataset_id, folder)
        raise


def _unpickled(lazy: LazyDataset) -> Any:
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra

        pa.__version__  # noqa: B018
        return pickle.loads(lazy.pickled)
    except ImportError as error:
        msg = (
            f"prepare returned a {lazy.kind}, which can't be loaded on a Dask worker: {error}; "
            "install prefect-torch-ddp with its extra `tables` there, and the workload's modules"
        )
        raise InvalidParamsError(msg) from error


class _Writing:
    """The partitions on their way: which are written, and which were lost with their worker."""

    def __init__(
        self,
        client: distributed.Client,
        parts: Sequence[Any],
        where: tuple[Storage, str],
        logger: "LoggingAdapter",
    ) -> None:
        self._client = client
        self._parts = parts
        self._where = where
        self._logger = logger
        self._why_unwanted = own_task_watch()
        self._futures: dict[distributed.Future[Any], int] = {}
        self._deaths: Counter[int] = Counter()

    def to_the_end(self) -> list[DatasetFile]:
        """Wait until all are written; return their files."""
        files: list[DatasetFile] = []
        began_s = said_s = time.monotonic()
        for number in range(len(self._parts)):
            self._submit(number)
        try:
            while self._futures:
                files += self._newly_written()
                now_s = time.monotonic()
                if now_s - said_s >= SAY_EVERY_S or not self._futures:
                    said_s = now_s
                    self._say(sum(file.num_bytes for file in files), now_s - began_s)
        finally:
            self._client.cancel(list(self._futures), force=True)
        return files

    def _submit(self, number: int) -> None:
        # Keys of their own if it is done again: the scheduler may still know the lost ones.
        part = clone(self._parts[number]) if self._deaths[number] else self._parts[number]
        write = delayed(write_part, pure=False)
        future = self._client.compute(write(part, *self._where, number))
        self._futures[future] = number

    def _newly_written(self) -> list[DatasetFile]:
        """Wait for a while; return the files of partitions that were written meanwhile."""
        if why := self._why_unwanted():
            msg = f"the preparation of the dataset was stopped by {why}"
            raise GangCancelledError(msg)
        try:
            done, _ = distributed.wait(
                list(self._futures), timeout=LOOK_S, return_when="FIRST_COMPLETED"
            )
        except distributed.TimeoutError:
            return []
        files = []
        for future in done:
            number = self._futures.pop(future)
            error = future.exception()
            written = None if error is not None else future.result()
            # Or Dask would compute it again if its worker is lost, and not if it failed.
            future.release()
            if isinstance(error, KilledWorker):
                self._again(number, error)
            elif error is not None:
                raise error
            elif written is not None:
                files.append(written)
        return files

    def _again(self, number: int, error: KilledWorker) -> None:
        self._deaths[number] += 1
        if self._deaths[number] >= MAX_DEATHS:
            raise error
        self._logger.warning(
            "a Dask worker died while it prepared partition %d; it is computed again", number
        )
        self._submit(number)

    def _say(self, num_bytes: int, passed_s: float) -> None:
        num, num_left = len(self._parts), len(self._futures)
        left = ""
        if num_left and num_left < num:
            left = f", {duration(passed_s * num_left / (num - num_left))} left"
        words = "prepared %d of %d partitions, %s%s"
        self._logger.info(words, num - num_left, num, size(num_bytes), left)
