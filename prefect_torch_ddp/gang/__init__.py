"""Gangs on a Dask cluster: place, start, supervise and stop ranks."""
