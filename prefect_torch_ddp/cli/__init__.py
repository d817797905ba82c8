"""The command `prefect-torch-ddp`: what people type, as thin functions over the public names.

`app` has the commands and says what an error looks like; each other module has the commands of one
topic. Nothing heavy is imported at the top of a module: `--help` loads neither torch nor Prefect,
and nothing else of the package uses this folder.
"""
