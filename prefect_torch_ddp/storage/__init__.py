"""Storages: a directory, or a prefix of an S3 bucket, behind one small protocol.

`protocol` says what a storage must do and how to add one; `locate` makes storages from strings.
Only `errors` lies below: Prefect, Dask and torch are never imported here.
"""
