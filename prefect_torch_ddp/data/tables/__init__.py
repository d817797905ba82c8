"""Parquet tables anywhere: their files, their columns, the order of their rows, batches of them.

Only what `table()` imports when it is called loads pyarrow. Nothing here knows of ranks but the
reader, which is given a rank's shares of the global batches.
"""
