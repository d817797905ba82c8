"""What a flow does while it waits for its tasks: progress in the terminal, and the watch over them.

Cancels, killed flows and the loss of a task's own worker or scheduler become Prefect states. A
gang watches its own ranks and their Dask workers in `gang.caller`, not here.
"""
