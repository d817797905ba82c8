"""In the Dask worker: the agent that holds the worker's slot, and its ranks' processes.

It imports the standard library, distributed, psutil and the protocol, never torch or user code.
Decisions about the gang belong to the caller, not here.
"""
