"""The caller's side of a gang, in the process that called `run_gang`.

It gathers and reserves workers, supervises ranks, notices lost workers, and finds the root
cause, mostly on the Dask client's event loop. Nothing here runs on a Dask worker or in a rank.
"""
