"""What runs in a rank: the process group, the way to the agent, and the context of its function.

`process/` is the process itself, `training/` the steps of a RankContext. Dask and Prefect never
come in.
"""
