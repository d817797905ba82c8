"""What `array()` is given, opened: NumPy's arrays, .npy files, Zarr groups and xarray.

Only `gridded` and `store` load zarr and xarray. Nothing here knows of samples or batches.
"""
