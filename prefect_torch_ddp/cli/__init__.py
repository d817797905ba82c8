"""The command `prefect-torch-ddp`: what people type, as thin functions over the public names.

`app` collects the commands and prints their errors; each other module has the commands of one
topic. Nothing heavy is imported at the top of a module: `--help` loads neither torch nor Prefect.
Nothing else in the package uses this folder.
"""
