"""`prefect-torch-ddp doctor`: looks at a cluster and a storage, and says what would break a gang.

`main` runs on the caller's side, `on_worker` on each Dask worker.
Nothing else of the package uses this folder.
"""
