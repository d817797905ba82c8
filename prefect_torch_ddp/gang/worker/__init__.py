"""In the Dask worker: the agent that holds the worker's slot, and its ranks' processes.

Standard library, distributed, psutil and the protocol come in; torch and user code never do.
What the caller decides is not decided here.
"""
