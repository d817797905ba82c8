"""The workload that comes with the package, so that `TrainParams()` trains something.

It uses only the public names, as your own workload does; nothing here imports an example.
"""
