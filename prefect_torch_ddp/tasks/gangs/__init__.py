"""The gangs of a Prefect run: of a training, and of a stage that doesn't train.

They connect `run_gang` with the run's cluster, storage, log and report. What is run, and what
becomes of its value, belongs to the tasks; what shows a gang, to `report` and `watch`.
"""
