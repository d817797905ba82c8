"""`prefect-torch-ddp doctor`: checks a cluster and a storage, and says what would break a gang.

`examine` runs on the caller's side, `on_worker` on each Dask worker.
Only the command line (`cli/`) uses this folder.
"""
