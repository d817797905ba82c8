"""The watch over a flow's tasks: cancels, killed flows, loss of a task's own worker or scheduler.

Each of these becomes a Prefect state. A gang watches its own ranks and their Dask workers in
`gang.caller`, not here.
"""
