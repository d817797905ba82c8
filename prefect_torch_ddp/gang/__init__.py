"""Level 1: a function on N ranks across the workers of a Dask cluster.

`run_gang`, its checks, the policy of restarts and the attempt log are here; `caller` and `worker`
hold the code of the two kinds of process. Options are declared in `params`. Torch and Prefect
never come in.
"""
