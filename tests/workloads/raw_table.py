"""A workload without `prepare`: the Parquet files of its source are its dataset."""

from tests.workloads.dask_table import evaluate, train

__all__ = ["evaluate", "train"]
