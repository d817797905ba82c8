"""The workload that comes with the package, so that `TrainParams()` trains something.

It uses the public names alone, as a workload of your own does; nothing here imports an example.
"""
