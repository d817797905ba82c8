"""Prefect tasks: what a flow run shows and retries.

The stages of train-ddp, ddp_task, and their links to blocks, clusters and the run's storage.
Prefect belongs here, in tracking, blocks.py and flow.py. Torch never comes in: flows would
load it.
"""
