"""Records: of each rank its metrics, times, ledger of samples and logs; of each run its own.

Each rank writes its own in parts, as JSON lines; anyone reads them. The files that user code saves
are here, too. Nothing here loads torch, Prefect or Dask.
"""
