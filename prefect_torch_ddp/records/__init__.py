"""Records of ranks: metrics and the ledger of samples, as JSON lines in the storage.

Each rank writes its own in parts; anyone reads them. Nothing here loads torch, Prefect or Dask.
"""
