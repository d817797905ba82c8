"""The command `prefect-torch-ddp`: what people type, as thin functions over the public names.

`app` collects the commands and prints their errors; `options` and `failures` serve the others. Each
other module has the commands of one topic and is named by the first of them, even if a module that
the command calls has that name too (`runs`, `sync`). Nothing heavy is imported at the top of a
module: `--help` loads neither torch nor Prefect. Nothing else in the package uses this folder.
"""
