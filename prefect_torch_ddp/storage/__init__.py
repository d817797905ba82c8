"""Storages: a directory, a prefix of an S3 bucket, or another package's, with one base class.

`protocol` has the methods that a storage needs; `locate` makes storages from strings. No other
folder asks which class a storage has. Only `errors` and `lazy` lie below: Prefect, Dask and torch
are never imported here.
"""
