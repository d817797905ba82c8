"""Experiment trackers such as MLflow, which get what a run has on record.

A tracker is fed from the storage, never by ranks: by the command `sync`, or by a process next to a
flow. Nothing here loads Prefect or torch, and a tracker's own package only when its tracker is
opened.
"""
