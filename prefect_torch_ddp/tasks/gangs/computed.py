"""The dataset that Dask computes: partitions written by the workers, the manifest last."""

import asyncio
import pickle
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import distributed
from distributed.scheduler import KilledWorker

from prefect_torch_ddp.data.datasets.dataset_manifest import Written, read_dataset_manifest
from prefect_torch_ddp.data.datasets.dataset_store import (
    drop_files,
    find_dataset,
    new_files_folder,
    publish_written,
)
from prefect_torch_ddp.errors import GangCancelledError, InvalidParamsError, StorageError
from prefect_torch_ddp.gang.liveness import own_task_watch
from prefect_torch_ddp.protocol.prepared import LazyDataset
from prefect_torch_ddp.results import DatasetReport
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.gangs.bag_writer import BagWriter
from prefect_torch_ddp.tasks.gangs.collection_writers import (
    ArrayWriter,
    CollectionWriter,
    TableWriter,
)
from prefect_torch_ddp.tasks.report.markdown import duration, size

if TYPE_CHECKING:
    from logging import Logger, LoggerAdapter

    LoggingAdapter = Logger | LoggerAdapter[Any]

LIBRARIES = {
    "table": ("tables", ["pyarrow"]),
    "arrays": ("arrays", ["zarr", "xarray"]),
    "bag": ("tables", ["pyarrow"]),
}
"""The extra and the libraries that workers need for each form of a dataset."""
WRITERS: Mapping[str, Callable[[Any, Storage, str], CollectionWriter]] = {
    "table": TableWriter,
    "arrays": ArrayWriter,
    "bag": BagWriter,
}
LOOK_S = 0.5
"""Between two looks for a cancel."""
SAY_EVERY_S = 10.0
MAX_DEATHS = 3
"""So many workers may die at one partition; a cluster that a run starts allows none itself."""
SHOWN_LOST = 10


def publish_computed(  # noqa: PLR0913 - where it goes, and who hears of it
    client: distributed.Client,
    storage: Storage,
    dataset_id: str,
    lazy: LazyDataset,
    logger: "LoggingAdapter",
    *,
    show: Callable[[str, float], None] = lambda _line, _percent: None,
) -> DatasetReport:
    """Have the partitions of a Dask collection computed and written, and publish them as a dataset.

    Needs the memory of what Dask computes at once, on the workers, and none here. A lost worker
    costs what it had not finished. If another task of the cluster computes the same dataset, this
    one waits for it. If one of another cluster publishes it first, this one returns that dataset.

    Args:
        client: of the cluster.
        storage: of the dataset.
        dataset_id: of the dataset.
        lazy: the collection.
        logger: reports the progress, every 10 s.
        show: takes the same line, and how many percent are done, about twice a second.

    Raises:
        InvalidParamsError: a library is missing on the workers, or something can't be written.
        GangCancelledError: this task was cancelled.
        StorageError: the storage failed, and the dataset isn't published.
        Exception: what computing a partition raised.
    """
    collection = _unpickled(lazy)
    folder, files_key = new_files_folder(dataset_id)
    with _only_one(client, storage, dataset_id, logger):
        if (there := find_dataset(storage, dataset_id)) is not None:
            return there
        try:
            writer = WRITERS[lazy.form](collection, storage, files_key)
            written = _Writing(client, writer, logger, show).to_the_end()
            if (again := writer.again(written)) is not None:
                writer, written = again, _Writing(client, again, logger, show).to_the_end()
            return publish_written(storage, dataset_id, folder, writer.files(written))
        except BaseException as error:
            there = _after_failure(storage, dataset_id, folder)
            # A faster publisher, on another cluster, removes these files while they are read.
            if there is not None and isinstance(error, StorageError):
                return there
            raise


def _after_failure(storage: Storage, dataset_id: str, folder: str) -> DatasetReport | None:
    """Remove the files that no published dataset has; return the published one, if there is one.

    Raises nothing: what failed first is the error to report.
    """
    there = None
    with suppress(Exception):
        there = read_dataset_manifest(storage, dataset_id)
        # Publishing may fail after the manifest was written: the files belong to it then.
        if there is None or there.folder != folder:
            drop_files(storage, dataset_id, folder)
    return None if there is None else there.to_dataset_report(storage)


@contextmanager
def _only_one(
    client: distributed.Client, storage: Storage, dataset_id: str, logger: "LoggingAdapter"
) -> Iterator[None]:
    """Hold a lock of the cluster; another task that computes the same would double the work.

    Dask frees it some time after the process that holds it is lost: 30 to 40 s by default.
    """
    name = f"prefect-torch-ddp {storage.uri} {dataset_id}"
    lock = distributed.Lock(name, scheduler_rpc=client.scheduler, loop=client.loop)
    why_unwanted, is_told = own_task_watch(), False
    while not lock.acquire(timeout=LOOK_S):
        _stop_if(why_unwanted())
        if not is_told:
            is_told = True
            until = "until it has, or Dask has noticed that its process is lost"
            logger.info("another task prepares dataset %s: waiting %s", dataset_id, until)
    try:
        yield
    finally:
        with suppress(Exception):  # the scheduler is lost, and the lock with it
            lock.release()


def _stop_if(why: str) -> None:
    if why:
        msg = f"the preparation of the dataset was stopped by {why}"
        raise GangCancelledError(msg)


