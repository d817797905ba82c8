"""Checkpoints: from objects to states, files and a commit, and back; the model that is exported.

What a run keeps in its storage next to its records lives here: attempts and checkpoints.
It imports the storage seam and torch, never a gang, a rank's loop, Prefect or Dask.
"""
