"""Parquet tables in folders and buckets: files, columns, the order of rows, batches.

`table()` imports the modules that load pyarrow when it is called. Only the reader knows about
ranks: it is given a rank's shares of the global batches.
"""