def _unpickled(lazy: LazyDataset) -> Any:
    extra, libraries = LIBRARIES[lazy.form]
    try:
        for name in libraries:
            import_module(name)
        return pickle.loads(lazy.pickled)
    except ImportError as error:
        msg = (
            f"a {lazy.kind} can't be loaded on a Dask worker: {error}; install prefect-torch-ddp "
            f"with its extra `{extra}` there, and the modules of the functions that Dask calls"
        )
        raise InvalidParamsError(msg) from error


class _Writing:
    """The partitions on their way: which are written, and which were lost with their worker."""

    def __init__(
        self,
        client: distributed.Client,
        writer: CollectionWriter,
        logger: "LoggingAdapter",
        show: Callable[[str, float], None],
    ) -> None:
        self._client = client
        self._writer = writer
        self._logger = logger
        self._show = show
        self._why_unwanted = own_task_watch()
        self._futures: dict[distributed.Future[Any], int] = {}
        self._lost_with: dict[int, list[str]] = defaultdict(list)
        """The address of each worker that died while it had a partition."""
        self._written: dict[int, Written] = {}
        self._num_bytes = 0
        self._began_s = self._said_s = 0.0

    def to_the_end(self) -> list[Written]:
        """Wait until all are written; return what was, in the order of the partitions."""
        writes = self._writer.writes
        self._began_s = self._said_s = time.monotonic()
        try:
            while now := self._next():
                # At once: one graph for all, which Dask orders so that little is in memory.
                futures = self._client.compute([writes[i] for i in now])
                self._futures = dict(zip(futures, now, strict=True))
                # What was lost is computed again when the scheduler has forgotten that it failed:
                # when nothing needs it any longer.
                while self._futures:
                    self._take_written()
                # Dask releases a future in its own thread: until then it would have the next one
                # of that partition for the same, and give its failure for another.
                self._client.sync(asyncio.sleep, 0)
        finally:
            self._client.cancel(list(self._futures), force=True)
        return [self._written[i] for i in range(len(writes))]

    def _next(self) -> list[int]:
        """Return what is to be computed next, all at once.

        A partition that may be lost for the last time comes alone: its worker died of no other.
        """
        left = [i for i in range(len(self._writer.writes)) if i not in self._written]
        suspected = [i for i in left if len(self._lost_with.get(i, ())) == MAX_DEATHS - 1]
        return [i for i in left if i not in suspected] or suspected[:1]

    def _take_written(self) -> None:
        """Wait for a while; note the partitions that were written meanwhile."""
        _stop_if(self._why_unwanted())
        try:
            done, _ = distributed.wait(
                list(self._futures), timeout=LOOK_S, return_when="FIRST_COMPLETED"
            )
        except distributed.TimeoutError:
            done = ()
        for future in done:
            number = self._futures.pop(future)
            error = future.exception()
            written = Written(()) if error is not None else future.result()
            # Or Dask would compute it again if its worker is lost, and not if it failed.
            future.release()
            if isinstance(error, KilledWorker):
                self._note_death(number, error)
            elif error is not None:
                what = f"number {number} of the {self._writer.unit}"
                error.add_note(f"raised while {what} was computed, counted from 0")
                raise error
            else:
                self._writer.take(number, written)
                self._written[number] = written
                self._num_bytes += sum(file.num_bytes for file in written.files)
        now_s = time.monotonic()
        num_done, num = len(self._written), len(self._writer.writes)
        line = self._line(now_s - self._began_s)
        self._show(line, 100 * num_done / num)
        if now_s - self._said_s >= SAY_EVERY_S or num_done == num:
            self._said_s = now_s
            self._logger.info("%s", line)

    def _note_death(self, number: int, error: KilledWorker) -> None:
        self._lost_with[number].append(error.last_worker.address)
        if len(self._lost_with[number]) >= MAX_DEATHS:
            error.add_note(self._whose_deaths(number))
            raise error
        self._logger.warning(
            "a Dask worker died while it prepared number %d of the %s; it will be computed again",
            number,
            self._writer.unit,
        )

    def _whose_deaths(self, number: int) -> str:
        """Say which partition was lost with which workers, and which others were.

        If a worker had several partitions, Dask doesn't know which of them it died of.
        """
        lost = self._lost_with
        workers = ", ".join(f"{each} ({num})" for each, num in Counter(lost[number]).most_common())
        note = (
            f"number {number} of the {self._writer.unit}, counted from 0, was lost with its Dask "
            f"worker {len(lost[number])} times: {workers}"
        )
        others = sorted(set(lost) - {number}, key=lambda each: -len(lost[each]))[:SHOWN_LOST]
        also = ", ".join(f"number {each} ({len(lost[each])})" for each in others)
        return f"{note}; others were lost too: {also}" if also else note

    def _line(self, passed_s: float) -> str:
        """Return `prepared 31 of 120 partitions, 1.2 GB, 40 s left`."""
        num_done, num = len(self._written), len(self._writer.writes)
        left = ""
        if 0 < num_done < num:
            left = f", {duration(passed_s * (num - num_done) / num_done)} left"
        return f"prepared {num_done} of {num} {self._writer.unit}, {size(self._num_bytes)}{left}"
