"""Prefect tasks: what a flow run shows and retries."""

from prefect_torch_ddp.tasks.forks import mend_forks

mend_forks()
