"""The caller's side of a gang: it gathers workers, reserves them, supervises the ranks and
names the root cause.

It runs in the process that called `run_gang`, mostly on the Dask client's event loop.
Nothing here runs on a Dask worker or in a rank.
"""
