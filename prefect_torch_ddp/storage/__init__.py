"""Storages: a directory, or a prefix of an S3 bucket, behind one small protocol.

`protocol` says what a storage must do and how to add one, `locate` which text names which storage.
Only `errors` lies below: nothing of Prefect, Dask or torch comes in.
"""
