"""Dask Bags as datasets: a partition of dicts as Parquet, one of NumPy arrays as a .npy file.

`data.tables` and `data.arrays` read them. Nothing here loads Dask or torch.
"""
