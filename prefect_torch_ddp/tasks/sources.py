"""The source of a run: of a new one, and of one on record, where it may have changed or be gone."""

from prefect.logging import get_run_logger

from prefect_torch_ddp.blocks import resolve_source
from prefect_torch_ddp.data.datasets.dataset_store import find_dataset
from prefect_torch_ddp.data.preparing import tables_in
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.params import TrainParams
from prefect_torch_ddp.results import DatasetReport
from prefect_torch_ddp.storage.protocol import Readable, Storage


def new_source(
    params: TrainParams, *, has_prepare: bool
) -> tuple[Readable | None, DatasetReport | None]:
    """Resolve a new run's source, which may be none; and its tables if there is no `prepare`.

    Raises:
        InvalidParamsError, StorageError: see `resolve_source` and `tables_in`.
    """
    if params.source is None:
        return None, None
    source = resolve_source(params.source)
    return source, None if has_prepare else tables_in(source)


def recorded_source(
    params: TrainParams, own: Storage, run_id: str, dataset: DatasetReport
) -> tuple[Readable | None, DatasetReport | None]:
    """Resolve a recorded run's source; warn if it isn't as it was.

    Args:
        params: the run's.
        own: its storage.
        run_id: its id.
        dataset: what it trained on.

    Returns:
        The source, None if there is none; and its tables as they are now, None if the run has a
        prepared dataset. What was prepared is enough without the source.

    Raises:
        InvalidParamsError: the source isn't there, and neither is a prepared dataset.
        StorageError: the source can't be listed.
    """
    if params.source is None:
        return None, None
    try:
        source = resolve_source(params.source)
    except InvalidParamsError as error:
        if find_dataset(own, dataset.dataset_id) is None:
            raise
        words = "%s. The evaluation uses the prepared dataset %s, and has no ctx.source"
        get_run_logger().warning(words, error, dataset.dataset_id)
        return None, None
    return source, _read_now(source, run_id, dataset) if dataset.uri == source.uri else None


def _read_now(source: Readable, run_id: str, was: DatasetReport) -> DatasetReport:
    """Describe the tables of a run's source as they are now; warn if they were others.

    Raises:
        InvalidParamsError, StorageError: see `tables_in`.
    """
    now = tables_in(source)
    if now.digest != was.digest:
        words = (
            "the tables in %s have changed since run %s: %d files of %d bytes, and they were %d of "
            "%d. The evaluation reads them as they are now: don't compare its scores with the run's"
        )
        sizes = now.num_files, now.num_bytes, was.num_files, was.num_bytes
        get_run_logger().warning(words, source.uri, run_id, *sizes)
    return now
