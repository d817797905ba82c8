"""What a rank that prepares a dataset sends its caller if Dask is to compute the dataset."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LazyDataset:
    """A Dask collection that is to be a dataset: not computed yet, and pickled.

    A workload's `prepare` returned it, or it is an argument of a `ddp_task`. A rank doesn't load
    Dask by itself, so the caller unpickles it, on a Dask worker.
    """

    kind: str
    """Its class, with the module."""
    form: Literal["table", "arrays", "bag"]
    """What its dataset is: Parquet files, a Zarr group, or what the items of a Bag decide."""
    pickled: bytes
    """By cloudpickle."""
