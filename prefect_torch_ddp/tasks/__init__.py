"""Prefect tasks: what a flow run shows and retries.

The stages of train-ddp, ddp_task, and what joins them with blocks, clusters and the run's storage.
Prefect is imported here and in flow.py alone; torch never is: flows and Dask workers would load it.
"""

from prefect_torch_ddp.tasks.forks import mend_forks

mend_forks()
