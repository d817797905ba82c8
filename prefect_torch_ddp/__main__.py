"""`python -m prefect_torch_ddp` is the command `prefect-torch-ddp`."""

from prefect_torch_ddp.cli.app import main

main()
