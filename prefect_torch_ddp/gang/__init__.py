"""Level 1: a function on N ranks across the workers of a Dask cluster.

`run_gang` and what its options mean live here; `caller` and `worker` hold the code of the two
kinds of process on either side of the cluster. Torch and Prefect never come in.
"""
