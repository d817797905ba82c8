"""The values and bytes that processes exchange: caller, Dask worker, rank.

All are small, frozen and free of torch, distributed and prefect; each has its codec next to it.
Values that only one kind of process uses never come here.
"""
