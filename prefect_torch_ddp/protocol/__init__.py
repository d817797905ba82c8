"""The values and bytes that cross a process: caller, Dask worker, rank.

All are small, frozen and free of torch, distributed and prefect; their codecs stand beside them.
What only one kind of process knows never comes here.
"""
