"""The Dask worker's side of a gang: the agent that holds the worker's slot and runs its ranks'
processes.

Standard library, distributed and the protocol only: no torch, no user code. What the caller
decides never comes here.
"""
