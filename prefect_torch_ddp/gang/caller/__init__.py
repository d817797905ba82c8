"""The caller's side of a gang, in the process that called `run_gang`.

It gathers workers, reserves and supervises them, and names the root cause, mostly on the Dask
client's event loop. Nothing here runs on a Dask worker or in a rank.
"""
