"""Prefect tasks: what a flow run shows and retries.

The stages of train-ddp, ddp_task, and their links to blocks, clusters and the run's storage.
Only this folder and flow.py import Prefect. Torch never comes in, since flows would load it.
"""

from prefect_torch_ddp.tasks.forks import mend_forks

mend_forks()
