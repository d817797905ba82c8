"""Level 1: a function on N ranks across the workers of a Dask cluster.

`run_gang`, its checks, the policy of restarts and a call's attempt log are here (a run's is in
`tracking`); `caller` and `worker` hold the code of the two kinds of process. Options are declared
in `params`. Torch and Prefect never come in.
"""
